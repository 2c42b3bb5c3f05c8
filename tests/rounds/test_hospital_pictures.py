# SPDX-License-Identifier: Apache-2.0
"""Pictures of the worst, the median and the best test case on a hospital's own page, and nowhere else."""

import base64
import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from medpfl.cli.sites import app
from medpfl.job import Job
from medpfl.rounds.hospital.cases import ranked
from medpfl.rounds.hospital.details import read_details
from medpfl.rounds.hospital.page import PAGE, _place
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.tasks.metrics.measure import Measure
from small_volumes import VOLUMES, write_volume_sites
from tools import run

Make = Callable[..., Job]
YELLOW = (0xFF, 0xD2, 0x3F)


@pytest.mark.slow
def test_volumes_are_shown_with_both_outlines_and_no_picture_leaves(
    make_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, handle = [], SiteRunner.handle

    def watch(runner: SiteRunner, message: Any) -> Any:
        reply = handle(runner, message)
        said.append(reply.header.model_dump_json().encode())
        return reply

    monkeypatch.setattr(SiteRunner, "handle", watch)
    run(make_job(rounds=1, task=VOLUMES), write_volume_sites(tmp_path / "sites"), tmp_path)
    held = [path.read_bytes() for path in sorted((tmp_path / "results").rglob("*")) if path.is_file()]
    for site in ("anna", "berta"):
        models = tmp_path / "home" / site / "small" / "models"
        assert (models / "chosen-best.details.json").stat().st_mode & 0o077 == 0
        pictures = read_details(models / "chosen-best.safetensors").pictures
        rows = list(csv.DictReader((models / "chosen-best.csv").open()))
        rows.sort(key=lambda row: float(row["dice"]))
        assert [one.which for one in pictures] == ["worst", "median"]  # of two cases the median is the best
        assert [one.case for one in pictures] == [row["case"] for row in rows]
        page = (models / PAGE).read_text()
        for one in pictures:
            png = base64.b64decode(one.png)
            pixels = np.asarray(Image.open(io.BytesIO(png)))
            assert max(pixels.shape) == 208 and (pixels == YELLOW).all(axis=-1).any()
            assert f'src="data:image/png;base64,{one.png}"' in page
            for secret in (png[40:90], one.png[60:120].encode(), one.case.encode()):
                assert not [content for content in (*held, *said) if secret in content]
        (models / PAGE).unlink()
        assert CliRunner().invoke(app, ["site", "page", str(models)]).exit_code == 0
        assert (models / PAGE).read_text() == page


LABELS = [
    {"case": "a", "label_0": "1", "p_0": "0.9", "label_1": "", "p_1": "0.9"},
    {"case": "b", "label_0": "0", "p_0": "0.8", "label_1": "1", "p_1": "0.9"},
]


def test_labels_and_numbers_are_ranked_by_how_far_they_are_off() -> None:
    found = ranked(LABELS, "macro_auc", Measure(), ["oedema", "mass"])
    assert [(one.case, one.said) for one in found] == [
        ("b", "oedema with 0.80, is not there"),
        ("a", "oedema with 0.90, is there"),
    ]
    numbers = [{"case": str(n), "value": value, "predicted": 5.0} for n, value in enumerate([4.0, 9.0, 5.5])]
    assert [one.case for one in ranked(numbers, "mae", Measure(), [])] == ["1", "0", "2"]
    assert not ranked([{"case": "a", "time": 3.0, "event": 1}], "c_index", Measure(), [])


@pytest.mark.parametrize(
    ("cases", "place"),
    [
        (["/data/scans/a/1.png", "/data/scans/b/2.png"], "/data/scans/"),
        (["/data/1.png"], "/data/"),
        (["/1.png", "/data/2.png"], "/"),
        (["a/1.png", "a/2.png"], ""),
        (["1042", "1043"], ""),
        ([], ""),
    ],
)
def test_the_folder_of_all_cases_is_said_once(cases: list[str], place: str) -> None:
    assert _place(cases) == place
