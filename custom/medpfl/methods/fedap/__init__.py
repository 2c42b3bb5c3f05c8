# SPDX-License-Identifier: Apache-2.0
"""FedAP: BatchNorm stays home, and a hospital hears most of those whose features are distributed like its own."""

from medpfl.methods.fedap.method import FedAP

__all__ = ["FedAP"]

FedAP.__module__ = __name__  # jobs, model files and allow lists know one name of a class: its folder's
