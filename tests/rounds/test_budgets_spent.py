# SPDX-License-Identifier: Apache-2.0
"""A job that ends because a hospital's budget of noise is spent: with which round, at every hospital."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from medpfl import store
from medpfl.core.mixers import Identity, Mean, NetworkProx
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.pfednet import PFedNet
from medpfl.privacy import ClippedNoise
from medpfl.privacy.accountant import epsilon
from medpfl.results.files import read_summary
from medpfl.rounds.simulate import simulate
from small_jobs import small_job, write_table_sites

UPDATE = ClippedNoise(clip=0.1, noise_multiplier=6.0)


def limited(sites: dict[str, Path], messages: int) -> dict[str, Path]:
    """Anna's policy lets so many of her messages leave."""
    policy = {"most_epsilon": epsilon([UPDATE.mechanism()] * messages, 1e-5) * 1.001 or 1e-6}
    file = sites["anna"].with_name("anna.limited.yaml")
    file.write_text(yaml.safe_dump({**yaml.safe_load(sites["anna"].read_text()), "policy": policy}))
    return {**sites, "anna": file}


@pytest.mark.slow
def test_who_has_budget_left_ends_with_the_same_round_as_the_job(tmp_path: Path) -> None:
    """Berta had trained a third round before the server knew that anna would not."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    limit = limited(sites, 2)
    method = FedAvg(lr=0.1, steps=3, batch_size=6, optimizer="sgd", privacy=UPDATE)
    job = small_job(9, {"local": Identity(), "fedavg": Mean()}, method)
    simulate(job, limit, tmp_path / "r", tmp_path / "h")
    simulate(replace(job, settings=replace(job.settings, rounds=2)), sites, tmp_path / "r2", tmp_path / "h2")
    for site in sites:
        ended, other = (
            store.read(tmp_path / home / site / "small/models/local-last.safetensors") for home in ("h", "h2")
        )
        assert all(torch.equal(tensor, other[0][key]) for key, tensor in ended[0].items()), site


@pytest.mark.slow
def test_a_budget_that_is_spent_within_a_round_ends_the_job_with_that_round(tmp_path: Path) -> None:
    """All had trained, and what they sent was mixed: it was tested as the models of the round before."""
    sites = limited(write_table_sites(tmp_path / "sites", ["anna", "berta"]), 3)
    method = PFedNet(alternate=(1, 1), lr=0.1, batch_size=6, optimizer="sgd", privacy=UPDATE)
    job = small_job(9, {"shared": Mean(uniform=True), "personal": NetworkProx(tau=0.1, graph="complete")}, method)
    simulate(job, sites, tmp_path / "r", tmp_path / "h")
    summary = read_summary(tmp_path / "r")
    (ended,) = [event.event for event in summary.events if "the job ends after round" in event.event]
    assert ended.startswith("the job ends after round 2, of whose 1 further exchanges 0 were made: ")
    assert {(line.site, line.round) for line in summary.test if line.choice == "last"} == {("anna", 2), ("berta", 2)}
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    told = [(line["site"], line["round"]) for line in lines if line["split"] == "validation" and line["site"] != "mean"]
    assert sorted(told) == [(site, number) for site in ("anna", "berta") for number in (1, 2)]


def test_who_never_had_budget_is_told_of_no_round_beyond_the_last(tmp_path: Path) -> None:
    """Of a job of two rounds: "the private part starts anew in round 3"."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta", "clara"])
    job = small_job(2, {"fedavg": Mean()}, FedAvg(lr=0.1, steps=3, batch_size=6, optimizer="sgd", privacy=UPDATE))
    done = simulate(job, limited(sites, 0), tmp_path / "r", tmp_path / "h")
    told = [event.event for event in done.record.events if event.site == "anna" and "private part" in event.event]
    assert told == ["no state of this run is kept here; the private part starts anew after round 2"]
