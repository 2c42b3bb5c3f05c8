# SPDX-License-Identifier: Apache-2.0
"""What the tensors that a hospital sends may be."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from medpfl.core.digest import digest_of
from medpfl.core.errors import RefusedUpdate
from medpfl.core.mapped import PIECE, Passing, pieces
from medpfl.rounds.messages import SEPARATOR, Slots, flatten, table

LARGEST = 1e18
"""No value is larger in magnitude: its square still fits float32, so that no component computes infinities of it."""

ROUNDED = 0.01
"""So far probabilities may be off: a hospital's own filter may round them, to a half-precision type, say."""

Table = Mapping[str, Mapping[str, list[Any]]]
"""As ``messages.table`` makes it: slot to entry to shape and type."""


def check_update(site: str, slots: Slots, expected: Table, buffers: Collection[str] = ()) -> None:
    """An update must have exactly the expected slots, entries, shapes and types, each entry an array of its own, and
    values as ``check_values`` wants.

    Raises:
        RefusedUpdate: naming the hospital, the entry, expected and got.
    """
    _check_table(site, slots, expected)
    _check_apart(site, slots)
    check_values(site, slots, buffers)


def _check_table(site: str, slots: Slots, expected: Table) -> None:
    got = table(slots)
    for slot in {**expected, **got}:
        entries, wanted = got.get(slot, {}), expected.get(slot, {})
        for key in sorted(wanted.keys() ^ entries.keys()):
            what = "is missing" if key in wanted else "was not asked for"
            raise RefusedUpdate(f"{site}: entry '{slot}{SEPARATOR}{key}' {what}")
        for key, (shape, dtype) in wanted.items():
            if entries[key] != [shape, dtype]:
                raise RefusedUpdate(
                    f"{site}: entry '{slot}{SEPARATOR}{key}': expected shape {shape} {dtype}, "
                    f"got {entries[key][0]} {entries[key][1]}"
                )


def _check_apart(site: str, slots: Slots) -> None:
    """An array that stands twice in a message is sent once, and models are mixed in place: where a mean for all is put
    into these arrays, one entry of everybody's model would become another one."""
    found: dict[int, str] = {}
    for name, tensor in flatten(slots).items():
        if tensor.numel() and (other := found.setdefault(tensor.data_ptr(), name)) != name:
            raise RefusedUpdate(f"{site}: entries '{other}' and '{name}' are one array")


def check_values(site: str, slots: Slots, buffers: Collection[str] = ()) -> None:
    """Finite values of a size that can be computed with, and no negative variances.

    Args:
        buffers: entries that are not trained: BatchNorm's statistics among them, whose variances torch calls
            ``running_var``.

    Raises:
        RefusedUpdate: naming the hospital and the entry.
    """
    for slot, state in slots.items():
        for key, tensor in state.items():
            where = f"{site}: entry '{slot}{SEPARATOR}{key}'"
            if tensor.is_complex():
                raise RefusedUpdate(f"{where} holds complex numbers")
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            for (part,) in pieces(tensor):
                least, largest = (float(value) for value in torch.aminmax(part))
                if not (-torch.inf < least and largest < torch.inf):  # NaN is neither
                    raise RefusedUpdate(f"{where} holds NaN or infinite values")
                if max(-least, largest) > LARGEST:
                    raise RefusedUpdate(f"{where} holds values beyond {LARGEST:g}")
                if key in buffers and key.rpartition(".")[2] == "running_var" and least < 0:
                    raise RefusedUpdate(f"{where} holds a negative variance")


def check_probabilities(site: str, slots: Slots, names: Collection[str]) -> None:
    """Where a method sends probabilities, N x C x ..., what a hospital sends is some.

    Args:
        slots: of finite values, as ``check_update`` takes them.
        names: the slots that hold probabilities; those that did not travel are left alone.

    Raises:
        RefusedUpdate: naming the hospital and the entry.
    """
    passing = Passing()
    for slot in sorted(slots.keys() & set(names)):
        for key, tensor in slots[slot].items():
            if not tensor.numel():
                continue
            for rows in torch.split(tensor, max(1, PIECE // tensor[0].numel())):
                sums = rows.sum(dim=1, dtype=torch.float64)
                off = max(float((sums - 1).abs().max()), -float(rows.min()), float(rows.max()) - 1)
                passing.over(rows)
                if off > ROUNDED:
                    raise RefusedUpdate(
                        f"{site}: entry '{slot}{SEPARATOR}{key}' holds what are no probabilities: each must be between "
                        f"0 and 1, and those of a sample must sum to 1, up to {ROUNDED:g}"
                    )
    passing.end()


def check_statistics(site: str, given: Slots, names: list[str], expected: Table) -> None:
    """Statistics are float64 tensors of finite values under the names asked for.

    Args:
        expected: as most hospitals have it.

    Raises:
        RefusedUpdate: naming the hospital, the entry, expected and got.
    """
    if sorted(given) != names:
        raise RefusedUpdate(f"{site}: expected the statistics {', '.join(names)}, got {', '.join(sorted(given))}")
    for name, entries in given.items():
        for key, tensor in entries.items():
            if tensor.dtype != torch.float64 or not torch.isfinite(tensor).all():
                raise RefusedUpdate(f"{site}: statistic '{name}{SEPARATOR}{key}' must hold finite float64 values only")
    check_update(site, given, expected)


def most_common(sent: Iterable[Slots]) -> Table:
    """The shapes and types that most hospitals sent; of equally many, the first; empty if nobody sent any."""
    tables = [table(slots) for slots in sent]
    counts = Counter(digest_of(one) for one in tables)
    return max(tables, key=lambda one: counts[digest_of(one)], default={})
