# SPDX-License-Identifier: Apache-2.0
"""The graph of similar hospitals, and the server component that mixes over it."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baselines import assert_resumes
from medpfl.component import build
from medpfl.core import graph as graphs
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, Mixer, NetworkProx, RoundInfo
from medpfl.job import Job
from medpfl.methods import fedprox
from one_slot import OneSlot

ROSTER = ("anna", "berta", "clara", "dora", "eva")
K = len(ROSTER)
ALL = (True,) * K
Models = list[dict[str, Tensor]]


def info(present: tuple[bool, ...] = ALL, roster: tuple[str, ...] = ROSTER) -> RoundInfo:
    return RoundInfo(roster, np.arange(10.0, 10.0 + len(roster)), present)


def models(seed: int = 0) -> Models:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "a": torch.randn(3, 4, generator=generator, dtype=torch.float64),
            "steps": torch.tensor(k),
            "b": torch.randn(5, generator=generator, dtype=torch.float64),
        }
        for k in range(K)
    ]


def flat(states: Models) -> Tensor:
    return torch.stack([torch.cat([state["a"].flatten(), state["b"]]) for state in states])


def mixed(mixer: Mixer, states: Models, about: RoundInfo | None = None) -> Tensor:
    return flat(mixer.mix(states, about or info())[0])


def pairs(edges: graphs.Edges) -> list[tuple[int, int]]:
    return [(int(i), int(j)) for i, j in edges]


def test_the_nearest_are_united_whichever_way_and_once() -> None:
    points = [np.array([x]) for x in (0.0, 1.0, 2.5, 10.0)]
    assert pairs(graphs.nearest(points, 1)) == [(0, 1), (1, 2), (2, 3)]
    assert pairs(graphs.nearest(points, 9)) == pairs(graphs.complete(4))
    assert pairs(graphs.nearest([points[0], None, points[2]], 1)) == [(0, 2)]
    assert pairs(graphs.nearest([points[0]], 3)) == pairs(graphs.nearest([None, None], 3)) == []


def test_equal_hospitals_are_never_their_own_neighbours() -> None:
    assert pairs(graphs.nearest([np.zeros(2)] * 4, 3)) == pairs(graphs.complete(4))
    assert pairs(graphs.nearest([np.zeros(2)] * 3, 1)) == [(0, 1), (0, 2)]


def test_units_do_not_matter_and_constant_features_count_nothing() -> None:
    rng = np.random.default_rng(0)
    data = [rng.normal(size=(30, 3)) * [1, 1, 0] + [k, 0, 7] for k in range(4)]
    scale = np.array([1000.0, 0.01, 3.0])

    def points(sketch: str, unit: Any) -> Any:
        told = []
        for rows in data:
            x = torch.from_numpy(rows * unit)
            told.append({"mean": x.mean(0), "variance": x.var(0, correction=0), "covariance": torch.cov(x.T)})
        return np.stack(graphs.points_of(sketch, told, np.full(4, 30.0)))  # type: ignore[arg-type]

    for sketch in ("moments", "covariance"):
        np.testing.assert_allclose(points(sketch, scale), points(sketch, np.ones(3)), atol=1e-12)
        assert np.isfinite(points(sketch, scale)).all()
    assert not points("moments", scale)[:, [2, 5]].any()


def test_a_hospitals_size_does_not_matter_to_its_label_histogram() -> None:
    told = [{"histogram": torch.tensor(counts).double()} for counts in ([1, 3], [100, 300], [3, 1])]
    points = graphs.points_of("labels", told, np.array([4.0, 400, 4]))
    np.testing.assert_allclose(points[0], points[1])  # type: ignore[arg-type]
    assert pairs(graphs.nearest(points, 1)) == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("mixer", "edges"),
    [
        (NetworkProx(tau=1, graph="complete"), pairs(graphs.complete(K))),
        (NetworkProx(tau=1, graph="star", centre="clara"), [(0, 2), (1, 2), (2, 3), (2, 4)]),
        (NetworkProx(tau=1, graph="empty"), []),
        (
            NetworkProx(tau=1, graph="given", edges=(("dora", "anna"), ("anna", "dora"), ("eva", "dora"))),
            [(0, 3), (3, 4)],
        ),
    ],
)
def test_graphs_a_job_can_name(mixer: NetworkProx, edges: list[tuple[int, int]]) -> None:
    mixer.check(ROSTER)
    assert pairs(mixer.network(ROSTER)) == edges
    assert mixer.wants(1, K) is None


def test_sketches_are_asked_for_once() -> None:
    mixer = NetworkProx(tau=0.5, neighbours=1)
    mixer.start({})
    assert mixer.wants(1, K) == "moments"
    told = [{"mean": torch.tensor([x]).double(), "variance": torch.ones(1).double()} for x in (0, 1, 5, 6)]
    mixer.take_statistics([*told, None], info())
    assert mixer.wants(2, K) is None
    assert pairs(mixer.network(ROSTER)) == [(0, 1), (2, 3)]  # eva said nothing: she is on her own
    resumed = NetworkProx(tau=0.5, neighbours=1)
    resumed.load_state(mixer.state())
    assert resumed.wants(1, K) is None
    before = flat(models())
    for part in (mixer, resumed):
        after = mixed(part, models())
        assert torch.equal(after[4], before[4])
        distance = (before[1] - before[0]).norm()
        torch.testing.assert_close(after[0], before[0] + 0.5 * (before[1] - before[0]) / distance, atol=1e-6, rtol=0)
    mixer.start({})
    assert mixer.wants(1, K) == "moments"


@pytest.mark.parametrize(("neighbours", "asked"), [(K - 2, "moments"), (K - 1, None), (9, None)])
def test_no_sketch_is_asked_for_that_decides_nothing(neighbours: int, asked: str | None) -> None:
    mixer = NetworkProx(tau=0.5, neighbours=neighbours)
    mixer.start({})
    assert mixer.wants(1, K) == asked
    if asked is None:
        assert pairs(mixer.network(ROSTER)) == pairs(graphs.complete(K))
        assert torch.equal(mixed(mixer, models()), mixed(NetworkProx(tau=0.5, graph="complete"), models()))


def test_the_absent_keep_their_model_and_are_heard_by_nobody() -> None:
    present = (True, False, True, True, True)
    states = models()
    states[1] = {key: torch.full_like(tensor, 1e6) for key, tensor in states[1].items()}
    after, matrix = NetworkProx(tau=0.7, graph="complete").mix(states, info(present))
    assert matrix is not None and matrix[1, 1] == 1 and matrix[0, 1] == matrix[1, 0] == 0
    assert (flat(after)[1] == 1e6).all() and flat(after)[0].max() < 10
    assert [int(state["steps"]) for state in after] == [0, 10**6, 2, 3, 4]  # integers stay


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize(("solver", "p"), [("exact", 2), ("exact", 1), ("exact", "inf"), ("paper", 2)])
@pytest.mark.parametrize("s", [1.0, 0.4])
def test_a_far_off_hospital_blurs_nobody_it_has_no_part_in(absent: bool, solver: Any, p: Any, s: float) -> None:
    """Alone in the network, or absent; the others end as if it was not there, and it keeps every bit."""
    edges = tuple(pair for pair in itertools.combinations(ROSTER, 2) if absent or "clara" not in pair)
    there = tuple(not absent or site != "clara" for site in ROSTER)

    def end(offset: float) -> Models:
        states = models()
        for key in ("a", "b"):
            states[2][key] += offset
        states[2]["a"][0, 0] = -0.0
        mixer = NetworkProx(tau=0.3, s=s, p=p, solver=solver, graph="given", edges=edges)
        sent = [{key: tensor * 0 for key, tensor in states[0].items()} for _ in range(K)]
        sent[2] = {key: tensor.clone() for key, tensor in states[2].items()}  # what it was sent is what it has
        return mixer.mix(states, dataclasses.replace(info(there), known=sent))[0]

    near, far = end(0.0), end(1e8)
    others = [0, 1, 3, 4]
    assert torch.equal(flat(near)[others], flat(far)[others])
    assert flat(far)[others].var(0).sum() < 0.9 * s**2 * flat(models())[others].var(0).sum()  # they are mixed
    assert torch.equal(far[2]["b"], models()[2]["b"] + 1e8)
    if absent:
        assert math.copysign(1, float(far[2]["a"][0, 0])) == -1


@pytest.mark.parametrize("p", [1, "inf"])
def test_p_1_and_inf_have_no_matrix_and_contract(p: Any) -> None:
    before = flat(models())
    after, matrix = NetworkProx(tau=0.05, p=p, graph="complete").mix(models(), info())
    assert matrix is None
    torch.testing.assert_close(flat(after).mean(0), before.mean(0), atol=1e-12, rtol=0)
    assert flat(after).var(0).sum() < before.var(0).sum()
    assert after[0]["a"].shape == (3, 4) and [int(state["steps"]) for state in after] == list(range(K))


@pytest.mark.parametrize("tau", [0.0, 0.2, 5.0])
def test_the_papers_solver_agrees_when_it_has_the_time(tau: float) -> None:
    paper = mixed(NetworkProx(tau=tau, graph="complete", solver="paper", iterations=1500), models())
    torch.testing.assert_close(mixed(NetworkProx(tau=tau, graph="complete"), models()), paper, atol=1e-5, rtol=0)


@pytest.mark.parametrize("solver", ["exact", "paper"])
def test_a_partial_step_starts_from_what_was_sent(solver: Any) -> None:
    def make(s: float) -> NetworkProx:
        return NetworkProx(tau=0.3, s=s, graph="complete", solver=solver)

    initial = models(5)[0]
    partial = OneSlot(make(0.4), initial, dict.fromkeys(ROSTER, 1.0))
    sent = flat([initial] * K)
    for number in range(3):
        if number == 2:  # over a restart of the server
            partial = partial.restarted(make(0.4))
        trained = models(number)
        v = 0.6 * sent + 0.4 * flat(trained)
        stand_in = [{"a": row[:12].view(3, 4).clone(), "b": row[12:].clone()} for row in v]
        expected = mixed(make(1.0), stand_in)
        sent = flat(partial.mix(trained)[0])
        torch.testing.assert_close(sent, expected, atol=1e-9, rtol=0)


def test_a_whole_step_remembers_nothing() -> None:
    assert NetworkProx(tau=0.3, graph="complete").remembers is None


def test_a_lone_hospital_is_left_alone() -> None:
    mixer = NetworkProx(tau=3.0, graph="complete")
    assert torch.equal(mixed(mixer, models()[:1], info((True,), ("anna",))), flat(models()[:1]))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tau": -1}, "tau must be at least 0, got -1"),
        ({"tau": 1, "s": 0}, r"s must be in \(0, 1\], got 0"),
        ({"tau": 1, "rho": 0}, "rho must be above 0"),
        ({"tau": 1, "neighbours": 0}, "neighbours must be at least 1, got 0"),
        ({"tau": 1, "p": 3}, "argument 'p' of NetworkProx"),
        ({"tau": 1, "graph": "given"}, "edges belongs to the graph 'given'"),
        ({"tau": 1, "centre": "anna"}, "centre belongs to the graph 'star'"),
        ({"tau": 1, "graph": "star", "centre": "zoe"}, "centre 'zoe' is not in anna, berta"),
        ({"tau": 1, "graph": "given", "edges": [["anna", "zoe"]]}, "names 'zoe', which is not in anna"),
        ({"tau": 1, "graph": "given", "edges": [["anna", "anna"]]}, "a pair of two hospitals"),
    ],
)
def test_bad_arguments_get_a_sentence(args: dict[str, Any], words: str) -> None:
    config = {"path": "medpfl.core.mixers.NetworkProx", "args": args}
    with pytest.raises(ConfigError, match=words):
        build(config, Mixer, "slot 'head'").check(ROSTER)


@pytest.mark.slow
def test_a_job_runs_with_it_and_resumes(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    args = {"tau": 0.2, "s": 0.5, "graph": "given", "edges": [["anna", "berta"]]}

    def make() -> Job:
        mixer = build({"path": "medpfl.core.mixers.NetworkProx", "args": args}, Mixer, "slot 'model'")
        method = fedprox.FedProx(batch_size=8, mu=0.0)
        return make_job(rounds=4, mixers={"fedavg": Mean(), "model": mixer}, method=method)

    assert_resumes(make, table_sites, tmp_path)
