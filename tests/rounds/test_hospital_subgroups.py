# SPDX-License-Identifier: Apache-2.0
"""Scores of groups of patients on a hospital's own page, and nowhere else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from medpfl.core.errors import MedPFLError
from medpfl.data.samples import Samples
from medpfl.data.subgroups import Grouping
from medpfl.deployed.model_file import read_description
from medpfl.job import Job
from medpfl.rounds.hospital.details import read_details, score_groups
from medpfl.rounds.hospital.page import PAGE
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.tasks.metrics.labels import LABEL_METRICS
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import Sheet, sheet_of
from small_jobs import SITES, write_table_sites
from tools import run

Make = Callable[..., Job]


def sheet(right: list[bool], owners: list[str] | None = None) -> Sheet:
    given = torch.tensor([[0.0, 1.0] if one else [1.0, 0.0] for one in right])
    names = [str(number) for number in range(len(right))]
    truth = torch.ones(len(right), dtype=torch.int64)
    samples = Samples(torch.empty(len(right), 0), truth, np.arange(len(right)), names, owners=owners)
    return sheet_of(next(one for one in LABEL_METRICS if one.name == "accuracy"), given, samples)


def test_each_group_is_scored_by_its_own_cases_and_few_patients_are_only_counted() -> None:
    right = [True] * 6 + [False, True] * 4 + [True] * 4
    sex = Grouping("sex", ("f", "m", "not known", "nobody"), {str(n): 0 if n < 6 else 1 for n in range(14)})
    sex = Grouping("sex", sex.groups, {**sex.of, **{str(n): 2 for n in range(14, 18)}})
    female, male, unknown = score_groups(sheet(right), [sex], Measure(), 2, 0, "anna")
    assert (female.patients, female.score, female.interval) == (6, 1.0, (1.0, 1.0))
    assert (male.patients, male.score) == (8, 0.5) and male.interval and male.interval[0] < 0.5 < male.interval[1]
    assert (unknown.group, unknown.patients, unknown.scored, unknown.score) == ("not known", 4, False, None)
    assert not score_groups(sheet(right), [sex], Measure(), 7, 0, "anna")[0].scored  # the policy asks for more


def test_patients_are_counted_and_not_their_cases() -> None:
    all_ = Grouping("scanner", ("x",), {str(number): 0 for number in range(8)})
    (line,) = score_groups(sheet([True] * 8, ["p", "q", "r", "s"] * 2), [all_], Measure(), 2, 0)
    assert (line.patients, line.scored) == (4, False)


@pytest.mark.slow
def test_the_page_tells_the_groups_apart_and_nothing_of_them_leaves(
    make_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = write_table_sites(tmp_path / "sites", rows=160)
    for site, file in sites.items():
        table = tmp_path / "sites" / f"{site}.csv"
        head, *rows = table.read_text().split()
        more = [f"{row},{('quokka', 'numbat')[number % 2]},{number}" for number, row in enumerate(rows)]
        table.write_text("\n".join([f"{head},zebra,ocelot", *more]) + "\n")
        content = yaml.safe_load(file.read_text())
        content["datasets"]["blood"]["subgroups"] = ["zebra", {"column": "ocelot", "edges": [40, 155]}]
        file.write_text(yaml.safe_dump(content))
    said, handle = [], SiteRunner.handle

    def watch(runner: SiteRunner, message: Any) -> Any:
        reply = handle(runner, message)
        said.append(reply.header.model_dump_json().encode())
        return reply

    monkeypatch.setattr(SiteRunner, "handle", watch)
    run(make_job(), sites, tmp_path)
    held = [path.read_bytes() for path in sorted((tmp_path / "results").rglob("*")) if path.is_file()]
    assert said and held
    for word in (b"zebra", b"ocelot", b"quokka", b"numbat", b"below 40"):
        assert not [content for content in (*held, *said) if word in content]
    for site in SITES:
        models = tmp_path / "home" / site / "small" / "models"
        page = (models / PAGE).read_text()
        assert "Is it as good for all?" in page and "<td>40 to below 155</td>" in page
        details = models / "chosen-best.details.json"
        assert details.stat().st_mode & 0o077 == 0
        lines = read_details(models / "chosen-best.safetensors").subgroups
        assert {line.column for line in lines} == {"zebra", "ocelot"}
        history = read_description(models / "chosen-best.safetensors").history
        assert history
        assert sum(line.patients for line in lines if line.column == "zebra") == history.cases["test"]
        (models / "chosen-best.details.json").write_text("{}x")
        with pytest.raises(MedPFLError, match=r"chosen-best\.details\.json: not what a job wrote"):
            read_details(models / "chosen-best.safetensors")
