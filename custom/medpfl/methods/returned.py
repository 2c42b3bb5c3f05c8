# SPDX-License-Identifier: Apache-2.0
"""What a method gives when it is asked, if it is that: a class of another package may give anything."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError, shown
from medpfl.core.mixers import Mixer, NoDefault
from medpfl.core.seeding import seed_torch
from medpfl.data.samples import Samples
from medpfl.methods.contract import Build, Method


def networks_of(method: Method, build: Build) -> dict[str, nn.Module]:
    """The networks that it makes. Those that it does not make by ``build`` begin with weights of the job's seed, too.

    Raises:
        ConfigError: it gives something else than networks by their names.
    """
    seed_torch(build.seed, "initial weights")
    made: object = method.models(build)
    if not isinstance(made, Mapping | nn.ModuleDict):
        raise _wrong(method, "models", "a dictionary of networks by their names", made)
    for name, network in made.items():
        if not isinstance(network, nn.Module):
            raise _wrong(method, "models", f"a network as '{name}'", network)
        if not isinstance(name, str) or not name or "." in name:
            raise _wrong(method, "models", "names of networks without a point", name)
    return dict(made.items())


def slots_of(method: Method, models: nn.ModuleDict) -> dict[str, list[str]]:
    """The slots of its networks.

    Raises:
        ConfigError: it gives something else than lists of entries by their slots' names.
    """
    made: object = method.slots(models)
    if not isinstance(made, Mapping):
        raise _wrong(method, "slots", "a dictionary of slots, each a list of entries", made)
    for name, keys in made.items():
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise _wrong(method, "slots", f"a list of entries for slot '{name}'", keys)
    return {name: list(keys) for name, keys in made.items()}


def components_of(method: Method) -> dict[str, Mixer | NoDefault]:
    """Its slots' own components.

    Raises:
        ConfigError: it gives something else than components by their slots' names.
    """
    made: object = method.components()
    if not isinstance(made, Mapping):
        raise _wrong(method, "components", "a dictionary of server components by their slots' names", made)
    for name, mixer in made.items():
        if not isinstance(mixer, Mixer | NoDefault):
            raise _wrong(method, "components", f"a server component for slot '{name}', such as Mean()", mixer)
    return dict(made)


def outbox_of(method: Method, made: object) -> Mapping[str, Mapping[str, Tensor]]:
    """What it puts into ``site.outbox``.

    Raises:
        ConfigError: it is something else than tensors by their entries, by their slots' names.
    """
    if not isinstance(made, Mapping):
        raise _wrong(method, "site.outbox", "a dictionary of slots", made)
    for slot, state in made.items():
        if not isinstance(state, Mapping):
            raise _wrong(method, "site.outbox", f"a dictionary of tensors by their entries for slot '{slot}'", state)
        for key, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise _wrong(method, "site.outbox", f"a tensor for '{key}' of slot '{slot}'", tensor)
    return made


def numbers_of(
    method: Method, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device
) -> dict[str, float]:
    """What it measures of its models.

    Raises:
        ConfigError: it gives something else than the numbers that it names.
    """
    made: object = method.diagnose(models, samples, index, device)
    if not isinstance(made, Mapping):
        raise _wrong(method, "diagnose", "a dictionary of numbers by their names", made)
    for name in made:
        if name not in method.diagnoses:
            raise _wrong(method, "diagnose", "what its 'diagnoses' name and nothing else", name)
    return dict(made)


def _wrong(method: Method, asked: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        f"'{asked}' of {type(method).__name__} must give {expected}; it gives {' '.join(shown(got).split())}"
    )
