# SPDX-License-Identifier: Apache-2.0
"""MedPFL: personalised federated learning for hospitals, on NVIDIA FLARE."""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "medpfl.api": (
        "ComparisonResult", "DataCheck", "JobResult", "Model", "Svg", "check_data", "compare", "load_job", "load_model",
        "load_result", "simulate",
    ),
    "medpfl.core.errors": ("MedPFLError",),
    "medpfl.data.site_file": ("SiteFile", "load_site_file"),
    "medpfl.flare.recipes": (
        "CusFLRecipe", "FedAPRecipe", "FedSMRecipe", "MHpFLIDRecipe", "MedPFLRecipe", "PFedNetRecipe",
    ),
    "medpfl.job": ("Job",),
    "medpfl.job.settings": ("Settings",),
    "medpfl.methods.cusfl": ("CusFL",),
    "medpfl.methods.fedap": ("FedAP",),
    "medpfl.methods.fedsm": ("FedSM",),
    "medpfl.methods.mh_pflid": ("MHpFLID",),
    "medpfl.methods.pfednet": ("PFedNet",),
    "medpfl.methods.softpull": ("SoftPull",),
    "medpfl.tasks": (
        "Classification", "MultiLabel", "PartlyLabelled", "RegionSegmentation", "Regression", "Segmentation",
        "Survival", "Tabular", "TimeSeries",
    ),
}  # fmt: skip
"""Module to the public names that are imported from it when they are first asked for: a hospital's processes import
``medpfl`` too, and need none of them."""
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'medpfl' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
