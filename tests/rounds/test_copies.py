# SPDX-License-Identifier: Apache-2.0
"""What the server's components mix and remember is the same in memory and in files, bit for bit, whoever answers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from medpfl.core.mapped import PIECE, is_mapped
from medpfl.core.mixers import (
    AttentiveMessages,
    ControlVariates,
    CoordinateMedian,
    Mean,
    MeanOfLatest,
    Mixer,
    NetworkProx,
    RelaxedMean,
    ServerAdam,
    SoftPull,
    TrimmedMean,
)
from medpfl.rounds.memory import WANTED
from one_slot import OneSlot

SIZES = {"anna": 3.0, "berta": 1.0, "clara": 0.0, "dora": 2.0}  # clara never joined
K = len(SIZES)
COMPONENTS: dict[str, Callable[[], Mixer]] = {
    "mean": Mean,
    "SoftPull": lambda: SoftPull(lam=0.6),
    "newest": MeanOfLatest,
    "controls": ControlVariates,
    "relaxed": lambda: RelaxedMean(beta=0.3),
    "trimmed": lambda: TrimmedMean(trim=0.3),
    "median": CoordinateMedian,
    "attentive": lambda: AttentiveMessages(alpha=0.1, sigma=1.0),
    "prox": lambda: NetworkProx(tau=0.1, graph="complete"),
    "prox, partial": lambda: NetworkProx(tau=0.1, s=0.4, graph="complete"),
    "prox, partial, p = 1": lambda: NetworkProx(tau=0.1, s=0.4, p=1, graph="complete"),
    "Adam": ServerAdam,
}


def model(seed: int, component: str, large: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {"a": torch.randn(7, 5, generator=generator), "b": torch.randn((), generator=generator)}
    if large:
        made["c"] = torch.randn(PIECE // 2 + 11, generator=generator)
    return made if component in ("Adam", "controls") else {**made, "steps": torch.tensor(seed)}


def rounds_of(component: str, folder: Path, seed: int, large: bool = False) -> list[list[dict[str, Tensor]]]:
    """What all are sent after every round; a server that is killed in between goes on with the same."""
    rng = np.random.default_rng(seed)
    start = {key: tensor * 0 for key, tensor in model(0, component, large).items()}
    server, found = OneSlot(COMPONENTS[component](), start, SIZES, folder), []
    for number in range(3):
        present = [bool(here) and site != "clara" for site, here in zip(SIZES, rng.random(K) < 0.7, strict=True)]
        present[number % 2] = True
        sent = [model(100 * number + k, component, large) for k in range(K)]
        mixed, _ = server.mix(sent, present)
        found.append([{key: tensor.clone() for key, tensor in state.items()} for state in mixed])
        if number == 1:
            server = server.restarted(COMPONENTS[component]())
    lying = [tensor for states in server.copies.stack.values() for state in states for tensor in state.values()]
    assert all(map(is_mapped, lying)) == server.copies.shelf.on_disk
    if component != "Adam":  # which keeps one model and its moments, for all hospitals
        kept = sum(tensor.numel() for tensor in server.mixer.state().values())
        assert kept <= K * K, "a component keeps no models in memory"
    return found


def equal(one: list[list[dict[str, Tensor]]], other: list[list[dict[str, Tensor]]]) -> bool:
    return all(
        torch.equal(a[key].reshape(-1).view(torch.uint8), b[key].reshape(-1).view(torch.uint8))
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
        for key in a
    )


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("seed", range(3))
def test_in_files_as_in_memory(component: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WANTED, "1000")
    first = rounds_of(component, tmp_path / "memory", seed)
    monkeypatch.setenv(WANTED, "0")
    assert equal(first, rounds_of(component, tmp_path / "files", seed))


@pytest.mark.parametrize("component", ["newest", "controls", "relaxed", "trimmed", "prox, partial"])
@pytest.mark.slow
def test_tensors_of_several_pieces(component: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WANTED, "1000")
    first = rounds_of(component, tmp_path / "memory", 0, large=True)
    monkeypatch.setenv(WANTED, "0")
    assert equal(first, rounds_of(component, tmp_path / "files", 0, large=True))


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_remembered_is_what_each_sent_last(
    seed: int, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a list that is kept by hand; whoever was absent, and however often."""
    monkeypatch.setenv(WANTED, "0" if on_disk else "1000")
    rng = np.random.default_rng(seed)
    newest = [torch.zeros(4) for _ in SIZES]
    server = OneSlot(ControlVariates(), {"c": torch.zeros(4)}, SIZES, tmp_path)
    for number in range(5):
        present = list(rng.random(K) < 0.5)
        present[number % K] = True
        sent = [torch.from_numpy(rng.normal(size=4)).float() for _ in SIZES]
        newest = [new if here else old for new, old, here in zip(sent, newest, present, strict=True)]
        mixed, _ = server.mix([{"c": tensor} for tensor in sent], present)
        expected = (torch.stack([tensor.double() for tensor in newest]).sum(0) / K).float()
        for state in mixed:
            torch.testing.assert_close(state["c"], expected, atol=1e-7, rtol=0)
