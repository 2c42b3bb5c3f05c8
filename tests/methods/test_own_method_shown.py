# SPDX-License-Identifier: Apache-2.0
"""A method of another package that is shown all hospitals' models in every round, as FedFomo is."""

import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from baselines import assert_resumes
from medpfl.core.groups import under
from medpfl.core.mixers import Mean, SoftPull
from medpfl.core.tied import call_with
from medpfl.methods.contract import Build, Site
from medpfl.rounds.hospital import local_rounds
from own_method import Ours
from small_jobs import small_job, write_table_sites
from tools import pieces, ready, round_of


@dataclass(frozen=True, kw_only=True)
class Fomo(Ours):
    """Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021: a hospital weighs
    all models by what they gain on its own cases, and begins the next round with their weighted sum."""

    deploys: ClassVar = {"mine": "own"}
    shown: ClassVar = ("model",)
    refined: ClassVar = ("told",)

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network(), "own": build.network(), "told": nn.Linear(1, 1)}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {name: under(models, name) for name in ("model", "told")}

    def components(self) -> dict[str, Mean | SoftPull]:
        return {"model": SoftPull(lam=1.0), "told": Mean()}

    def local_round(self, site: Site) -> None:
        site.models["model"].load_state_dict(site.models["own"].state_dict())
        site.fit("model")

    def refinements(self, round_number: int, rounds: int) -> int:
        return 2

    def refine(self, site: Site, step: int) -> None:
        own, samples = site.models["own"].eval(), site.data.splits["validation"]
        states = [
            {key.removeprefix("model."): tensor for key, tensor in state.items()} for state in site.shown["model"]
        ]

        def loss(state: dict[str, Tensor]) -> Tensor:
            with torch.no_grad():
                return site.task.loss(call_with(own, state, samples.inputs[:]), samples.targets[:])

        weights = torch.stack([-loss(state) for state in states]).softmax(dim=0)
        mixed = {
            key: sum(weight * state[key] for weight, state in zip(weights, states, strict=True)) for key in states[0]
        }
        own.load_state_dict(mixed)


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, Path]:
    return write_table_sites(tmp_path / "sites", ["anna", "berta"])


class Models(dict[str, list[dict[str, Tensor]]]):
    """Of which one can ask whether anybody has them still."""


def test_the_models_of_earlier_rounds_are_given_back(
    sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hospital held all hospitals' models of every round until the job's end."""
    taken: list[weakref.ref[Models]] = []
    take_shown = local_rounds.take_shown

    def noted(*given: object) -> Models:
        found = Models(take_shown(*given))  # type: ignore[arg-type]
        taken.append(weakref.ref(found))
        return found

    monkeypatch.setattr(local_rounds, "take_shown", noted)
    coordinator, runners = pieces(small_job(4, {}, Fomo(batch_size=8)), sites, tmp_path)
    ready(coordinator, runners)
    for number in (1, 2, 3):
        round_of(coordinator, runners, number)
    gc.collect()
    assert len(taken) == 6 and sum(ref() is not None for ref in taken) <= 2
    for site, message in coordinator.rounds.train_messages(4, list(runners)).items():
        runners[site].handle(message)
    gc.collect()
    assert not any(ref() is not None for ref in taken)


@pytest.mark.slow
def test_it_resumes(sites: dict[str, Path], tmp_path: Path) -> None:
    assert_resumes(lambda: small_job(4, {}, Fomo(batch_size=8)), sites, tmp_path)
