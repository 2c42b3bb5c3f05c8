# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of volumes comes from another hospital, and a plan is made of it: of numbers made to fill memory, or
to take for ever, one sentence is made, and of the worst that is allowed a plan in a second. Nor does one hospital end
the others' job by them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.core.errors import ConfigError, PolicyRefused
from medpfl.data.fingerprint import Fingerprint
from medpfl.data.policy import Policy
from medpfl.data.site_file import load_site_file
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.models.auto import Auto
from medpfl.privacy.update import ClippedNoise
from medpfl.results.record import Record
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import Message
from medpfl.rounds.planning import Planning
from medpfl.rounds.protocol.replies import PlanReply
from medpfl.rounds.protocol.requests import PlanRequest
from medpfl.rounds.server.quorum import Quorum
from medpfl.tasks.segmentation import Segmentation
from small_volumes import write_volume_sites

HONEST = {"cases": 10, "channels": 1, "classes": 2, "spacing": [1, 1, 1], "fine": [1, 1, 1], "shape": [64, 64, 64]}


def planned(folder: Path, *hospitals: dict[str, Any]) -> Any:
    files = []
    for number, said in enumerate(hospitals):
        files.append(folder / f"{number}.json")
        files[-1].write_text(json.dumps({**HONEST, **said}))
    started = time.process_time()
    done = CliRunner().invoke(app, ["plan", "organ", *map(str, files)])
    assert time.process_time() - started < 5
    return done


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ({"cases": 10**12}, "cases"),
        ({"channels": 10**9}, "channels"),
        ({"classes": 10**9}, "classes"),
        ({"spacing": [1, 1, 1e-7]}, "spacing.2"),
        ({"fine": [1, 1, 1e300]}, "fine.2"),
        ({"shape": [1e300, 1, 1]}, "shape.0"),
        ({"shape": [60_000, 1, 1]}, "volumes of 60000 mm"),
    ],
)
def test_absurd_numbers_are_refused_in_a_sentence(said: dict[str, Any], place: str, tmp_path: Path) -> None:
    done = planned(tmp_path, {}, said)
    assert isinstance(done.exception, ConfigError) and place in str(done.exception)
    assert "expected a file of 'medpfl fingerprint'" in str(done.exception)


def test_the_worst_that_is_allowed_takes_no_time(tmp_path: Path) -> None:
    worst = {"cases": 10**6, "spacing": [100, 0.01, 0.01], "fine": [100, 0.01, 0.01], "shape": [100, 65536, 65536]}
    assert planned(tmp_path, worst).exit_code == 0
    assert planned(tmp_path, worst, {"spacing": [0.01, 100, 0.01], "shape": [65536, 100, 65536]}).exit_code == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"channels": 1000}, "its volumes have 1000 channels and 2 classes, and most hospitals' have 1 and 2"),
        ({"classes": 256}, "1 channels and 256 classes"),
        ({"shape": [1, 1, 1]}, "too small for a network of three levels"),
        ({"spacing": [100, 0.01, 0.01], "shape": [100, 65536, 65536]}, ""),
    ],
)
def test_one_hospital_does_not_end_the_others_job(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    """In a job whose network is planned when it starts."""
    names = ["anna", "berta", "clara"]
    record = Record("planned", tuple(names))
    task = Segmentation("organ", size=(64, 64, 64), architecture=Auto())
    job = Job("planned", 2, Settings(rounds=1), {}, FedAvg(), task)
    planning = Planning(job, names, tmp_path / "home", record, Quorum(record, names, 2))
    told = {name: Fingerprint.model_validate_json(json.dumps(HONEST)) for name in names}
    told["anna"] = Fingerprint.model_validate_json(json.dumps({**HONEST, **said}))
    planning.take({name: Message(PlanReply(fingerprint=one)) for name, one in told.items()})
    assert planning.plan is not None and planning.plan.size == (64, 64, 64)
    refused = [event for event in record.events if event.site != "server"]
    assert [event.site for event in refused] == (["anna"] if words else [])
    assert not words or words in refused[0].event
    alike = [event.event for event in record.events if "exactly the same" in event.event]
    assert [event.split(" say ")[0] for event in alike] == ["berta and clara"]


NOISE = ClippedNoise(clip=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("policy", "method", "sentence"),
    [
        ({}, FedAvg(), None),
        ({"methods": ["medpfl.methods.fedprox.FedProx"]}, FedAvg(), r"\('methods'\) does not allow"),
        ({"tasks": []}, FedAvg(), r"\('tasks'\) does not allow"),
        ({"filters": ["nvflare.app_common.filters.SVTPrivacy"]}, FedAvg(), r"\('filters'\) asks for the filter"),
        ({"privacy": "update"}, FedAvg(), r"\('privacy'\) asks for noise"),
        ({}, FedAvg(privacy=NOISE), "the server asks for a description"),
    ],
)
def test_a_hospital_describes_its_volumes_to_no_job_that_it_would_refuse(
    policy: dict[str, Any], method: FedAvg, sentence: str | None, tmp_path: Path
) -> None:
    """The description is the first that is asked for, before the job has said what it will do."""
    site_file = load_site_file(write_volume_sites(tmp_path, ("anna",))["anna"])
    site_file = site_file.model_copy(update={"policy": Policy(**policy)})
    task = Segmentation("organ", size=(16, 16, 16), architecture=Auto())
    runner = SiteRunner("anna", method, task, lambda: site_file, tmp_path / "home")
    if sentence is None:
        assert isinstance(runner.handle(Message(PlanRequest(job="organs"))).header, PlanReply)
        return
    with pytest.raises((PolicyRefused, ConfigError), match=sentence):
        runner.handle(Message(PlanRequest(job="organs")))
