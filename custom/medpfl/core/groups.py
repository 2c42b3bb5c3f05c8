# SPDX-License-Identifier: Apache-2.0
"""Which entries of a state dict belong to which slot: by module path and module type, never by a name such as "bn".

A *slot* is a named group of tensors that one server component mixes. What is in no slot is private to the hospital.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from medpfl.core.errors import ConfigError
from medpfl.core.frozen import has_weights
from medpfl.core.tied import own_state

BATCH_NORM: tuple[type[nn.Module], ...] = (_BatchNorm,)
_NO_HEAD = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.PReLU)


def under(root: nn.Module, path: str = "") -> list[str]:
    """State-dict keys of ``root`` that belong to the module at ``path`` ("" is the whole of it), in their own order.

    Raises:
        ConfigError: no such module, or it holds no tensors.
    """
    try:
        root.get_submodule(path)
    except AttributeError as error:
        children = ", ".join(name for name, _ in root.named_children()) or "none"
        raise ConfigError(f"no module '{path}' in {type(root).__name__}; its children are: {children}") from error
    prefix = f"{path}." if path else ""
    keys = [key for key in root.state_dict() if key.startswith(prefix)]
    if not keys:
        raise ConfigError(f"module '{path or type(root).__name__}' holds no tensors, so it cannot be a slot")
    return keys


def name_of(network: nn.Module) -> str:
    """What kind of network it is, for people."""
    name: str = network._get_name()  # type: ignore[no-untyped-call]
    return name


def of_type(
    root: nn.Module, types: tuple[type[nn.Module], ...], path: str = "", method: str = "this method"
) -> list[str]:
    """State-dict keys under ``path`` that are held by modules of one of ``types`` (their own entries and those below).

    Args:
        method: who needs them, for the message.

    Raises:
        ConfigError: no module of these types is there (a BatchNorm method on a network without BatchNorm, say).
    """
    allowed = set(under(root, path))
    prefixes = [f"{name}." for name, module in root.named_modules(remove_duplicate=False) if isinstance(module, types)]
    keys = [key for key in root.state_dict() if key in allowed and key.startswith(tuple(prefixes))]
    if not keys:
        wanted = " or ".join(t.__name__.lstrip("_") for t in types)
        network = name_of(root.get_submodule(path))
        raise ConfigError(
            f"found no {wanted} layer in the network {network}: {method} needs at least one, so it takes networks that "
            f"have {wanted}"
        )
    return keys


def running_statistics(root: nn.Module, path: str = "", method: str = "this method") -> list[str]:
    """State-dict keys under ``path`` of what BatchNorm layers keep of their inputs: means, variances, counters.

    Args:
        method: who needs them, for the message.

    Raises:
        ConfigError: there is no BatchNorm.
    """
    trained = dict(root.named_parameters(remove_duplicate=False))
    return [key for key in of_type(root, BATCH_NORM, path, method) if key not in trained]


def head_of(network: nn.Module) -> str:
    """Path of the network's head: its last module with parameters of its own that is no normalisation or activation.

    "Last" is the order of definition, for the networks here also that of computation (but for FCN, which adds the
    scores of three layers, and a ResUNet, which adds what its last layer gives to the scores before it):
    the final linear layer of a classifier, the last convolution of a UNet. What a layer's weights are computed of (in
    weight or spectral normalisation, say) is part of that layer.

    Raises:
        ConfigError: the network has no such module below itself, so that there is nothing to split.
    """
    modules = dict(network.named_modules())
    parts = tuple(f"{name}.parametrizations." for name, module in modules.items() if is_parametrized(module))
    found: list[str] = [
        name
        for name, module in modules.items()
        if name
        and not name.startswith(parts)
        and not isinstance(module, _NO_HEAD)
        and (has_weights(module) or is_parametrized(module))
    ]
    if len(found) < 2:
        layers = f"it has {len(found)} layers"
        raise ConfigError(f"{type(network).__name__} cannot be split into a base and a head: {layers}")
    return found[-1]


def base_and_head(root: nn.Module, path: str, head: str | Sequence[str] | None = None) -> tuple[list[str], list[str]]:
    """State-dict keys of the network at ``path``, split in two; ``head`` is a path inside it, or several (None:
    ``head_of``).

    Raises:
        ConfigError: there is no such module, or nothing to split.
    """
    head = head or head_of(root.get_submodule(path))
    paths = [head] if isinstance(head, str) else head
    inside = [key for inner in paths for key in under(root, f"{path}.{inner}")]
    return without(under(root, path), inside), inside


def without(keys: Sequence[str], removed: Iterable[str]) -> list[str]:
    """``keys`` that are not in ``removed``, in their order."""
    gone = set(removed)
    return [key for key in keys if key not in gone]


def check_entries(network: nn.Module) -> None:
    """Every entry of its state is a tensor that it holds, so that what is copied into the entry is in the network; and
    it is a dense array of real numbers that FLARE's arrays can carry, with a place for each of its values, of its own.

    Raises:
        ConfigError: naming the entry.
    """
    own = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for key, tensor in own.items():
        if tensor.layout != torch.strided:
            raise ConfigError(
                f"'{key}' in the network is a sparse tensor, which can neither travel nor be kept: let the network "
                "hold a dense one, and make the sparse one of it where it computes"
            )
    held = {id(tensor) for tensor in own.values()}
    for key, entry in network.state_dict(keep_vars=True).items():
        if is_lazy(entry):
            raise ConfigError(
                f"the shape of '{key}' is known only when the network first runs (its layer is one of torch's lazy "
                "ones): build it for the shape of its inputs"
            )
        if id(entry) not in held:
            raise ConfigError(
                f"'{key}' in the network's state is no parameter or buffer of the network, so it could neither travel "
                "nor be kept: hold it in a buffer, or leave it out of the state"
            )
        if entry.is_complex():
            raise ConfigError(
                f"'{key}' in the network holds complex numbers, which can neither be mixed nor protected by noise: let "
                "the network hold their real and imaginary parts (torch.view_as_real), and make the complex numbers of "
                "them where it computes"
            )
        if entry.dtype == torch.bfloat16:
            raise ConfigError(
                f"'{key}' in the network is bfloat16, which FLARE's arrays cannot carry: let the network hold float32; "
                "a method's precision says in what its training computes"
            )
        if any(size > 1 and step == 0 for size, step in zip(entry.shape, entry.stride(), strict=True)):
            raise ConfigError(
                f"several values of '{key}' in the network's state lie at one place in memory (expand), so that "
                "nothing can be copied into it: let the network hold a copy (clone)"
            )
    _check_memory(network.state_dict(keep_vars=True))


def _check_memory(state: Mapping[str, Tensor]) -> None:
    """No two tensors lie at one place: one could be private, and leave with the other, or be overwritten with it."""
    inside: dict[int, dict[int, tuple[str, Tensor]]] = {}
    for key, tensor in state.items():
        if tensor.numel():
            inside.setdefault(tensor.untyped_storage().data_ptr(), {}).setdefault(id(tensor), (key, tensor))
    for named in (list(each.values()) for each in inside.values() if len(each) > 1):
        owner = torch.full((named[0][1].untyped_storage().nbytes(),), -1)  # of each byte
        for number, (key, tensor) in enumerate(named):
            size = tensor.element_size()
            steps = (*(step * size for step in tensor.stride()), 1)
            mine = owner.as_strided((*tensor.shape, size), steps, tensor.storage_offset() * size)
            if (mine >= 0).any():
                raise ConfigError(
                    f"'{key}' in the network lies in the memory of '{named[int(mine.max())][0]}' and is another "
                    "tensor, so that each would be trained and mixed by itself and overwrite the other: let both be "
                    "one parameter (b.weight = a.weight), or hold a copy (clone)"
                )
            mine.fill_(number)


def check_statistics(network: nn.Module) -> None:
    """Its BatchNorm layers keep what they predict with. One without running statistics goes by the batch that it sees:
    a score is of all cases together, and the model says something else of a patient who comes alone.

    Raises:
        ConfigError: naming the layer.
    """
    for path, module in network.named_modules():
        if isinstance(module, BATCH_NORM) and module.running_mean is None:
            raise ConfigError(
                f"BatchNorm layer '{path}' of the network {name_of(network)} keeps no running statistics "
                "(track_running_stats), so that what is predicted of a case would depend on the cases beside it: let "
                "the layer keep them, or take instance or group norm"
            )


def check_slots(root: nn.Module, slots: Mapping[str, Sequence[str]]) -> None:
    """Every slot has entries, every entry exists, and none belongs to two slots.

    Raises:
        ConfigError: naming the slot and the key.
    """
    known = set(root.state_dict())
    owner: dict[str, str] = {}
    for slot, keys in slots.items():
        if not keys:
            raise ConfigError(f"slot '{slot}' is empty: no tensor was selected for it")
        for key in keys:
            if key not in known:
                raise ConfigError(f"slot '{slot}' names '{key}', which the models do not hold")
            if key in owner:
                raise ConfigError(f"'{key}' is in slot '{owner[key]}' and in slot '{slot}'; it can be in one only")
            owner[key] = slot


def describe(root: nn.Module, slots: Mapping[str, Sequence[str]], travelling: Iterable[str]) -> str:
    """What leaves the hospital and what stays, one line a slot and one a BatchNorm layer: logged at the start of every
    job."""
    state = own_state(root)
    leaves = set(travelling)
    in_leaving = {key for slot in leaves & set(slots) for key in slots[slot]}
    lines = []
    for slot, keys in slots.items():
        size = sum(state[key].numel() for key in keys)
        verb = "travels" if slot in leaves else "stays (its component keeps it at the hospital)"
        lines.append(f"slot '{slot}': {len(keys)} tensors, {size:,} values, {verb}")
    for path, module in root.named_modules():
        if isinstance(module, BATCH_NORM):
            mine = [key for key in state if key.startswith(f"{path}.")]
            verb = "travels" if in_leaving.intersection(mine) else "stays"
            lines.append(f"{type(module).__name__} '{path}' ({module.num_features} channels) {verb}")
    private = [key for key in state if key not in in_leaving]
    lines.append(f"private: {len(private)} tensors, {sum(state[key].numel() for key in private):,} values, never sent")
    return "\n".join(lines)
