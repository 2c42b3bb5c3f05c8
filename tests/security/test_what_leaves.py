# SPDX-License-Identifier: Apache-2.0
"""The list of what leaves a hospital is complete: everything that is found on the wire stands on it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from nvflare.apis.dxo import from_shareable
from nvflare.apis.shareable import Shareable
from typer.testing import CliRunner

from exchanging import Asked, slots
from hostile import attacked
from medpfl.cli import app
from medpfl.core.mixers import Mean, Mixer, NetworkProx
from medpfl.job import Job
from medpfl.methods.base import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.pfednet import PFedNet
from medpfl.methods.scaffold import Scaffold
from medpfl.methods.softpull import SoftPull
from medpfl.rounds.leaves import _ECHOED, _described, leaves_of
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol import Plan, Reply, Sizes

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., Job]
METHODS: dict[str, tuple[Method, dict[str, Mixer] | None]] = {
    "SoftPull": (SoftPull(lr=0.05, steps=1), None),
    "FedAvg": (FedAvg(lr=0.05, steps=1), {"fedavg": Mean()}),
    "Scaffold": (Scaffold(lr=0.05, steps=1), dict(Scaffold().components())),  # type: ignore[arg-type]
    "PFedNet": (PFedNet(lr=0.05, steps=1), {"shared": Mean(), "personal": NetworkProx(tau=0.1, neighbours=1)}),
    "complete": (PFedNet(lr=0.05, steps=1), {"shared": Mean(), "personal": NetworkProx(tau=0.1, neighbours=3)}),
    "exchanges": (Asked(lr=0.05, steps=1), slots()),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_nothing_is_on_the_wire_that_is_not_on_the_list(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, name: str
) -> None:
    method, mixers = METHODS[name]
    job = make_job(rounds=2, method=method, mixers=mixers)
    listed = {(one.when, one.what) for one in leaves_of(job, len(table_sites))}
    assert ("statistics", "tensors of 'moments'") not in listed or name == "PFedNet"
    seen: set[tuple[str, str]] = set()

    def look(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        dxo = from_shareable(honest)
        assert set(honest) == {"__headers__", "DXO"} and set(dxo.meta) == {"medpfl"}
        assert set(honest["__headers__"]) == {"__content_type__"}
        said = json.loads(dxo.meta["medpfl"])
        assert set(said) <= {"content", "coded"} and said.get("coded") is None
        task = asked.header.task
        seen.update((task, field) for field in said["content"])
        what = "tensors of '{}'" if task == "statistics" else "tensors of slot '{}'"
        seen.update((task, what.format(entry.partition("::")[0])) for entry in dxo.data)
        return honest

    attacked(job, table_sites, tmp_path, look)
    assert {one for one in seen if one[1] not in _ECHOED} == listed


def test_every_field_of_every_reply_is_described() -> None:
    for kind in (*get_args(Reply), Plan, Sizes):
        assert set(kind.model_fields) - _ECHOED == set(_described(kind)) - _ECHOED


def test_the_page_for_hospital_it_has_what_the_command_says() -> None:
    said = CliRunner().invoke(app, ["leaves", "softpull_phantom"], env={"COLUMNS": "400"})
    assert said.exit_code == 0 and "| train | loss | the training loss" in said.output
    assert said.output.strip() in (ROOT / "docs" / "roles" / "hospital-it.md").read_text(encoding="utf-8")
