# SPDX-License-Identifier: Apache-2.0
"""CusFL's variants that are not the paper's: a trained teacher, and a shared warm-up."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines import State, begin, held, play, same, served
from medpfl.core.mixers import Mean
from medpfl.methods.fedper import FedPer
from small_cusfl import on_tables
from tools import Make, normed


def beside_fedper(make_job: Make, sites: dict[str, Path], folder: Path, **method: Any) -> Iterator[tuple[State, State]]:
    """Round by round f_xi and FedPer's shared part: of the same batches, its mean by hospitals as CusFL's."""
    coordinator, runners = begin(on_tables(make_job, **method), sites, folder / "cusfl")
    fedper = FedPer(lr=0.05, batch_size=8)
    mixers = {"model": Mean(uniform=True)}
    apart, others = begin(make_job(rounds=4, mixers=mixers, method=fedper, task=normed()), sites, folder / "fedper")
    for number in (1, 2, 3):
        play(coordinator, runners, number)
        play(apart, others, number)
        inside = "extractor.network."
        mine = {k.removeprefix(inside): t for k, t in served(coordinator, "federated").items() if k.startswith(inside)}
        yield mine, served(apart, "model")


@pytest.mark.slow
def test_a_trained_teacher_is_what_hospitals_with_heads_of_their_own_average(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    for mine, theirs in beside_fedper(make_job, table_sites, tmp_path, teacher="trained"):
        assert same(mine, theirs)


@pytest.mark.slow
def test_a_trained_teacher_stands_still_while_it_teaches(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begin(on_tables(make_job, teacher="trained"), table_sites, tmp_path)
    for number in (1, 2):
        before = {site: served(coordinator, "federated", site) for site in runners}
        sent = play(coordinator, runners, number)
        assert {key.split(".")[0] for slot in sent["anna"].values() for key in slot} == {"federated"}
        for site, runner in runners.items():
            assert same(held(runner, "federated"), before[site])
            assert not same(held(runner, "personal"), held(runner, "tutor"))  # who is taught is somebody else


@pytest.mark.slow
def test_warm_up_shares_the_extractor_and_then_never_again(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """FedPer in the first two rounds; the third begins with what they made and goes its own way."""
    equal = [same(mine, theirs) for mine, theirs in beside_fedper(make_job, table_sites, tmp_path, warm_up=2)]
    assert equal == [True, True, False]


@pytest.mark.slow
def test_after_warm_up_without_a_teacher_it_is_local_training_from_there(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The control of a study: the same warm-up, nothing aligned afterwards, at no time a weight of the alignment."""
    coordinator, runners = begin(on_tables(make_job, warm_up=1, aligned_rounds=1), table_sites, tmp_path)
    play(coordinator, runners, 1)
    common = served(coordinator, "federated")
    for number in (2, 3):
        play(coordinator, runners, number)
        assert all(float(runner.models["alignment"].get_buffer("weight")) == 0 for runner in runners.values())
    assert not same(common, served(coordinator, "federated"))
    taught, others = begin(on_tables(make_job, warm_up=1), table_sites, tmp_path / "taught")
    for number in (1, 2):
        play(taught, others, number)
        ratio = float(others["anna"].models["alignment"].get_buffer("ratio"))
        assert (ratio > 0) == (number == 2)


@pytest.mark.slow
def test_a_hospital_that_is_not_asked_when_warm_up_ends_takes_the_shared_extractor_when_it_is(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Anna misses round 2, the first after warm-up: in round 3 her f begins with f_xi, and then goes its own way, also
    in another process. (The learning rate is so small that only what is replaced shows.)"""
    job = on_tables(make_job, rounds=5, warm_up=1, aligned_rounds=1, lr=1e-12)
    coordinator, runners = begin(job, table_sites, tmp_path)
    play(coordinator, runners, 1)
    play(coordinator, runners, 2, ["berta", "clara"])
    shared = held(runners["berta"], "personal")["0.weight"]
    for number, expected in ((3, shared), (4, shared + 1), (5, shared + 1)):
        if number < 5:
            with torch.no_grad():
                runners["anna"].models["personal"].get_parameter("0.weight").copy_(shared + 1)
        else:
            runners["anna"].recover()
        play(coordinator, runners, number)
        torch.testing.assert_close(held(runners["anna"], "personal")["0.weight"], expected)
