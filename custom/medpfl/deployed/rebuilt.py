# SPDX-License-Identifier: Apache-2.0
"""Whether a method's models could be read again: their files are, where no hospital's data are at hand."""

from torch import nn

from medpfl.component import spec_of
from medpfl.core.errors import ConfigError
from medpfl.core.tied import own_state
from medpfl.data.samples import SiteData
from medpfl.deployed.model_file import Recipe, build_networks, differing_entry, predicting
from medpfl.methods.contract import Method
from medpfl.tasks.contract import Task


def check_rebuilt(method: Method, networks: nn.ModuleDict, task: Task, data: SiteData, hospitals: int) -> None:
    """Refuse a method whose networks are otherwise shaped at a hospital at work than where its model's file is read.

    It would train for all its rounds, and leave files that nothing reads.

    Args:
        networks: the method's, as a job starts with them here; ``data``: what they were built of.

    Raises:
        ConfigError: naming the entry, or with the reason why they cannot be built without cases.
    """
    shape = list(data.input_shape)
    name = next(iter(method.deploys))
    recipe = Recipe(
        method=spec_of(method), task=spec_of(task), deployed=name, classes=data.class_names, input_shape=shape,
        hospitals=hospitals,
    )  # fmt: skip
    again = build_networks(method, task, recipe, sum(tensor.numel() for tensor in own_state(networks).values()))
    differing = {
        key: found
        for key, network in networks.items()
        if (found := differing_entry(again[key], network.state_dict()) if key in again else "it is missing")
    }
    if not differing:
        return
    for name in method.deploys:
        for key in predicting(method, name, networks, shape):
            if key in differing:
                raise ConfigError(
                    f"{type(method).__name__} has a network '{key}' of another shape at this hospital than where a "
                    f"file of its model '{name}' is read, which knows no cases ({differing[key]}): take lengths from "
                    "the method's arguments, the shape of an input, the classes and the number of hospitals alone"
                )
