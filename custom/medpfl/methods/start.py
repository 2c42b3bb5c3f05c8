# SPDX-License-Identifier: Apache-2.0
"""Start weights: a job's networks begin with those of a checkpoint instead of random ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError, meant
from medpfl.core.frozen import freeze
from medpfl.core.groups import head_of, name_of
from medpfl.core.tied import first_names, load_own_state, own_state

_SHOWN = 3

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The network's, and the checkpoint's."""


@dataclass(frozen=True)
class Start(Checked):
    """The weights from which every hospital's network of the task starts, and those of the references beside it.

    Args:
        checkpoint: name of a checkpoint that every site file declares; all hospitals' must hold the same tensors.
        head: "kept": every tensor must fit. "new": where the checkpoint has another number of classes, the layers whose
            shapes differ for that reason keep the job's random weights.
        frozen: paths of modules that keep the checkpoint's weights, ["input_block", "downsamples.0"] say. They are not
            trained, their BatchNorm keeps its statistics, as other layers what they have in buffers, and they do not
            travel.
    """

    checkpoint: str
    head: Literal["kept", "new"] = "kept"
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Started:
    """``how`` networks start, with the ``tensors`` of the checkpoint."""

    how: Start
    tensors: Mapping[str, Tensor]

    def put_into(self, network: nn.Module) -> nn.Module:
        """Give a network with the job's random weights those of the checkpoint.

        Raises:
            ConfigError: they do not fit, with the tensors' names; or a frozen module is not there, is a new layer, or
                leaves nothing to train.
        """
        state = own_state(network)
        self._check_names(network, state)
        new = self._new(network, state)
        fitting = {key: self.tensors[key] for key in state if key not in new}
        for key, tensor in fitting.items():
            known = tensor.to(state[key].dtype)  # which may end before a number of the checkpoint's
            if tensor.is_floating_point() != state[key].is_floating_point() or not bool(known.isfinite().all()):
                raise ConfigError(
                    f"{self._named}: '{key}' is not of finite numbers of the type {state[key].dtype}, or of another "
                    f"type: {tensor.dtype}"
                )
        self._check_shared(network, state)
        load_own_state(network, {**state, **fitting})
        for path in self.how.frozen:
            _check_frozen(network, path, new)
        freeze(network, self.how.frozen)
        if self.how.frozen and next(network.parameters(), None) is None:
            raise ConfigError(f"{self._named}: 'frozen' leaves nothing of {name_of(network)} to train")
        return network

    @property
    def _named(self) -> str:
        return f"start weights, checkpoint '{self.how.checkpoint}'"

    def _check_names(self, network: nn.Module, state: Mapping[str, Tensor]) -> None:
        lacking = [key for key in state if key not in self.tensors]
        beyond = [key for key in self.tensors if key not in network.state_dict()]
        told = [f"it lacks {_listed(lacking)}"] if lacking else []
        told += [f"it has {_listed(beyond)}, which the network has not"] if beyond else []
        if told:
            raise ConfigError(
                f"{self._named} is of another network than the job's {name_of(network)}: {'; '.join(told)}"
            )

    def _check_shared(self, network: nn.Module, state: Mapping[str, Tensor]) -> None:
        """A checkpoint may be of a network whose layers share nothing: of two tensors one would be lost."""
        for key, first in first_names(network).items():
            if key != first and key in self.tensors:
                one, other = (self.tensors[name].to(state[first].dtype) for name in (first, key))
                if not torch.equal(one, other):
                    raise ConfigError(
                        f"{self._named}: '{first}' and '{key}' differ, and layers of the job's {name_of(network)} "
                        "share them as one tensor"
                    )

    def _new(self, network: nn.Module, state: Mapping[str, Tensor]) -> set[str]:
        """The entries of layers that start anew, because the checkpoint has another number of classes."""
        shapes: dict[str, Shapes] = {
            key: (tuple(tensor.shape), tuple(self.tensors[key].shape))
            for key, tensor in state.items()
            if tensor.shape != self.tensors[key].shape
        }
        if not shapes:
            return set()
        shown = [f"'{key}' ({list(ours)} here, {list(theirs)} there)" for key, (ours, theirs) in shapes.items()]
        if not _by_classes_alone(network, shapes):
            raise ConfigError(f"{self._named} does not fit the job's {name_of(network)}: {_told(shown)}")
        if self.how.head != "new":
            raise ConfigError(
                f"{self._named} has another number of classes: {_told(shown)}; with head 'new' these layers start with "
                "random weights"
            )
        layers = {key.rpartition(".")[0] for key in shapes}
        return {key for key in state if key.rpartition(".")[0] in layers}


def _by_classes_alone(network: nn.Module, shapes: Mapping[str, Shapes]) -> bool:
    """Whether all differ by the same two numbers, and the network's head is among them."""
    pairs = set()
    for ours, theirs in shapes.values():
        if len(ours) != len(theirs):
            return False
        pairs |= {pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]}
    try:
        head = head_of(network)
    except ConfigError:  # a single layer
        return len(pairs) == 1
    return len(pairs) == 1 and any(key.rpartition(".")[0] == head for key in shapes)


def _check_frozen(network: nn.Module, path: str, new: set[str]) -> None:
    modules = dict(network.named_modules())
    if not path or path not in modules:
        children = ", ".join(name for name, _ in network.named_children())
        raise ConfigError(
            f"start's frozen: {name_of(network)} has no module '{path}'; its children are: {children}"
            f"{meant(path, modules)}"
        )
    if not modules[path].state_dict():
        raise ConfigError(f"start's frozen: the module '{path}' of {name_of(network)} holds no weights")
    if fresh := [key for key in new if key.startswith(f"{path}.")]:
        raise ConfigError(f"start's frozen: '{path}' holds {_listed(sorted(fresh))}, which starts with random weights")


def _listed(keys: Sequence[str]) -> str:
    return _told([f"'{key}'" for key in keys])


def _told(shown: Sequence[str]) -> str:
    more = len(shown) - _SHOWN
    return ", ".join(shown[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
