# SPDX-License-Identifier: Apache-2.0
"""How what a job left serves a hospital that took no part in it (Xu et al., CVPR 2022, Tables 5, 11 and 12)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from medpfl.compare.data import Read
from medpfl.compare.run_results import Point, Served, ServedBySuper
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import evaluate_on
from medpfl.methods.joint_study import Found
from medpfl.results.files import read_training
from medpfl.results.schema import number
from medpfl.rounds.server.joint import Joint, chosen, makes_joint, read_result, study_here, study_of

SUPER = "super"


def super_model(results: Path, site_files: Mapping[str, Path], read: Read = load_site_file) -> tuple[Joint, Found]:
    """The super model of a finished job, with the threshold that the hospitals' validation cases chose, and its tests.

    Args:
        results: of the job; it holds the last round's models.
        site_files: of the hospitals that took part; ``read`` reads them.

    Raises:
        MedPFLError: a file of the run cannot be read, or the data do not fit.
    """
    model = read_result(results)
    return chosen(model, study_here(model, site_files, read))


def served(
    results: Path,
    home: Path,
    site_files: Mapping[str, Path],
    unseen: SiteData,
    read: Read = load_site_file,
    choice: Literal["best", "last"] = "best",
) -> dict[str, Served | ServedBySuper]:
    """Model to how it does on the test split of the hospital that took no part.

    Every hospital's model of each name is tried: "models" has each one's score, "score" their mean, "best" the best of
    them, which nobody could have known; a model that all hospitals share has one score. The super model ("super", made
    of the last round's models) has besides its gamma, chosen on the validation cases of those that took part, how many
    cases each model served, and what other thresholds would have given.

    Args:
        results, home: of the run, as ``simulate`` wrote them.
        site_files: of the hospitals that took part; ``read`` reads them.
        choice: which round's models, the best by validation or the last.

    Raises:
        MedPFLError: a file of the run cannot be read, or the data do not fit.
    """
    summary = read_training(results)
    score = summary.score
    found: dict[str, Served | ServedBySuper] = {}
    for model in dict.fromkeys(line.model for line in summary.test):
        each = {}
        for site in sorted(site_files):
            path = home / site / summary.job / "models" / f"{model}-{choice}.safetensors"
            if path.exists():  # a hospital that missed that round has no such model
                each[site] = number(evaluate_on(load_deployed(path), unseen, "test").metrics[score])
        known = [value for value in each.values() if value is not None]
        found[model] = Served(
            models=each,
            score=float(np.mean(known)) if known and len(known) == len(each) else None,  # a model that broke counts
            best=summary.measure(score).best(known) if known else None,
        )
    if makes_joint(summary):
        found[SUPER] = _super(results, site_files, unseen, read)
    return found


def _super(results: Path, site_files: Mapping[str, Path], unseen: SiteData, read: Read) -> ServedBySuper:
    model, _ = super_model(results, site_files, read)
    test = study_of(model, "the hospital left out", unseen).test
    here = next(point for point in test.points if point.gamma == model.method.gamma)
    return ServedBySuper(
        score=here.score,
        best=here.score,
        gamma=model.method.gamma,
        served=dict(zip(model.method.labels, here.counts, strict=True)),
        cases=test.cases,
        points=[Point(gamma=point.gamma, score=point.score, counts=point.counts) for point in test.points],
    )
