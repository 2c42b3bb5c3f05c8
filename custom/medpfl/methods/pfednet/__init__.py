# SPDX-License-Identifier: Apache-2.0
"""pFedNet: part of the network is averaged, the other part is drawn towards that of similar hospitals."""

from medpfl.methods.pfednet.method import PFedNet

__all__ = ["PFedNet"]

PFedNet.__module__ = __name__  # jobs, model files and allow lists know one name of a class: its folder's
