# SPDX-License-Identifier: Apache-2.0
"""FedSM: a global model, softly pulled personal models, and a selector between them (Xu et al., CVPR 2022)."""

from medpfl.methods.fedsm.extra import FedSMEnsemble, FedSMExtra
from medpfl.methods.fedsm.method import FedSM
from medpfl.methods.fedsm.personalised import FedSMPersonalised
from medpfl.methods.fedsm.super_model import SuperModel

__all__ = ["FedSM", "FedSMEnsemble", "FedSMExtra", "FedSMPersonalised", "SuperModel"]

for _kind in (FedSM, FedSMEnsemble, FedSMExtra, FedSMPersonalised, SuperModel):
    _kind.__module__ = __name__  # jobs, model files and allow lists know one name of a class: its folder's
