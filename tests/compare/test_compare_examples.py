# SPDX-License-Identifier: Apache-2.0
"""Example segmentations on a comparison's page: only on request, by rule, and nowhere else."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from comparing import SOFT, compared, plan_of
from evaluating import evaluate_at
from medpfl.check.pictures import Outline, draw, radiological
from medpfl.compare.examples import FOUND, TRUTH, examples_of
from medpfl.compare.plan import Plan
from medpfl.compare.report import write_report
from medpfl.compare.results import Results
from medpfl.core.errors import ConfigError
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from pictures import TABLE, write_images

TASK = {
    "path": "medpfl.tasks.segmentation.Segmentation",
    "args": {
        "dataset": "skin",
        "size": [8, 8],
        "architecture": {"path": "medpfl.models.unet.UNet", "args": {"channels": [2, 4]}},
    },
}


def write_sites(folder: Path) -> dict[str, Path]:
    files = {}
    for number, site in enumerate(("anna", "berta")):
        write_images(folder / site, count=24 + 12 * number)
        declared = {key: value for key, value in TABLE.items() if key != "label"}
        files[site] = folder / site / "site.yaml"
        files[site].write_text(yaml.safe_dump({"site": site, "datasets": {"skin": declared}}))
    return files


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], Plan, Results]:
    folder = tmp_path_factory.mktemp("examples")
    sites = write_sites(folder)
    plan, content = compared(folder, sites, task=TASK, examples=True, rounds=1, steps=20, methods={"Soft": SOFT})
    return folder / "results", sites, plan, content


def colours_in(png: str) -> set[str]:
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(png)))).reshape(-1, 3)
    return {"#" + bytes(pixel).hex() for pixel in np.unique(pixels, axis=0).astype(np.uint8)}


@pytest.mark.slow
def test_cases_follow_the_rule_and_show_what_was_scored(
    done: tuple[Path, dict[str, Path], Plan, Results],
) -> None:
    results, sites, plan, content = done
    found = examples_of(plan, content, results)
    assert {case.site for case in found} == set(sites) and len(found) <= 4
    for site in sites:
        run = next(run for run in plan.runs if run.name == "Local")
        path = results / "runs" / run.digest / "home" / site / "compared" / "models" / "local-best.safetensors"
        cases = evaluate_at(load_deployed(path), load_site_file(sites[site], site), "test").cases
        scores = [case["dice"] for case in cases]
        mine = [case for case in found if case.site == site]
        assert mine[0].what == "the first test case" and mine[0].models[0].score == scores[0]
        assert mine[-1].models[0].score == sorted(scores)[(len(scores) - 1) // 2]
        for case in mine:
            local, common, best = (model.name for model in case.models)
            assert (local, common) == ("Local", "FedAvg") and best in ("Soft", "Soft (personal_before_pull)")
            assert all(TRUTH in colours_in(model.png) for model in case.models)
            assert not any(name in case.what for name in (each["case"] for each in cases))
    assert any(FOUND in colours_in(model.png) for case in found for model in case.models)


@pytest.mark.slow
def test_images_are_on_the_page_on_request_only(
    done: tuple[Path, dict[str, Path], Plan, Results], tmp_path: Path
) -> None:
    results, _, plan, content = done
    with_images = write_report(content, tmp_path, examples_of(plan, content, results)).read_text()
    assert "This page shows images of patients" in with_images and "data:image/png;base64," in with_images
    without = write_report(content, tmp_path).read_text()
    assert "data:image" not in without and "images of patients" not in without
    assert "png" not in (results / "results.json").read_text()


def test_a_task_without_segmentations_is_refused(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="'examples' shows segmentations of images, which Tabular does not make"):
        plan_of(tmp_path, table_sites, examples=True)


def test_an_outline_runs_inside_its_label() -> None:
    label = np.zeros((16, 16), np.uint8)
    label[4:12, 4:12] = 1
    picture = draw(np.zeros((1, 16, 16)), [Outline(label, ("#ff0000",), 2)], (1.0, 1.0))
    red = (picture == [255, 0, 0]).all(axis=2)
    side = len(picture) // 16
    rows = np.flatnonzero(red.any(axis=1))
    assert (
        (rows[0], rows[-1]) == (4 * side, 12 * side - 1) and not red[8 * side, 8 * side] and red[8 * side, 4 * side + 1]
    )
    # A slice in RAS: right in the array's first axis is left in the picture, the front is above.
    voxels = np.zeros((3, 5))
    voxels[2, 4] = 1
    assert radiological(voxels).shape == (5, 3) and radiological(voxels)[0, 0] == 1
