# SPDX-License-Identifier: Apache-2.0
"""A hospital sends numbers that take over what is common: huge updates, invented sample counts and scores, old rounds,
initial weights of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from nvflare.apis.shareable import Shareable

from hostile import attacked, content, saying, told_of, with_arrays
from medpfl.core.errors import ConfigError, MedPFLError, RefusedUpdate
from medpfl.core.mixers import CoordinateMedian, Mean, NetworkProx, RoundInfo, TrimmedMean
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.dsfl import DSFL
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedmd import FedMD
from medpfl.methods.kt_pfl import KTpFL
from medpfl.methods.on_public_data import OnPublicData
from medpfl.methods.softpull import SoftPull
from medpfl.results.schema import BestRound
from medpfl.rounds.messages import Message
from medpfl.rounds.server.bounds import bound
from medpfl.rounds.server.checks import check_probabilities, check_values
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job
from tools import assert_same, exchange, normed, outcome, pieces, ready, run

Make = Callable[..., Job]
QUICK = SoftPull(lr=0.05, batch_size=8, steps=2)


def on(task: str, site: str, change: Callable[[Shareable], Shareable], round_number: int | None = None) -> Any:
    """The attack of one hospital in one task, of one round where that is said."""

    def attack(who: str, asked: Message[Any], honest: Shareable) -> Shareable:
        header = asked.header
        meant = (who, header.task) == (site, task) and round_number in (None, header.round)
        return change(honest) if meant else honest

    return attack


def times(factor: float) -> Callable[[Shareable], Shareable]:
    return lambda honest: with_arrays(
        honest, lambda name, array: (array.astype(np.float64) * factor).astype(array.dtype)
    )


def norm_of(coordinator: Coordinator, site: str = "berta") -> float:
    """Of the common model in the end."""
    state = coordinator.copies.of(site, ["model"])["model"]
    return float(torch.cat([tensor.reshape(-1) for tensor in state.values()]).norm())


@pytest.mark.slow
def test_an_update_beyond_all_measure_is_refused(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Times 1e30 it was mixed without an event."""
    job = make_job(mixers={"model": Mean()}, method=QUICK)
    coordinator, _ = attacked(job, table_sites, tmp_path, on("train", "anna", times(1e30)))
    told = told_of(coordinator, "anna")
    assert len(told) == 3 and all("holds values beyond 1e+18" in event for event in told)
    assert norm_of(coordinator) < 10


@pytest.mark.slow
def test_a_thousandfold_update_is_told_of_and_shortened_on_request(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def play(folder: str, **settings: Any) -> Coordinator:
        job = make_job(mixers={"model": Mean()}, method=QUICK, **settings)
        return attacked(job, table_sites, tmp_path / folder, on("train", "anna", times(1000.0), 2))[0]

    free, bounded = play("free"), play("bounded", clip_updates=2.0)
    (told,) = told_of(free, "anna")
    assert told.startswith("its update of 'model' is ") and told.endswith("times as long as the median of the others'")
    (told,) = told_of(bounded, "anna")
    assert told.endswith("; it was shortened to 2 times")
    honest = attacked(
        make_job(mixers={"model": Mean()}, method=QUICK), table_sites, tmp_path / "h", lambda site, asked, sent: sent
    )[0]
    assert norm_of(free) > 50 * norm_of(honest)
    assert norm_of(bounded) < 2 * norm_of(honest)


def test_enormous_values_within_the_bounds_end_a_job_that_shortens_nothing(
    table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The page on security says so; it said that no hospital can."""
    enormous = on("train", "anna", lambda h: with_arrays(h, lambda name, array: np.full_like(array, 1e17)), 1)

    def play(folder: str, mixer: Any, **settings: Any) -> Coordinator:
        job = small_job(2, {"fedavg": mixer}, FedAvg(lr=0.05, batch_size=8, steps=2), normed(), **settings)
        return attacked(job, table_sites, tmp_path / folder, enormous)[0]

    with pytest.raises(MedPFLError, match=r"^round 2: 0 of 4 hospitals sent a usable update"):
        play("mean", Mean())
    assert play("clipped", Mean(), clip_updates=2.0).done == play("median", CoordinateMedian()).done == 2


@pytest.mark.slow
def test_bounding_changes_no_digit_where_nothing_is_far(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    plain = run(make_job(rounds=2), table_sites, tmp_path / "plain")
    assert_same(plain, run(make_job(rounds=2, clip_updates=1000.0), table_sites, tmp_path / "bounded"))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [CoordinateMedian(), TrimmedMean(0.25)], ids=repr)
def test_robust_components_stay_with_the_others(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, mixer: Any
) -> None:
    job = make_job(mixers={"model": mixer}, method=QUICK)
    coordinator, _ = attacked(job, table_sites, tmp_path, on("train", "anna", times(1000.0)))
    assert norm_of(coordinator) < 10 and coordinator.done == 3
    assert outcome(tmp_path / "r")["slots"].keys() == {"model"}


@pytest.mark.parametrize("value", [-341, 0, 10**12, 2**53, 1.5, True])
@pytest.mark.slow
def test_a_sample_count_that_takes_over_the_mean(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, value: Any
) -> None:
    attack = on("init", "anna", lambda honest: saying(honest, sizes={"train": value, "validation": 1, "test": 1}))
    coordinator, _ = attacked(make_job(rounds=1, method=QUICK), table_sites, tmp_path, attack)
    assert "anna" not in coordinator.joined and len(told_of(coordinator, "anna")) == 1


@pytest.mark.slow
def test_who_has_nearly_all_samples_is_told_of(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    attack = on("init", "anna", lambda honest: saying(honest, sizes={"train": 9_000, "validation": 1, "test": 1}))
    coordinator, _ = attacked(make_job(rounds=1, method=QUICK), table_sites, tmp_path, attack)
    (told,) = told_of(coordinator, "anna")
    assert told.startswith("it says that it has 9000 of all 9") and told.endswith("by samples, it decides")


def test_the_least_and_the_most_of_settings() -> None:
    for wrong, words in (
        ({"most_samples": 0}, "most_samples must be at least 1"),
        ({"clip_updates": 0.5}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            Settings(rounds=1, **wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_score_that_decides_the_best_round(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """1e308 of one hospital decided alone; of two, their sum ended the job."""

    def claim(honest: Shareable) -> Shareable:
        lines = [{**line, "metrics": {"accuracy": 1e308}} for line in content(honest)["metrics"]]
        return saying(honest, metrics=lines)

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        if site not in ("anna", "berta") or asked.header.task != "train" or asked.header.round != 2:
            return honest
        return claim(honest)

    coordinator, _ = attacked(make_job(method=QUICK), table_sites, tmp_path, attack)
    assert all(0 <= best.score <= 1 for best in coordinator.best.values()) and coordinator.best
    for site in ("anna", "berta"):
        assert told_of(coordinator, site)[0].startswith("failed: the message is malformed: 'content.train.metrics")
    small = on("train", "anna", lambda honest: with_score(honest, 1.5), 2)
    coordinator, _ = attacked(make_job(method=QUICK), table_sites, tmp_path / "again", small)
    assert "update refused: its accuracy of 'personal' is not between 0 and 1" in told_of(coordinator, "anna")
    assert isinstance(coordinator.best["personal"], BestRound)


def with_score(honest: Shareable, value: float) -> Shareable:
    return saying(honest, metrics=[{**line, "metrics": {"accuracy": value}} for line in content(honest)["metrics"]])


@pytest.mark.slow
def test_the_answer_of_an_old_round_is_refused(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    kept: list[Shareable] = []

    def attack(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        if (site, asked.header.task) != ("berta", "train"):
            return honest
        kept.append(honest)
        return kept[0]

    coordinator, _ = attacked(make_job(method=QUICK), table_sites, tmp_path, attack)
    assert told_of(coordinator, "berta") == [
        f"update refused: it was asked for round {number} and answered of round 1" for number in (2, 3)
    ]


@pytest.mark.slow
def test_other_versions_join_and_are_told_of(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """They joined silently."""
    told = {"python": "2.7.18", "medpfl": "9"}
    coordinator, _ = attacked(
        make_job(rounds=1, method=QUICK), table_sites, tmp_path, on("init", "dora", lambda h: saying(h, versions=told))
    )
    assert "dora" in coordinator.joined
    first, *others = told_of(coordinator, "dora")
    assert first.startswith("it has python 2.7.18, the server has 3.") and len(others) == 2
    assert any("torch of a version that it does not tell" in event for event in others)


@pytest.mark.slow
def test_poisoned_initial_weights_exclude_nobody_else(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The first hospital's decided."""
    coordinator, _ = attacked(make_job(method=QUICK), table_sites, tmp_path, on("init", "anna", times(-3.0)))
    assert coordinator.joined == ["berta", "clara", "dora"]
    assert "anna starts from other initial weights than berta" in told_of(coordinator, "anna")[0]


def slots(*values: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.tensor(values), "bn.running_var": torch.ones(1), "bn.count": torch.tensor(1)}}


def test_a_negative_variance_is_refused() -> None:
    bad = slots(1.0)
    bad["model"]["bn.running_var"][0] = -6.7e-6
    with pytest.raises(RefusedUpdate, match=r"anna: entry 'model::bn\.running_var' holds a negative variance"):
        check_values("anna", bad, {"bn.running_var", "bn.count"})
    check_values("anna", bad)  # of trained entries of that name nothing is known
    check_values("anna", slots(-1.0, 1e18), {"bn.running_var"})


def test_complex_numbers_are_refused() -> None:
    """They would pass every check of size, and a job's first hospital says of which types the others' are."""
    bad = slots(1.0)
    bad["model"]["w"] = torch.tensor([1 + 1e30j])
    with pytest.raises(RefusedUpdate, match=r"anna: entry 'model::w' holds complex numbers"):
        check_values("anna", bad)


def test_one_array_under_two_names_is_refused(table_sites: dict[str, Path], tmp_path: Path) -> None:
    """FLARE sends an array that stands twice in a message once. A mean for all is put into the first hospital's arrays:
    so one layer of everybody's model was replaced by another one."""
    job = small_job(2, {"fedavg": Mean()}, FedAvg(lr=0.05), Tabular(dataset="blood", hidden=(4, 4)))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    replies = exchange(runners, coordinator.rounds.train_messages(1, list(table_sites)))
    sent = replies["anna"].slots["fedavg"]
    sent["fedavg.0.bias"] = sent["fedavg.2.bias"]
    coordinator.rounds.take_train(1, replies)
    assert told_of(coordinator, "anna")[-1].endswith(
        "entries 'fedavg::fedavg.0.bias' and 'fedavg::fedavg.2.bias' are one array"
    )
    common = coordinator.copies.of("berta", ["fedavg"])["fedavg"]
    assert not torch.equal(common["fedavg.0.bias"], common["fedavg.2.bias"])
    coordinator.close()


@pytest.mark.parametrize("site", ["anna", "dora"])
@pytest.mark.parametrize("mixer", [Mean(), CoordinateMedian()], ids=repr)
def test_arrays_that_lie_column_by_column_are_mixed_as_all_others(
    table_sites: dict[str, Path], tmp_path: Path, mixer: Any, site: str
) -> None:
    """What is written to such an array's values in their order goes into a copy: a mean of them ended the job for all,
    and ``clip_updates`` said that it had shortened an update that stayed as long as it was."""

    def far(honest: Shareable) -> Shareable:
        return with_arrays(honest, lambda name, array: np.asfortranarray(array * array.dtype.type(1000)))

    job = small_job(2, {"model": mixer}, QUICK, clip_updates=2.0)
    coordinator, _ = attacked(job, table_sites, tmp_path, on("train", site, far))
    assert coordinator.done == 2 and told_of(coordinator, site)[0].endswith("; it was shortened to 2 times")
    assert all(norm_of(coordinator, each) < 10 for each in table_sites)


def test_bounding_shortens_towards_what_was_sent() -> None:
    held = {site: slots(1.0, 1.0) for site in "abcd"}
    sent = {"a": slots(1.0, 2.0), "b": slots(2.0, 1.0), "c": slots(1.0, 0.0), "d": slots(1.0, 1001.0)}
    sent["d"]["model"]["bn.running_var"] += 7  # the others' buffers stay: there is nothing to compare with
    (far,) = bound(["model"], sent, held, (), {"bn.running_var", "bn.count"}, 3.0)
    assert (far.site, far.what, far.times, far.limit) == ("d", "'model'", 1000.0, 3.0)
    torch.testing.assert_close(sent["d"]["model"]["w"], torch.tensor([1.0, 4.0]))
    assert torch.equal(sent["a"]["model"]["w"], torch.tensor([1.0, 2.0])) and sent["d"]["model"]["bn.count"] == 1
    gradients = {"a": slots(1.0), "b": slots(1.0), "c": slots(50.0)}
    (far,) = bound(["model"], gradients, held, ["model"], {"bn.running_var"}, None)
    assert far.times == 50.0 and float(gradients["c"]["model"]["w"]) == 50.0
    assert bound(["model"], {"a": slots(9e9)}, held, (), {"bn.running_var"}, 1.0) == []  # alone


@pytest.mark.parametrize("p", [1, 2])
def test_an_enormous_personal_part_spoils_the_others_of_pfednet(p: Any) -> None:
    """By the equations one far-off hospital pulls at each of the others by tau and no more."""
    personal = torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def others(size: float) -> torch.Tensor:
        models = [{"w": row.clone()} for row in personal]
        models[0]["w"].fill_(size)
        info = RoundInfo(tuple("abcd"), np.ones(4), (True,) * 4)
        mixed, _ = NetworkProx(tau=0.1, p=p, graph="complete").mix(models, info)
        return torch.stack([state["w"] for state in mixed[1:]])

    far = others(1e3)
    assert (far - others(1e4)).norm(dim=1).max() < 0.01
    assert (far - others(1e14)).norm(dim=1).max() > 1.0


def test_of_two_hospitals_one_that_hardly_moves_has_the_other_shortened_to_nothing() -> None:
    """The page for leads says so; it said that none can drown the others."""
    sent, held = {"a": slots(1e-6), "b": slots(1.0)}, dict.fromkeys("ab", slots(0.0))
    (far,) = bound(["model"], sent, held, (), {"bn.running_var", "bn.count"}, 3.0)
    assert far.site == "b" and float(sent["b"]["model"]["w"]) == pytest.approx(3e-6)
    among = {**sent, "b": slots(1.0), "c": slots(1.0)}
    assert bound(["model"], among, {**held, "c": slots(0.0)}, (), {"bn.running_var", "bn.count"}, 3.0) == []


def on_public_data(
    kind: type[OnPublicData], change: Callable[[Any], Any], sites: dict[str, Path], folder: Path
) -> Coordinator:
    """A job of two rounds in which anna answers something else in the first."""
    for file in sites.values():
        said = yaml.safe_load(file.read_text())
        said["datasets"]["shared"] = {**said["datasets"]["blood"], "files": ["anna.csv"], "public": True}
        file.write_text(yaml.safe_dump(said))
    method = kind(public="shared", lr=0.05, batch_size=8)
    attack = on("train", "anna", lambda honest: with_arrays(honest, lambda name, array: change(array)), 1)
    coordinator, _ = attacked(small_job(2, method.components(), method), sites, folder, attack)
    assert coordinator.done == 2
    return coordinator


@pytest.mark.parametrize("kind", [DSFL, KTpFL])
@pytest.mark.parametrize(
    "change",
    [
        lambda array: np.stack([array[:, 0] + 2, array[:, 1] - 2], axis=1),  # they sum to 1
        np.ones_like,
        lambda array: array * np.float32(1e17),
        np.zeros_like,
    ],
    ids=["below 0", "sum to 2", "enormous", "nothing"],
)
def test_what_is_no_probability_is_refused(
    table_sites: dict[str, Path], tmp_path: Path, kind: type[OnPublicData], change: Callable[[Any], Any]
) -> None:
    """It was mixed, and moved the others' teachers and, with KT-pFL, their coefficients."""
    coordinator = on_public_data(kind, change, table_sites, tmp_path)
    assert told_of(coordinator, "anna") == [
        "update refused: anna: entry 'public::public.values' holds what are no probabilities: each must be between 0 "
        "and 1, and those of a sample must sum to 1, up to 0.01"
    ]


@pytest.mark.parametrize("kind", [DSFL, KTpFL])
def test_rounded_probabilities_are_taken(
    table_sites: dict[str, Path], tmp_path: Path, kind: type[OnPublicData]
) -> None:
    """As a hospital's own filter may round them."""
    coordinator = on_public_data(kind, lambda array: array.round(2), table_sites, tmp_path)
    assert not told_of(coordinator, "anna")


def test_logits_may_be_any_number(table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator = on_public_data(FedMD, lambda array: array - 3, table_sites, tmp_path)
    assert not [told for told in told_of(coordinator, "anna") if "refused" in told]


@pytest.mark.parametrize("shape", [(0, 3), (5, 3), (2, 3, 4, 5), (3, 2, 1 << 20)])
def test_probabilities_of_samples_and_of_pixels(shape: tuple[int, ...]) -> None:
    good = torch.randn(shape).softmax(dim=1)
    check_probabilities("anna", {"public": {"values": good}}, ["public", "other"])
    if len(good):
        good[-1, 1] -= 0.02
        with pytest.raises(RefusedUpdate, match="anna: entry 'public::values' holds what are no probabilities"):
            check_probabilities("anna", {"public": {"values": good}}, ["public"])
        check_probabilities("anna", {"public": {"values": good}}, [])
