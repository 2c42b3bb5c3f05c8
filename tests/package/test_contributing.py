# SPDX-License-Identifier: Apache-2.0
"""The method that CONTRIBUTING.md shows is run as it stands there."""

import re
import sys
import types
from pathlib import Path

import pytest

from medpfl.demo.phantom import write_phantoms
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.models.unet import UNet
from medpfl.tasks.segmentation import Segmentation
from tools import exchange, pieces, ready

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = """
from dataclasses import dataclass
from typing import ClassVar
from medpfl.core.groups import BATCH_NORM, of_type, under, without
from medpfl.methods.contract import Method
"""


@pytest.fixture
def fedbn(monkeypatch: pytest.MonkeyPatch) -> type:
    block = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block
    module = types.ModuleType("fedbn_of_the_docs")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    lines = block[1].splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    source = IMPORTS + "\n".join(line[indent:] for line in lines)
    exec(compile(source, "CONTRIBUTING.md", "exec"), module.__dict__)
    found: type = module.FedBN
    return found


@pytest.mark.slow
def test_the_documented_method_keeps_batch_norm_at_home(fedbn: type, tmp_path: Path) -> None:
    sites = {site: tmp_path / f"{site}.yaml" for site in write_phantoms(tmp_path)[2:]}
    task = Segmentation(dataset="organ", size=(16, 16), spacing=(12.0, 12.0, 24.0), architecture=UNet((4, 8)))
    job = Job("fedbn", 2, Settings(rounds=1, references=()), {}, fedbn(steps=2), task)
    coordinator, runners = pieces(job, sites, tmp_path / "run")
    ready(coordinator, runners)
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    normal = {
        f"model.{name}.{entry}"
        for name, module in runners["hospital-c"].models["model"].named_modules()
        if type(module).__name__ == "BatchNorm2d"
        for entry in module.state_dict()
    }
    for message in replies.values():
        assert normal and not normal & message.slots["model"].keys()
        assert len(message.slots["model"]) + len(normal) == len(runners["hospital-c"].models.state_dict())
    assert coordinator.rounds.take_train(1, replies) == sorted(sites)
