# SPDX-License-Identifier: Apache-2.0
"""A hospital tries to decide by its replies what happens to the others: what they are shown, how often they are asked,
which round is the best, whose statistics count, what is built where the results are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.shareable import Shareable

from exchanging import Asked, slots
from hostile import attacked, content, saying, told_of, with_arrays
from medpfl.core.codecs import DAdaQuant
from medpfl.core.graph import nearest, points_of
from medpfl.core.mixers import Mean
from medpfl.core.mixers.network_prox import NetworkProx
from medpfl.core.mixers.statistics_distance import StatisticsDistance
from medpfl.job import Job
from medpfl.methods.pfednet import PFedNet
from medpfl.results.files import read_training
from medpfl.rounds.messages import Message
from medpfl.rounds.server.quorum import QuorumLost

Make = Callable[..., Job]


def announcing(sites: tuple[str, ...], **change: Any) -> Callable[[str, Message[Any], Shareable], Shareable]:
    """These hospitals say something else of the job in their first reply; of the plan, key by key."""

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        if asked.header.task != "init" or site not in sites:
            return honest
        said = content(honest)
        return saying(
            honest, **{key: {**said[key], **value} if key == "plan" else value for key, value in change.items()}
        )

    return attack


GREEDY = {"refined": ["model"], "shown": ["model"], "steps": [9, 9, 9]}


@pytest.mark.slow
def test_a_hospital_asks_to_be_shown_the_others_models(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """anna is the first of all, whose header decided for everybody."""
    coordinator, asked = attacked(make_job(), table_sites, tmp_path, announcing(("anna",), plan=GREEDY))
    assert coordinator.joined == ["berta", "clara", "dora"]
    assert told_of(coordinator, "anna")[0].endswith("says another 'plan' of the job than the server's copy of it")
    assert {exchange.messages["berta"].header.task for exchange in asked} == {"init", "train", "validate", "finish"}
    sent = {slot for exchange in asked for message in exchange.messages.values() for slot in message.slots}
    assert sent == {"model", "fedavg"}


def test_even_the_majority_is_not_shown_the_others_models(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    many = ("anna", "berta", "clara")
    with pytest.raises(QuorumLost, match="only 1 of 4 hospitals are ready"):
        attacked(make_job(), table_sites, tmp_path, announcing(many, plan=GREEDY))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"score": "auc"}, "score"),
        ({"measures": {"accuracy": {"direction": "lower", "unit": ""}}}, "measures"),
        ({"personalised": "fedavg"}, "personalised"),
        ({"plan": {"steps": [10_000] * 3, "refined": ["model"]}}, "plan"),
        ({"plan": {"models": ["personal", "local", "fedavg", "mine"]}}, "plan"),
        ({"plan": {"steps": []}}, "plan"),
    ],
)
@pytest.mark.slow
def test_a_hospital_says_something_else_of_the_job(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    coordinator, _ = attacked(make_job(rounds=3), table_sites, tmp_path, announcing(("anna",), **change))
    assert told_of(coordinator, "anna") == [
        f"takes no part: anna says another '{what}' of the job than the server's copy of it"
    ]
    assert coordinator.done == 3


@pytest.mark.slow
def test_a_hospital_claims_a_codec_that_adapts(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """All would be told the others' losses."""
    spec = {"path": f"{DAdaQuant.__module__}.DAdaQuant", "args": {}}
    change = {"codecs": {"to_site": None, "from_site": spec}, "adapts": True}
    coordinator, asked = attacked(make_job(), table_sites, tmp_path, announcing(("anna",), **change))
    assert "anna has other codecs than the server's copy of the job" in told_of(coordinator, "anna")[0]
    trains = [exchange for exchange in asked if exchange.messages["berta"].header.task == "train"]
    assert all(exchange.messages["berta"].header.progress is None for exchange in trains)


@pytest.mark.slow
def test_the_recipe_that_results_are_rebuilt_from_is_the_servers(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """'medpfl super' and 'predict' build what the results' recipe names."""
    recipe = {"method": {"path": "os.system"}, "task": {}, "input_shape": [2**40], "preparation": {}}
    attacked(make_job(), table_sites, tmp_path, announcing(("anna",), recipe=recipe))
    found = read_training(tmp_path / "r").recipe
    assert found is not None and found.method["path"] == "medpfl.methods.softpull.SoftPull"
    assert found.task["path"] == "medpfl.tasks.tabular.Tabular" and found.input_shape == [3]


def statistics(site: str, change: Callable[[str, Any], Any]) -> Callable[[str, Message[Any], Shareable], Shareable]:
    def attack(who: str, asked: Message[Any], honest: Shareable) -> Shareable:
        return with_arrays(honest, change) if (who, asked.header.task) == (site, "statistics") else honest

    return attack


@pytest.mark.slow
def test_statistics_of_an_odd_shape_exclude_who_sent_them_alone(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The first hospital's shape was the one that all others had to have."""
    job = make_job(mixers=slots(), method=Asked(lr=0.05, batch_size=8))
    attack = statistics("anna", lambda name, array: np.zeros(50))
    coordinator, _ = attacked(job, table_sites, tmp_path, attack)
    refusals = [event for event in coordinator.record.events if "statistics refused" in event.event]
    assert {event.site for event in refusals} == {"anna"} and coordinator.done == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda name, array: -array if name.endswith("variance") else array,
        lambda name, array: array * 1e60,
        lambda name, array: array[None],
        lambda name, array: array.astype(np.float32),
    ],
    ids=["negative", "huge", "matrix", "float32"],
)
@pytest.mark.slow
def test_statistics_that_no_component_can_use_are_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, change: Callable[[str, Any], Any]
) -> None:
    """They ended the job."""
    method = PFedNet(lr=0.05, batch_size=8)
    job = make_job(mixers={"shared": Mean(), "personal": NetworkProx(tau=0.1, neighbours=1)}, method=method)
    coordinator, _ = attacked(job, table_sites, tmp_path, statistics("clara", change))
    assert told_of(coordinator, "clara")[0].startswith("statistics refused: ") and coordinator.done == 3


def test_statistics_distance_refuses_one_hospitals_negative_variance() -> None:
    from medpfl.core.errors import ConfigError

    with pytest.raises(ConfigError, match=r"statistic '1\.variance' holds a negative variance"):
        StatisticsDistance().check_statistics({"1.mean": torch.zeros(2), "1.variance": torch.tensor([1.0, -1.0])})
    assert Mean().check_statistics({}) is None  # wants none


@pytest.mark.slow
def test_of_two_hospitals_the_first_by_name_excludes_the_other(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Of as many who say one thing as say another nobody can tell which is odd."""
    two = {site: table_sites[site] for site in ("anna", "berta")}
    with pytest.raises(QuorumLost, match=r"1 of 2 hospitals .* berta .*says that other entries are buffers than anna"):
        attacked(make_job(), two, tmp_path, announcing(("anna",), buffers=["model.0.weight"]))


def test_a_hospital_decides_by_enormous_moments_which_feature_makes_neighbours_of_the_others() -> None:
    """Moments are divided by the deviations over all hospitals: a feature in which one is far off counts nothing for
    the others, and those that were neighbours are none."""

    def neighbours(anna: float) -> list[list[int]]:
        means = [(4.0, anna), (0.0, 0.0), (1.0, 0.0), (0.0, 3.0), (1.0, 3.0)]
        told = [
            {"mean": torch.tensor(mean, dtype=torch.float64), "variance": torch.ones(2, dtype=torch.float64)}
            for mean in means
        ]
        edges: list[list[int]] = nearest(points_of("moments", told, np.full(5, 30.0)), 1).tolist()
        return [edge for edge in edges if 0 not in edge]

    assert neighbours(1.5) == [[1, 2], [3, 4]]
    assert neighbours(1e6) == [[1, 3], [2, 4]]
