# SPDX-License-Identifier: Apache-2.0
"""What Weights & Biases' own files hold after a job equals its metrics.jsonl; nothing is sent.

wandb is no part of the extra "test". ``pip install wandb`` runs these.
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.job import Job
from medpfl.results.files import read_lines, read_summary
from medpfl.results.trackers.scalars import Scalar, scalars
from medpfl.results.trackers.wandb import MODE, WeightsAndBiases
from medpfl.rounds.simulate import simulate

pytestmark = pytest.mark.slow
wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'medpfl[wandb]'")


def records(file: Path) -> Iterator[bytes]:
    """A .wandb file is a log of LevelDB's form: blocks of 32 KiB with pieces of records, each after 7 bytes."""
    content, position, whole = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def stored(file: Path) -> tuple[str, str, str, list[Scalar]]:
    """Project, group, name and numbers of a run."""
    from wandb.proto.wandb_internal_pb2 import Record

    found, told = [], ("", "", "")
    for text in records(file):
        record = Record()
        record.ParseFromString(text)
        if record.HasField("run"):
            told = record.run.project, record.run.run_group, record.run.display_name
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            site = told[2].removeprefix("small ")
            found += [Scalar(site, name, value, row["round"]) for name, value in row.items() if name[0] != "_"]
    return (*told, sorted(one for one in found if one.name != "round"))


def test_wandb_holds_the_lines(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MODE, raising=False)
    folder = tmp_path / "results"
    simulate(make_job(rounds=2), table_sites, folder, tmp_path / "home", trackers=[WeightsAndBiases("thesis")])
    assert not [one for one in read_summary(folder).events if "tracker" in one.event]
    for place, experiment in ((folder, "thesis"), (tmp_path / "again", "small")):
        if place != folder:
            command = ["report", str(folder), "--wandb", str(place)]
            assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
        # At once: what W&B's process has not written by now is lost where the server's process is ended.
        runs = [stored(file) for file in (place / "wandb").glob("offline-run-*/*.wandb")]
        assert {name: numbers for _, _, name, numbers in runs} == {
            f"small {site}": sorted(one for one in scalars(read_lines(folder)) if one.site == site)
            for site in (*table_sites, "mean", "server")
        }
        assert {(project, group) for project, group, _, _ in runs} == {(experiment, "small")}
