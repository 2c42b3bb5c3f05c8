# SPDX-License-Identifier: Apache-2.0
"""FedAMP, L2GD and IFCA: limits that are another method, steps by hand, what stays, and resuming."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from baselines import Normed, State, assert_resumes, begin, close, combine, held, play, same, served, slope
from medpfl.core.codecs import STC
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import (
    AttentiveMessages,
    ClusterMean,
    ControlVariates,
    Identity,
    Mean,
    Mixer,
    RoundInfo,
    SoftPull,
)
from medpfl.job import Job, load_job
from medpfl.job.codecs import Codecs
from medpfl.methods.contract import Hospital, Method, Site
from medpfl.methods.fedamp import FedAMP
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.ifca import IFCA
from medpfl.methods.l2gd import L2GD
from medpfl.methods.moon import Moon
from medpfl.methods.scaffold import Scaffold
from medpfl.privacy import DPSGD
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from small_jobs import SITES, on_its_own, write_table_sites
from tools import run, write_job

Make = Callable[..., Job]


def about(present: list[bool], sizes: list[float] | None = None) -> RoundInfo:
    roster = tuple(f"site-{k}" for k in range(len(present)))
    return RoundInfo(roster, np.array(sizes or [10.0] * len(present)), tuple(present))


def unlisted(state: State, like: State) -> State:
    """Parameters of a list, in order, under the names of a network's."""
    return dict(zip(like, state.values(), strict=True))


# -- FedAMP -----------------------------------------------------------------------------------------------------------


def amp_slots(alpha: float = 0.2, sigma: float = 1.0) -> dict[str, Mixer]:
    return {"local": Identity(), "anchor": AttentiveMessages(alpha=alpha, sigma=sigma)}


def test_attention_by_hand() -> None:
    states = [{"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([1.0, 2.0])}]
    mixer = AttentiveMessages(alpha=0.5, sigma=2.0)
    a, b, c = (0.25 * math.exp(-t / 2) for t in (1.0, 5.0, 4.0))  # alpha / sigma exp(-t / sigma)
    expected = [[1 - a - b, a, b], [a, 1 - a - c, c], [b, c, 1 - b - c]]
    np.testing.assert_allclose(mixer.weights(states, [True] * 3), expected)
    new, matrix = mixer.mix([{"w": s["w"].clone()} for s in states], about([True] * 3))
    torch.testing.assert_close(new[0]["w"], torch.tensor([a + b, 2 * b]).float())
    np.testing.assert_allclose(matrix, expected)


@pytest.mark.parametrize("present", [[True, False, True, True], [False, False, True, False], [True] * 4])
def test_attention_rows_sum_to_one_and_nobody_hears_the_absent(present: list[bool]) -> None:
    generator = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(5, generator=generator)} for _ in present]
    matrix = AttentiveMessages(alpha=1 / 3, sigma=1.0).mix([dict(s) for s in states], about(present))[1]
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    assert (matrix >= 0).all()
    for k, here in enumerate(present):
        if not here:
            np.testing.assert_array_equal(matrix[k], np.eye(4)[k])
            np.testing.assert_array_equal(matrix[:, k], np.eye(4)[k])


def test_attention_arguments() -> None:
    AttentiveMessages(alpha=1 / 3, sigma=1.0).check(SITES)
    with pytest.raises(ConfigError, match=r"at most sigma / \(K - 1\) = 0.3333 with 4 hospitals, got 0.4"):
        AttentiveMessages(alpha=0.4, sigma=1.0).check(SITES)
    for alpha, sigma, words in ((0.1, 0.0, "sigma must be above 0"), (-0.1, 1.0, "alpha must be at least 0")):
        with pytest.raises(ConfigError, match=words):
            AttentiveMessages(alpha=alpha, sigma=sigma)
    with pytest.raises(ConfigError, match="mu must be at least 0"):
        FedAMP(mu=-1.0)


@pytest.mark.slow
def test_fedamp_without_pull_is_local_training(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    method = FedAMP(lr=0.05, batch_size=8, mu=0.0)
    coordinator, runners = begin(
        make_job(mixers=amp_slots(), method=method, task=Normed("blood")), table_sites, tmp_path
    )
    for number in (1, 2, 3):
        sent = play(coordinator, runners, number)
        for site, runner in runners.items():
            assert same(held(runner, "model"), held(runner, "local"))
            assert len(sent[site]["anchor"]) == 6  # two layers and BatchNorm's weight and bias; its statistics stay


def test_without_attention_the_anchor_is_the_own_model(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(mixers=amp_slots(alpha=1e-12), method=FedAMP(lr=0.05, batch_size=8, mu=1.0))
    coordinator, runners = begin(job, table_sites, tmp_path)
    play(coordinator, runners, 1)
    for site, runner in runners.items():
        own = held(runner, "model")
        assert close(unlisted(served(coordinator, "anchor", site), own), own)
        assert not close(own, held(runners["anna" if site != "anna" else "dora"], "model"), atol=1e-3)


def test_fedamp_two_rounds_by_hand(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """The anchor pulls with mu (w - u), the squared norm's gradient, and never replaces the model."""
    lr, mu, alpha, sigma = 0.3, 0.8, 0.05, 0.2
    method = FedAMP(lr=lr, batch_size=100, steps=2, optimizer="sgd", mu=mu)
    coordinator, runners = begin(make_job(mixers=amp_slots(alpha, sigma), method=method), table_sites, tmp_path)
    w = {site: held(runner, "model") for site, runner in runners.items()}
    u = dict(w)
    for number in (1, 2, 3):
        for site, runner in runners.items():
            for _ in range(2):
                w[site] = combine((1, w[site]), (-lr, slope(runner, w[site])), (-lr * mu, w[site]), (lr * mu, u[site]))
        play(coordinator, runners, number)
        for site, runner in runners.items():
            assert close(held(runner, "model"), w[site])
            apart = {other: combine((1, w[site]), (-1, w[other])) for other in runners if other != site}
            squared = {other: sum(float((t**2).sum()) for t in state.values()) for other, state in apart.items()}
            pulls = [(-alpha / sigma * math.exp(-squared[other] / sigma), state) for other, state in apart.items()]
            u[site] = combine((1, w[site]), *pulls)
            assert close(unlisted(served(coordinator, "anchor", site), w[site]), u[site])


@pytest.mark.slow
def test_fedamp_resumes(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    slots, method = amp_slots(), FedAMP(lr=0.05, batch_size=8)
    assert_resumes(lambda: make_job(rounds=4, mixers=slots, method=method), table_sites, tmp_path)


# -- L2GD -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_l2gd_without_moves_is_local_training(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    slots = {"local": Identity(), "mixed": SoftPull(lam=0.5)}
    job = make_job(mixers=slots, method=L2GD(lr=0.1, batch_size=8, p=0.0), task=Normed("blood"))
    coordinator, runners = begin(job, table_sites, tmp_path)
    for number in (1, 2, 3):
        play(coordinator, runners, number)
        for runner in runners.values():
            assert same(held(runner, "model"), held(runner, "local"))


def coins(runner: SiteRunner, count: int = 400) -> list[float]:
    """The draws that this hospital's rounds 1, 2, ... get."""
    hospital = Hospital(
        task=runner.task, data=runner.data, models=runner.models, device=runner.device, roster=runner.ready.roster,
        name=runner.name, seed=runner.ready.seed,
    )  # fmt: skip
    sites = [Site(hospital, runner.method, number) for number in range(1, count + 1)]
    return [site.common_draw("l2gd") for site in sites]


def test_the_coin_is_the_same_everywhere_and_fair(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    slots: dict[str, Mixer] = {"mixed": SoftPull(lam=0.5)}
    first, second = (
        begin(make_job(seed=seed, mixers=slots, method=L2GD()), table_sites, tmp_path / str(seed))[1] for seed in (0, 1)
    )
    drawn = coins(first["anna"])
    assert all(coins(runner) == drawn for runner in first.values())
    assert coins(second["anna"]) != drawn
    for p in (0.1, 0.5, 0.8):
        assert abs(np.mean(np.array(drawn) < p) - p) < 4 * math.sqrt(p * (1 - p) / len(drawn))


def test_l2gd_by_hand(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Tails: a gradient step over 1 - p. Heads: (1 - c) w + c mean, and no training."""
    lr, p, c, rounds = 0.2, 0.4, 0.3, 6
    slots: dict[str, Mixer] = {"mixed": SoftPull(lam=1 - c * 3 / 4)}
    job = make_job(rounds=rounds, mixers=slots, method=L2GD(lr=lr, batch_size=100, steps=1, p=p))
    coordinator, runners = begin(job, table_sites, tmp_path)
    w = {site: held(runner, "model") for site, runner in runners.items()}
    heads = [coin < p for coin in coins(runners["anna"], rounds)]
    assert any(heads[1:]) and not all(heads)
    for number, moved in enumerate(heads, start=1):
        mean = combine(*((0.25, state) for state in w.values()))
        for site, runner in runners.items():
            if moved:
                w[site] = combine((1 - c, w[site]), (c, mean))
            else:
                w[site] = combine((1, w[site]), (-lr / (1 - p), slope(runner, w[site])))
        sent = play(coordinator, runners, number)
        for site, runner in runners.items():
            assert close(held(runner, "model"), w[site])
            assert same({k.partition(".")[2]: t for k, t in sent[site]["mixed"].items()}, held(runner, "model"))


@pytest.mark.slow
def test_l2gd_resumes(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    slots: dict[str, Mixer] = {"mixed": SoftPull(lam=0.5)}
    method = L2GD(lr=0.1, batch_size=8, p=0.38)  # seed 0 tosses heads, tails, tails, heads: 2 and 3 need the own model
    assert_resumes(lambda: make_job(rounds=4, mixers=slots, method=method), table_sites, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"p": 1.0}, r"p must be in \[0, 1\), got 1.0"), ({"p": -0.1}, "p must be"), ({"optimizer": "adam"}, "'sgd'")],
)
def test_l2gd_arguments(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        L2GD(**arguments)  # type: ignore[arg-type]


def test_l2gd_takes_no_clipping_of_single_cases() -> None:
    """With every case's gradient shortened to one length, 1 / (1 - p) would be gone, as with ``clip_gradient``."""
    with pytest.raises(ConfigError, match=r"L2GD cannot be trained with DPSGD .*scaled by 1 / \(1 - p\)"):
        L2GD(p=0.5, privacy=DPSGD(noise_multiplier=1.0))


# -- IFCA -------------------------------------------------------------------------------------------------------------


def cluster_slots(count: int = 2) -> dict[str, Mixer]:
    return {"fedavg": Mean(), **{f"cluster{index}": ClusterMean() for index in range(count)}}


def ifca(clusters: int = 2) -> IFCA:
    return IFCA(lr=0.05, batch_size=8, clusters=clusters)


def choices(runners: dict[str, SiteRunner]) -> dict[str, int]:
    return {site: [float(f) for f in held(r, "choice").values()].index(1.0) for site, r in runners.items()}


@pytest.fixture
def opposite_sites(tmp_path: Path) -> dict[str, Path]:
    """Four hospitals; at clara and dora the classes are the other way round."""
    files = write_table_sites(tmp_path / "opposite", rows=80)
    for site in ("clara", "dora"):
        text = files[site].read_text()
        files[site].write_text(text.replace("- 0", "- X").replace("- 1", "- 0").replace("- X", "- 1"))
        assert files[site].read_text() != text
    return files


@pytest.mark.slow
def test_one_cluster_is_fedavg(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers=cluster_slots(1), method=ifca(1), task=Normed("blood"))
    coordinator, runners = begin(job, table_sites, tmp_path)
    for number in (1, 2, 3):
        play(coordinator, runners, number)
        one = {k: t for k, t in served(coordinator, "cluster0").items() if k in served(coordinator, "fedavg")}
        assert same(one, served(coordinator, "fedavg"))


@pytest.mark.parametrize("limit", [{}, {"clip_updates": 1.0}], ids=["codec", "clipped"])
def test_one_cluster_is_fedavg_whatever_becomes_of_updates(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, limit: dict[str, float]
) -> None:
    """What a hospital chose is told as it is: it is no part of the update that is encoded, or shortened."""
    job = make_job(mixers=cluster_slots(1), method=ifca(1), task=Normed("blood"), **limit)
    codecs = None if limit else Codecs(to_site=None, from_site=STC(p=0.3))
    slots = run(dataclasses.replace(job, codecs=codecs), table_sites, tmp_path)["slots"]
    one, common = ({key.replace(f"{name}.", ""): t for key, t in slots[name].items()} for name in slots)
    flags = [one.pop(key) for key in list(one) if "chosen" in key]
    assert flags and all(flag == 1 for flag in flags)
    assert same(one, common)


@pytest.mark.slow
def test_hospitals_of_one_kind_find_each_other(make_job: Make, opposite_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(rounds=15, mixers=cluster_slots(), method=ifca())
    coordinator, runners = begin(job, opposite_sites, tmp_path / "rounds")
    for number in range(1, 16):
        play(coordinator, runners, number)
    found = choices(runners)
    assert found["anna"] == found["berta"] != found["clara"] == found["dora"]
    result = run(job, opposite_sites, tmp_path / "whole")
    score = {}
    for model in ("personal", "fedavg"):
        lines = [line for line in result["test"] if (line["model"], line["choice"]) == (model, "last")]
        score[model] = np.mean([line["metrics"]["accuracy"] for line in lines])
    assert score["personal"] > score["fedavg"] + 0.2


def test_the_chosen_model_fits_best_and_the_other_returns_untouched(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begin(make_job(mixers=cluster_slots(), method=ifca()), table_sites, tmp_path)
    came = [served(coordinator, f"cluster{index}") for index in (0, 1)]
    assert not torch.equal(came[0]["0.weight"], came[1]["0.weight"])
    losses = {}
    for site, runner in runners.items():
        rows, classes = runner.data.splits["train"].inputs[:], runner.data.splits["train"].targets[:]
        networks = [runner.models[f"cluster{index}"].eval() for index in (0, 1)]
        losses[site] = [runner.task.loss(network(rows), classes).item() for network in networks]
    sent = play(coordinator, runners, 1)
    for site, index in choices(runners).items():
        assert losses[site][index] == min(losses[site])
        other = {k.partition(".")[2]: t for k, t in sent[site][f"cluster{1 - index}"].items()}
        assert float(other.pop(str(1 - index))) == 0 and float(sent[site][f"cluster{index}"][f"chosen.{index}"]) == 1
        came[1 - index].pop(str(1 - index), None)
        assert same(other, came[1 - index])
        assert not any(key.startswith("choice") for slot in sent[site].values() for key in slot)


def test_a_model_that_broke_is_not_chosen(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Its loss is no number. All hospitals chose it, beside another one that fits."""
    coordinator, runners = begin(make_job(mixers=cluster_slots(), method=ifca()), table_sites, tmp_path)
    for site, message in coordinator.rounds.train_messages(1, list(coordinator.roster)).items():
        message.slots["cluster0"]["cluster0.0.weight"].fill_(torch.nan)
        runners[site].handle(message)
    assert set(choices(runners).values()) == {1}


def test_cluster_mean_by_hand() -> None:
    def states(flags: list[float]) -> list[State]:
        return [{"m.w": torch.tensor([float(k)]), "chosen.0": torch.tensor(f)} for k, f in enumerate(flags)]

    new, matrix = ClusterMean().mix(states([1, 0, 1, 1]), about([True, True, True, False], [30, 50, 10, 99]))
    np.testing.assert_allclose(matrix, np.tile([0.75, 0, 0.25, 0], (4, 1)))
    assert [float(state["m.w"]) for state in new] == [0.5] * 4
    was_sent = dataclasses.replace(about([True, True, True, False]), known=[{"m.w": torch.tensor([7.0])}] * 4)
    new, matrix = ClusterMean().mix(states([0, 0, 0, 1]), was_sent)  # chosen by the absent only
    np.testing.assert_array_equal(matrix, np.eye(4))
    assert [float(state["m.w"]) for state in new] == [7] * 4


def test_a_model_that_nobody_chose_stays_whatever_codecs_make_of_it(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a codec lost of earlier updates hospitals send more of a model that they were only sent."""
    chosen = {1: "cluster0", 2: "cluster0"}
    monkeypatch.setattr(
        "medpfl.methods.ifca._training_loss",
        lambda site, network: float(network is not site.models[chosen.get(site.round, "cluster1")]),
    )
    job = make_job(rounds=4, mixers=cluster_slots(), method=ifca())
    found: dict[int, list[State]] = {}

    def keep(coordinator: Coordinator) -> None:
        found[coordinator.done] = [{**coordinator.copies.of(site, ["cluster0"])["cluster0"]} for site in SITES]

    codecs = Codecs(to_site=None, from_site=STC(p=0.1))
    simulate(dataclasses.replace(job, codecs=codecs), table_sites, tmp_path / "results", tmp_path / "home", keep)
    weights = [{k: t for k, t in state.items() if t.is_floating_point()} for n in (2, 4) for state in found[n]]
    assert all(same(state, weights[0]) for state in weights)


@pytest.mark.slow
def test_ifca_with_absent_hospitals(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begin(make_job(mixers=cluster_slots(), method=ifca(), min_clients=1), table_sites, tmp_path)
    for number, answering in enumerate([["anna"], ["clara", "dora"], None], start=1):
        play(coordinator, runners, number, answering)
        for slot in ("cluster0", "cluster1"):
            weights = [{k: t for k, t in served(coordinator, slot, s).items() if len(k) > 1} for s in table_sites]
            assert all(same(state, weights[0]) for state in weights)


@pytest.mark.slow
def test_ifca_resumes(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    assert_resumes(lambda: make_job(rounds=4, mixers=cluster_slots(), method=ifca()), table_sites, tmp_path)


def test_ifca_needs_a_cluster() -> None:
    with pytest.raises(ConfigError, match="clusters must be at least 1, got 0"):
        ifca(0)


# -- jobs -------------------------------------------------------------------------------------------------------------

JOBS: list[tuple[Method, dict[str, Mixer]]] = [
    (Scaffold(lr=0.1), {"model": Mean(uniform=True), "control": ControlVariates()}),
    (Moon(mu=0.5), {"model": Mean()}),
    (FedRoD(gamma=0.5), {"generic": Mean()}),
    (FedAMP(mu=0.2), {"anchor": AttentiveMessages(alpha=0.1, sigma=2.0)}),
    (L2GD(p=0.3), {"mixed": SoftPull(lam=1.0)}),  # all that SoftPull allows one hospital
    (ifca(2), {"cluster0": ClusterMean(), "cluster1": ClusterMean()}),
]


@pytest.mark.parametrize(("method", "mixers"), JOBS, ids=lambda value: type(value).__name__)
@pytest.mark.slow
def test_each_can_be_a_job_folder_and_takes_a_hospital_alone(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, method: Method, mixers: dict[str, Mixer]
) -> None:
    job = load_job(write_job(make_job(mixers=mixers, method=method, min_clients=1), tmp_path / "job"))
    assert isinstance(job, Job)
    result = run(job, {"anna": on_its_own(table_sites["anna"])}, tmp_path / "alone")
    assert {line["site"] for line in result["test"]} == {"anna"}
