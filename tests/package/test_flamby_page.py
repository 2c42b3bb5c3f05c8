# SPDX-License-Identifier: Apache-2.0
"""docs/flamby.md: every site file in it is read by the readers themselves, and its task can learn from it."""

import json
import re
from pathlib import Path

import pytest
import torch

from medpfl.component import build
from medpfl.data.samples import Samples, SiteData
from medpfl.data.site_file import load_site_file
from medpfl.tasks.contract import Task

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "flamby.md").read_text(encoding="utf-8")
SECTIONS = {
    title.strip(): (yaml, json.loads(task))
    for title, yaml, task in re.findall(r"^## (.*?)\n.*?```yaml\n(.*?)```.*?```json\n(.*?)```", PAGE, re.M | re.S)
}
SHAPES = {
    "Fed-Heart-Disease": (13,), "Fed-TCGA-BRCA": (39,), "Fed-Camelyon16": (2048, 50),
}  # fmt: skip


def test_all_seven_are_there() -> None:
    table = re.findall(r"^\| (Fed-\S+) \|", PAGE, re.M)
    assert len(table) == 7 and set(table) == set(SECTIONS)


@pytest.mark.parametrize("name", SECTIONS)
def test_the_task_fits_the_site_file(name: str, tmp_path: Path) -> None:
    text, spec = SECTIONS[name]
    (tmp_path / "site.yaml").write_text(text)
    site = load_site_file(tmp_path / "site.yaml")
    task = build(spec, Task, "task")
    (dataset,) = site.datasets.values()
    assert list(site.datasets) == [task.dataset] and type(dataset).gives(task.spec)
    if name in SHAPES:  # the others take long to build
        names = dataset.class_names()
        blank = Samples(
            torch.zeros(2, *SHAPES[name]), torch.zeros(2, 2), torch.arange(2).numpy(), ["a", "b"], len(names)
        )
        network = task.network(SiteData({"train": blank}, names)).eval()
        with torch.no_grad():
            assert bool(torch.isfinite(network(blank.inputs[:])).all())
