# SPDX-License-Identifier: Apache-2.0
"""Lengths of updates are looked at in float32 first: what is told and shortened is what float64 says."""

import math

import pytest
import torch

from medpfl.rounds.messages import Slots
from medpfl.rounds.server import bounds
from medpfl.rounds.server.bounds import Far, bound

SITES = ("anna", "berta", "clara", "dora")


def found(
    factors: tuple[float, ...], limit: float | None, kind: torch.dtype = torch.float32
) -> tuple[list[Far], list[torch.Tensor]]:
    """Updates of these lengths, in units of one, from models that are larger than they are."""
    generator = torch.Generator().manual_seed(1)
    held: dict[str, Slots] = {}
    sent: dict[str, Slots] = {}
    for site, factor in zip(SITES, factors, strict=True):
        base = (
            torch.zeros(3, 50, dtype=kind) if min(factors) < 1e-6 else torch.randn(3, 50, generator=generator).to(kind)
        )
        step = torch.randn(3, 50, generator=generator)
        held[site] = {"model": {"weight": base}}
        sent[site] = {"model": {"weight": base + (factor * step / step.norm()).to(kind)}}
    told = bound(["model"], sent, held, (), (), limit)
    return told, [answer["model"]["weight"] for answer in sent.values()]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("limit", [None, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    "factors",
    [
        (1.0, 1.1, 0.9, 1.2),
        (1.0, 1.0, 1.0, 10.001),
        (1.0, 1.0, 1.0, 9.999),
        (1.0, 1.0, 1.0, 2.001),
        (0.0, 1.0, 1.0, 1.0),
        (0.0, 0.0, 0.0, 1.0),
        (0.0, 0.0, 0.0, 0.0),
        (1e-25, 1e-25, 1e-25, 1e-23),
        (1e17, 1e17, 1e17, 1.5e18),
    ],
)
def test_it_is_what_float64_says(
    factors: tuple[float, ...], limit: float | None, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = found(factors, limit, kind)
    monkeypatch.setattr(bounds.Update, "about", math.nan)
    exact = found(factors, limit, kind)
    assert quick[0] == exact[0]
    assert all(torch.equal(one, other) for one, other in zip(quick[1], exact[1], strict=True))


def test_where_nothing_is_far_float64_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is for: a third of the work."""

    def asked(update: bounds.Update) -> float:
        raise AssertionError

    monkeypatch.setattr(bounds.Update, "length", property(asked))
    assert found((1.0, 1.1, 0.9, 1.2), None)[0] == []
    assert found((1.0, 1.1, 0.9, 1.2), 2.0)[0] == []
    with pytest.raises(AssertionError):
        found((1.0, 1.1, 0.9, 3.0), 2.0)
