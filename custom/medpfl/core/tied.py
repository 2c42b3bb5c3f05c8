# SPDX-License-Identifier: Apache-2.0
"""Tensors that a network holds under several names, because layers share them: they count, travel and are kept once.

``state_dict`` lists such a tensor under each of its names. Here it has the first of them, in the network's own order,
and is put back under all.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.func import functional_call

from medpfl.core.errors import ConfigError


def first_names(root: nn.Module) -> dict[str, str]:
    """Every state-dict key to the first key of the same tensor: itself, unless the tensor came before."""
    return _first_names(root.state_dict(keep_vars=True))


def _first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {key: first.setdefault(id(tensor), key) for key, tensor in state.items()}


def own_state(root: nn.Module) -> dict[str, Tensor]:
    """``root.state_dict()`` with every tensor once."""
    state = root.state_dict(keep_vars=True)
    first = _first_names(state)
    return {key: tensor.detach() for key, tensor in state.items() if first[key] == key}


def load_own_state(root: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load what ``own_state`` gave, or ``state_dict``.

    Raises:
        RuntimeError: torch's: an entry is missing, too many or of another shape.
    """
    first = first_names(root)
    again = {key: tensors[name] for key, name in first.items() if key not in tensors and name in tensors}
    root.load_state_dict({**tensors, **again})


def once(root: nn.Module, slots: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The slots with every tensor once.

    Raises:
        ConfigError: a tensor is in a slot by one of its names, and by another in another slot or private.
    """
    first = first_names(root)
    owner = {key: slot for slot, keys in slots.items() for key in keys}
    for key, name in first.items():
        if owner.get(key) != owner.get(name):
            places = " and ".join(f"'{k}' {_place(owner.get(k))}" for k in (name, key))
            raise ConfigError(f"two names of one tensor, which layers share, must stay together: {places}")
    return {slot: [key for key in keys if first.get(key, key) == key] for slot, keys in slots.items()}


def _place(slot: str | None) -> str:
    return "is private" if slot is None else f"is in slot '{slot}'"


def call_with(network: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """``torch.func.functional_call`` with tensors that stand under the first of their names.

    Torch ties the other names itself, but where a whole layer has several, it exchanges the layer's tensor twice and
    leaves the given one behind.
    """
    places: set[tuple[int, str]] = set()
    given = {}
    for key, name in first_names(network).items():
        path, _, entry = key.rpartition(".")
        place = (id(network.get_submodule(path)), entry)
        if name in tensors and place not in places:
            places.add(place)
            given[key] = tensors[name]
    outputs: Tensor = functional_call(network, given, (inputs,), tie_weights=False)
    return outputs
