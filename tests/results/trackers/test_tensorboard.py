# SPDX-License-Identifier: Apache-2.0
"""What TensorBoard reads back of a job equals its metrics.jsonl: each number once, at the round that its line names."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.job import Job
from medpfl.results.files import read_lines, read_summary
from medpfl.results.schema import RoundLine, ValidationLine
from medpfl.results.trackers.scalars import scalars
from medpfl.results.trackers.tensorboard import EventFiles, TensorBoard, write_tensorboard
from medpfl.rounds.simulate import simulate
from tensorboard_files import shown

pytestmark = pytest.mark.slow


def test_a_resumed_job_in_tensorboard_equals_its_lines(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job, folder = make_job(rounds=3), tmp_path / "results"
    simulate(job, table_sites, folder, tmp_path / "home", stop_after=2, trackers=[TensorBoard()])
    assert {one.round for one in shown(folder / "tb_events")} == {1, 2}
    simulate(job, table_sites, folder, tmp_path / "home", trackers=[TensorBoard()])
    assert not [one for one in read_summary(folder).events if "tracker" in one.event]
    written = [one._replace(value=float(np.float32(one.value))) for one in scalars(read_lines(folder))]
    assert shown(folder / "tb_events") == sorted(written)
    assert {one.site for one in written} == {*table_sites, "mean", "server"}
    assert {one.name.split("/")[0] for one in written} == {"validation", "test", "train", "round"}

    write_tensorboard(folder, tmp_path / "afterwards")
    assert shown(tmp_path / "afterwards") == sorted(written)
    with pytest.raises(ConfigError, match="holds TensorBoard's event files already"):
        write_tensorboard(folder, tmp_path / "afterwards")


@pytest.mark.parametrize("name", ["", ".", "..", "../out", "/tmp/out", "a/b", "a\0b"])
def test_a_hospitals_name_leads_out_of_no_folder(name: str, tmp_path: Path) -> None:
    """Of altered results; ".." is a folder's name to Python, and it is the one above."""
    folder = tmp_path / "in" / "files"
    line = ValidationLine(site=name, model="personal", round=1, metrics={"accuracy": 0.5})
    with pytest.raises(MedPFLError, match="the name is no folder's"):
        EventFiles(folder).write([RoundLine(round=1, seconds=1.0), line])
    assert {path.parent for path in tmp_path.rglob("events*")} <= {folder / "server"}
