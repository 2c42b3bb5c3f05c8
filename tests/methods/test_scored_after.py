# SPDX-License-Identifier: Apache-2.0
"""Which models are evaluated as the mixing left them, and which after local steps; FedAvg and SoftPull show both."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from baselines import begin, held, play, same
from every_method import EVERY, write_both
from medpfl.core.mixers import Mean
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.results.files import read_summary
from medpfl.results.schema import TrainingSummary
from medpfl.results.tables import result_table
from medpfl.results.terminal_table import print_results
from tools import run

pytestmark = pytest.mark.slow

TOGETHER = ("APFL", "Auto", "FedRoD", "IFCA", "MoE")
"""Whose private network predicts only together with one that was mixed."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


@pytest.mark.parametrize("name", EVERY)
def test_what_mixing_does_not_touch_is_scored_after_local_steps(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    small = EVERY[name]
    _, runners = begin(small.job(), sites[small.images], tmp_path)
    networks, kind = runners["anna"].networks, small.kind
    mixed = {key for slot in networks.travelling for key in networks.slots[slot]}
    if name == "FedSMPersonalised":  # its server leaves what it is sent
        mixed = {key for key in mixed if not key.startswith("personal.")}
    untouched = {name for name, net in kind.deploys.items() if not any(key.startswith(f"{net}.") for key in mixed)}
    assert set(kind.after_steps) == (set() if kind.__name__ in TOGETHER else untouched)


@pytest.mark.parametrize(("slot", "network"), [("fedavg", "fedavg_before_mean"), ("model", "before_pull")])
def test_the_model_before_the_mixing_is_what_was_sent(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path, slot: str, network: str
) -> None:
    coordinator, runners = begin(make_job(), table_sites, tmp_path)
    for number in (1, 2):
        sent = play(coordinator, runners, number)
        for site, runner in runners.items():
            mine = {key.partition(".")[2]: tensor for key, tensor in sent[site][slot].items()}
            assert same(held(runner, network), mine)


def test_tables_say_after_what_each_model_is_scored(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    run(make_job(rounds=2), table_sites, tmp_path)
    summary = read_summary(tmp_path / "results")
    assert isinstance(summary, TrainingSummary)
    table = result_table(summary)
    assert dict(zip(table.labels, table.scored, strict=True)) == {
        "Local": "local steps",
        "FedAvg": "mixing",
        "FedAvg before the mean": "local steps",
        "FedAvg + fine-tuning": "mixing and up to 2 local rounds more",
        "Personal": "mixing",
        "Personal before pull": "local steps",
    }
    console = Console(record=True, width=200)
    print_results(tmp_path / "results", console)
    assert "scored after" in console.export_text()
    assert "<td>scored after</td>" in (tmp_path / "results" / "report.html").read_text(encoding="utf-8")
    older = summary.model_copy(update={"scored": {}})
    assert result_table(older).scored == [] and result_table(older).labels == table.labels


def test_before_the_mean_is_one_round_of_fine_tuning_within_the_budget(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Two rounds of FedAvg, of which the second one's mean is left out."""
    job = make_job(rounds=2, mixers={"fedavg": Mean()}, method=FedAvg(lr=0.05, batch_size=8))
    coordinator, runners = begin(job, table_sites, tmp_path)
    play(coordinator, runners, 1)
    common = coordinator.rounds.train_messages(2, ["anna"])["anna"].slots["fedavg"]
    play(coordinator, runners, 2)
    own, other = (held(runners[site], "fedavg_before_mean") for site in ("anna", "berta"))
    assert all(not torch.equal(own[key.partition(".")[2]], tensor) for key, tensor in common.items())
    assert not same(own, other)
