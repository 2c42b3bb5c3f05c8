# SPDX-License-Identifier: Apache-2.0
"""Other personal models inside FedSM: each is what its own method makes alone, and the rest of FedSM stays as it is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, Mixer, NetworkProx, RelaxedMean, ServerAdam, SoftPull, StatisticsDistance
from medpfl.job import Job
from medpfl.methods.apfl import APFL
from medpfl.methods.contract import Method
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedmd import FedMD
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.fedsm import FedSM, FedSMPersonalised
from medpfl.methods.fine_tuned import FineTuned
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.methods.moe import MoE
from medpfl.methods.panels import AtServer
from medpfl.methods.per_fedavg import PerFedAvg
from medpfl.methods.pfedme import PFedMe
from medpfl.methods.pfednet import PFedNet
from medpfl.results.schema import ValidationLine
from medpfl.rounds.simulate import simulate
from tools import assert_same, normed, outcome, pieces, ready, round_of, run, same

Make = Callable[..., Job]
PERSONALISERS: list[tuple[Method, str, Mixer]] = [
    (FineTuned(), "model", Mean()),
    (APFL(alpha=0.3), "global", Mean()),
    (PerFedAvg(inner_lr=0.1), "model", Mean()),
    (PFedMe(lam=2.0, outer_lr=0.2, inner_steps=2), "global", RelaxedMean()),
]
ASKING: list[tuple[Method, str, Mixer]] = [  # their components want statistics of the hospitals' data
    (FedAP(), "model", StatisticsDistance()),
    (FedAP(batch_norm="shared"), "model", StatisticsDistance(statistics="batch_norm_running", from_round=2)),
    (PFedNet(personal=("",)), "personal", NetworkProx(tau=0.1, neighbours=1)),
]


def job_with(make_job: Make, personaliser: Method, slot: str, mixer: Mixer, **more: int) -> Job:
    method = FedSMPersonalised(lr=0.05, batch_size=8, selector_steps=3, personaliser=personaliser)
    mixers = {"global": Mean(), "personal": SoftPull(lam=1.0), "selector": ServerAdam(lr=0.02), f"own_{slot}": mixer}
    return make_job(mixers=mixers, method=method, task=normed(), **more)


@pytest.mark.parametrize(("personaliser", "slot", "mixer"), [*PERSONALISERS, *ASKING])
@pytest.mark.slow
def test_each_is_its_own_method_and_fedsm_s_other_parts_are_fedsm_s(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, personaliser: Method, slot: str, mixer: Mixer
) -> None:
    inside, runners = pieces(job_with(make_job, personaliser, slot, mixer), table_sites, tmp_path / "1")
    alone_method = replace(personaliser, lr=0.05, batch_size=8)
    alone_job = make_job(mixers={slot: mixer}, method=alone_method, task=normed())
    alone, alone_runners = pieces(alone_job, table_sites, tmp_path / "2")
    fedsm_job = make_job(
        mixers={"global": Mean(), "personal": SoftPull(lam=1.0), "selector": ServerAdam(lr=0.02)},
        method=FedSM(lr=0.05, batch_size=8, selector_steps=3), task=normed(),
    )  # fmt: skip
    fedsm, fedsm_runners = pieces(fedsm_job, table_sites, tmp_path / "3")
    for coordinator, sites in ((inside, runners), (alone, alone_runners), (fedsm, fedsm_runners)):
        ready(coordinator, sites)
        for number in (1, 2):
            round_of(coordinator, sites, number)
    for site in inside.roster:
        ours = inside.rounds.train_messages(3, [site])[site].slots
        theirs = alone.rounds.train_messages(3, [site])[site].slots[slot]
        assert same({key.removeprefix("own_"): value for key, value in ours[f"own_{slot}"].items()}, theirs)
        plain = fedsm.rounds.train_messages(3, [site])[site].slots
        for name in ("global", "selector"):
            assert same(ours[name], plain[name])
        # What the server holds is the network that the method deploys, from the hospital's own copies.
        runner = alone_runners[site]
        alone_method.after_mixing(runner.rounds.site(alone_method, 2))
        deployed = runner.models[next(iter(alone_method.deploys.values()))].state_dict()
        for key, value in deployed.items():
            torch.testing.assert_close(ours["personal"][f"personal.{key}"], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("personaliser", "slot", "mixer"), [*PERSONALISERS, *ASKING])
@pytest.mark.slow
def test_resuming_changes_nothing(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, personaliser: Method, slot: str, mixer: Mixer
) -> None:
    whole = run(job_with(make_job, personaliser, slot, mixer, rounds=2), table_sites, tmp_path / "whole")
    simulate(
        job_with(make_job, personaliser, slot, mixer, rounds=2),
        table_sites, tmp_path / "a", tmp_path / "home", stop_after=1,
    )  # fmt: skip
    simulate(job_with(make_job, personaliser, slot, mixer, rounds=2), table_sites, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))


def test_what_the_personaliser_measures_is_told(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = pieces(job_with(make_job, *PERSONALISERS[1]), table_sites, tmp_path)
    ready(coordinator, runners)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    told = {line.model: line.metrics for line in coordinator.record.lines if isinstance(line, ValidationLine)}
    assert 0 <= (told["alpha"]["alpha"] or 0) <= 1 and "selector_accuracy" in told
    (curves,) = [panel for panel in coordinator.job.method.report_panels(AtServer(links={})) if panel.kind == "curves"]
    assert curves.names == ["selector_accuracy", "selector_accuracy_cases", "alpha"]


def test_each_hospital_follows_the_personaliser_as_it_is_there() -> None:
    method = FedSMPersonalised(personaliser=MHpFLID(bodies={"anna": "stage3", "berta": "down"}), batch_size=4)
    assert method.at("anna").personaliser == MHpFLID(bodies={"default": "stage3"}).trained_like(method)
    assert method.at("carl").personaliser == MHpFLID().trained_like(method)


def test_training_settings_are_fedsm_s() -> None:
    assert FedSMPersonalised(steps=7, personaliser=FedAvg(steps=7)).personaliser.steps == 7
    assert FedSMPersonalised(lr=0.5).personaliser.lr == 0.5
    with pytest.raises(ConfigError, match="personaliser takes lr from FedSM; it names another"):
        FedSMPersonalised(lr=0.5, personaliser=APFL(lr=0.2))
    with pytest.raises(ConfigError, match="must be another method"):
        FedSMPersonalised(personaliser=FedSM())


@pytest.mark.parametrize(
    ("personaliser", "words"),
    [
        (FedRoD(), "FedRoD's personal model predicts with more than one network"),
        (MoE(), "MoE's personal model predicts with more than one network"),
        (FedMD(public="shared"), "FedMD needs public data"),
    ],
)
def test_what_cannot_be_run_inside_is_refused_by_a_sentence(personaliser: Method, words: str) -> None:
    with pytest.raises(ConfigError, match=f"must be one that FedSM can run: {words}"):
        FedSMPersonalised(personaliser=personaliser)


def test_exchanges_of_the_personaliser_s_own_are_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Nobody would ask for them: what PFedNet trains in them would never be trained."""
    method = FedSMPersonalised(personaliser=PFedNet(alternate=(2, 1)))
    mixers = {**method.components(), "own_personal": NetworkProx(tau=0.1, graph="complete")}
    with pytest.raises(ConfigError, match="PFedNet exchanges slots within a round"):
        pieces(make_job(mixers=mixers, method=method, task=normed()), table_sites, tmp_path)
    with pytest.raises(ConfigError, match=r"alternate is \[2, 9\], and the job has 3 rounds"):
        make_job(mixers=mixers, method=FedSMPersonalised(personaliser=PFedNet(alternate=(2, 9))), task=normed())
    assert FedSMPersonalised(personaliser=PFedNet()).refinements(1, 2) == FedSM().refinements(1, 2)


def test_a_checkpoint_of_the_personaliser_s_is_asked_for() -> None:
    assert FedSMPersonalised(personaliser=FedAP(pretrained="public")).declared_checkpoints() == ["public"]
    assert FedSMPersonalised().declared_checkpoints() == []
