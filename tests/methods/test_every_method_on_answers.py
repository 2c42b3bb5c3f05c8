# SPDX-License-Identifier: Apache-2.0
"""Every method with several labels, a number, and the time until an event: it trains and is validated, or it is refused
by one sentence, as docs/tasks.md says."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from answers import declare, table
from baselines import begin
from every_method import EVERY, Small
from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.rounds.loop import ending
from medpfl.tasks import MultiLabel, Regression, Survival
from medpfl.tasks.contract import Task
from tools import follow, round_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks.md"
METHODS = [name for name in EVERY if "," not in name]
"""Each once, without its variants."""
REFUSED = {"FedMD", "DSFL", "FedDF", "KTpFL", "MHpFLID", "MoE", "FedRoD"}


@dataclass(frozen=True)
class Normed(Architecture):
    """Rows through Linear, BatchNorm, ReLU, Linear."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(input_shape[0], 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, outputs))


TASKS: dict[str, Task] = {
    "several": MultiLabel(dataset="ward", architecture=Normed()),
    "value": Regression(dataset="ward", architecture=Normed(), centre=5.0, spread=4.0),
    "survival": Survival(dataset="ward", architecture=Normed(), horizons=(50.0,)),
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """For each answer the site files of two hospitals, who hold the same public rows too."""
    found: dict[str, dict[str, Path]] = {}
    for answer in TASKS:
        folder = tmp_path_factory.mktemp(answer)
        found[answer] = {site: declare(folder, site, answer, rows=40) for site in ("anna", "berta")}
        (folder / "shared.csv").write_text(table(10, 9))
        for file in found[answer].values():
            content = yaml.safe_load(file.read_text())
            own = content["datasets"]["ward"]
            content["datasets"]["shared"] = {**own, "files": ["shared.csv"], "public": True}
            file.write_text(yaml.safe_dump(content))
    return found


def train(small: Small, answer: str, sites: dict[str, Path], folder: Path) -> dict[str, torch.Tensor]:
    """Both hospitals' tensors at the start less those after two rounds; batches are large enough to have events."""
    job = replace(small.job(steps=1, batch_size=12), task=TASKS[answer])
    coordinator, runners = begin(job, sites, folder)

    def held() -> dict[str, torch.Tensor]:
        states = {site: runner.models.state_dict() for site, runner in runners.items()}
        return {f"{site} {key}": tensor.clone() for site, state in states.items() for key, tensor in state.items()}

    before = held()
    for number in (1, 2):
        round_of(coordinator, runners, number)
    follow(ending(coordinator, lambda: coordinator.joined, test=False), runners)
    return {key: before[key] - tensor for key, tensor in held().items()}


def test_the_page_names_all_that_refuse() -> None:
    last = PAGE.read_text(encoding="utf-8").partition("## Which methods learn them")[2].replace("-", "")
    named = {name for name in METHODS if re.search(rf"\b{name}\b", last)}
    assert named == REFUSED


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_it_trains_or_is_refused_by_a_sentence(name: str, sites: dict[str, dict[str, Path]], tmp_path: Path) -> None:
    for answer, task in TASKS.items():
        if name not in REFUSED:
            changed = train(EVERY[name], answer, sites[answer], tmp_path / answer)
            assert all(tensor.isfinite().all() for tensor in changed.values())
            assert any(tensor.any() for tensor in changed.values())
            continue
        its_answer = f"the answer of {type(task).__name__} is {re.escape(task.spec.target.told)}"
        with pytest.raises(ConfigError, match=rf"^{name} learns one class a case[^.]*; {its_answer}$"):
            train(EVERY[name], answer, sites[answer], tmp_path / answer)
