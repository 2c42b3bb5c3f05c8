# SPDX-License-Identifier: Apache-2.0
"""A job made in Python holds what its files could hold, and nothing else."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Build, Method, Site
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job, write_table_sites
from tools import pieces, ready


@pytest.mark.parametrize("name", ["train_timeout", "init_timeout", "grace"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_times_are_finite(name: str, value: float) -> None:
    """JSON has no infinity: such a job could be written and not be read."""
    with pytest.raises(ConfigError, match=f"(the controller's|argument) '?{name}'?( of Settings)? must be"):
        Settings(rounds=1, **{name: value})


def test_a_job_needs_somebody() -> None:
    with pytest.raises(ConfigError, match="min_clients must be at least 1, got 0"):
        small_job(1, min_clients=0)


@dataclass(frozen=True, kw_only=True)
class Named(Method):
    """FedAvg under names of one's own."""

    slot: ClassVar[str] = "ours"
    deploys: ClassVar = {"common": "model"}

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {self.slot: under(models, "model")}

    def components(self) -> dict[str, Mixer]:
        return {self.slot: Mean()}

    def local_round(self, site: Site) -> None:
        site.fit("model")


@pytest.mark.parametrize("references", [("local", "fedavg"), ()])
@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"slot": "local"}, "Renamed calls a slot 'local', as the reference Local has it: rename it"),
        ({"slot": "fedavg"}, "Renamed calls a slot 'fedavg', as the reference FedAvg has it: rename it"),
        ({"deploys": {"local": "model"}}, "Renamed calls a model or a number 'local', as the reference Local has it"),
        ({"deploys": {"fedavg_finetuned": "model"}}, "'fedavg_finetuned', as the reference FedAvg has it: rename it"),
        ({"deploys": {"average": "model"}}, "Renamed calls a model 'average', as the average of all models is called"),
        ({"diagnoses": ("fedavg",)}, "Renamed calls a model or a number 'fedavg', as the reference FedAvg has it"),
        ({"diagnoses": ("common",)}, "Renamed calls a number 'common', as it calls a model: rename it"),
        ({}, None),
    ],
)
def test_a_method_has_names_of_its_own(named: dict[str, Any], said: str | None, references: tuple[str, ...]) -> None:
    """A slot called "local" was the reference's at the hospitals: the server averaged what should be local training."""
    kind = type("Renamed", (Named,), named)
    settings = Settings(rounds=1, references=references)
    if said is None:
        Job("small", 1, settings, {}, kind(), Tabular("blood"))
        return
    with pytest.raises(ConfigError, match=said):
        Job("small", 1, settings, {}, kind(), Tabular("blood"))


def test_a_method_deploys_networks_that_it_has(tmp_path: Path) -> None:
    """One that it has not ended in a KeyError in round 2, or in a sentence about slots."""
    with pytest.raises(ConfigError, match="Bare has no 'deploys': what its models are called, each with the network"):
        type("Bare", (Named,), {"deploys": {}})()
    method = type("Misspelt", (Named,), {"deploys": {"common": "modle"}})()
    job = Job("small", 1, Settings(rounds=1), {}, method, Tabular("blood"))
    coordinator, runners = pieces(job, write_table_sites(tmp_path, ["anna", "berta"]), tmp_path)
    said = "Misspelt deploys 'common' from its network 'modle', which it does not have; its networks are: model"
    with pytest.raises(ConfigError, match=said):
        ready(coordinator, runners)
