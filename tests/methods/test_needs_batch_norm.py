# SPDX-License-Identifier: Apache-2.0
"""Methods about BatchNorm refuse a network without it, by a sentence that names both; all others take any norm."""

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
from torch import nn

import medpfl.methods
from medpfl.core.errors import ConfigError
from medpfl.methods.contract import Method
from medpfl.methods.divergence import largest
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedap.feature_statistics import running_moments
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedbn import FedBN
from medpfl.methods.pfednet import PFedNet
from medpfl.models.contract import Architecture
from medpfl.models.dynunet import DynUNet
from medpfl.models.transformers import ViT
from medpfl.models.unet import UNet, UNetPlusPlus

WITHOUT: list[tuple[Architecture, str]] = [
    (UNet((2, 4), norm="instance"), "UNet"),
    (UNet((2, 4), norm="group"), "UNet"),
    (DynUNet((2, 2, 2)), "DynUNetLevels"),
    (UNetPlusPlus((1, 1, 2, 2, 2, 1), norm="group"), "BasicUNetPlusPlus"),
    (ViT(8, 4, 4, 1, 1), "ViT"),
]
ABOUT: list[tuple[Method, str]] = [
    (FedBN(), "FedBN"),
    (FedAP(), "FedAP"),
    (PFedNet(local_statistics=True), "PFedNet's local_statistics"),
    (PFedNet(personal_types=("BatchNorm2d",)), "PFedNet's personal_types"),
]


def networks(architecture: Architecture) -> nn.ModuleDict:
    return nn.ModuleDict({"model": architecture.build((1, 32, 32), 2)})


@pytest.mark.parametrize(("architecture", "network"), WITHOUT, ids=[str(one) for one, _ in WITHOUT])
@pytest.mark.parametrize(("method", "name"), ABOUT, ids=[name for _, name in ABOUT])
def test_refused_with_both_names(method: Method, name: str, architecture: Architecture, network: str) -> None:
    with pytest.raises(ConfigError, match=f"network {network}\\b") as error:
        method.slots(networks(architecture))
    assert name in str(error.value) and "BatchNorm" in str(error.value)


def test_f_fedap_too() -> None:
    with pytest.raises(ConfigError, match="f-FedAP compares BatchNorm's running statistics, and the network UNet has"):
        running_moments(networks(UNet((2, 4), norm="group"))["model"])


@pytest.mark.slow
def test_no_other_method_asks_for_it() -> None:
    """Every method of one network called "model", or of the same name as its slot, with its defaults."""
    refusing, tried = set(), set()
    for info in pkgutil.walk_packages(medpfl.methods.__path__, "medpfl.methods."):
        for kind in vars(importlib.import_module(info.name)).values():
            if not (isinstance(kind, type) and issubclass(kind, Method) and not inspect.isabstract(kind)):
                continue
            required = [one for one in inspect.signature(kind).parameters.values() if one.default is one.empty]
            if required or not hasattr(kind, "deploys"):
                continue
            models = nn.ModuleDict({name: UNet((2, 4), norm="group").build((1, 8, 8), 2) for name in _names(kind)})
            try:
                kind().slots(models)
                tried.add(kind.__name__)
            except (KeyError, AttributeError):
                continue  # it has networks of its own beside the task's
            except ConfigError as error:
                if "BatchNorm" in str(error):
                    refusing.add(kind.__name__)
    assert refusing == {"FedBN", "FedAP"} and len(tried) >= 10


def _names(kind: Any) -> set[str]:
    return {"model", *kind.deploys.values(), *kind().components()}


def test_instance_norm_travels_in_fedavg() -> None:
    models = nn.ModuleDict({"fedavg": UNet((2, 4), norm="instance").build((1, 8, 8), 2)})
    assert set(FedAvg().slots(models)["fedavg"]) == set(models.state_dict())


def test_methods_that_learn_from_outputs_take_the_largest_map() -> None:
    network = DynUNet((2, 2, 2, 2), deep_supervision=True).build((1, 32, 32), 2)
    assert largest(network(torch.zeros(2, 1, 32, 32))).shape == (2, 2, 32, 32)
    assert largest(network.eval()(torch.zeros(2, 1, 32, 32))).shape == (2, 2, 32, 32)
