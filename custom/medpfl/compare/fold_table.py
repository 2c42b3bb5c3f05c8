# SPDX-License-Identifier: Apache-2.0
"""The tables of a leave-one-out: scores at the hospital left out, and which models served its cases."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from medpfl.compare.results import LeaveOneOut
from medpfl.compare.run_results import FoldRun, ServedBySuper
from medpfl.deployed.joint_table import markdown
from medpfl.results.tables import REFERENCE_NAMES
from medpfl.tasks.metrics.digits import digits
from medpfl.tasks.metrics.measure import TOLERANCE

Table = tuple[list[str], list[list[str]]]


def collect(runs: list[FoldRun]) -> LeaveOneOut:
    """What leave-one-out.json holds, from the finished folds."""
    models = list(dict.fromkeys(model for run in runs for model in run.rows))
    order = [*(name for name in REFERENCE_NAMES if name in models), *(m for m in models if m not in REFERENCE_NAMES)]
    return LeaveOneOut(
        score=runs[0].score,
        measure=runs[0].measure,
        hospitals=sorted({run.without for run in runs}),
        seeds=sorted({run.seed for run in runs}),
        models=order,
        runs=runs,
    )


def scores(content: LeaveOneOut) -> Table:
    """Models by hospitals left out: mean over the seeds, and over the hospitals that have a score; (best: of the single
    models)."""
    sites, lacking = content.hospitals, without_score(content)
    counts = np.array([site not in lacking for site in sites])
    rows, d = [], _decimals(content)
    for model in content.models:
        cells = []
        mean_of, best_of = _grid(content, model, "score"), _grid(content, model, "best")
        several = bool((abs(best_of - mean_of) > TOLERANCE).any())  # the best is never worse than the mean
        every = (
            [*found.T, found[:, counts].mean(axis=1) if counts.any() else found[:, 0]] for found in (mean_of, best_of)
        )
        for mean, best in zip(*every, strict=True):
            cells.append(
                _text(mean, d) + (f" (best {best.mean():.{d}f})" if several and np.isfinite(best).all() else "")
            )
        rows.append([REFERENCE_NAMES.get(model, model.replace("_", " ").capitalize()), *cells])
    return ["model", *(f"without {site}" for site in sites), "mean"], rows


def without_score(content: LeaveOneOut) -> list[str]:
    """Hospitals at which no model has a score: all their test cases are of one class, say."""
    tested = {site: [run for run in content.runs if run.without == site] for site in content.hospitals}
    return [
        site for site, runs in tested.items() if all(row.score is None for run in runs for row in run.rows.values())
    ]


def _grid(content: LeaveOneOut, model: str, key: Literal["score", "best"]) -> NDArray[np.float64]:
    """Seeds x hospitals; NaN where a fold is missing or has no such score."""
    found = {
        (run.seed, run.without): row.score if key == "score" else row.best
        for run in content.runs
        if (row := run.rows.get(model))
    }
    values = [[found.get((seed, site)) for site in content.hospitals] for seed in content.seeds]
    return np.array(values, dtype=float)


def _decimals(content: LeaveOneOut) -> int:
    return digits(value for run in content.runs for row in run.rows.values() for value in (row.score, row.best))


def _text(values: NDArray[np.float64], d: int) -> str:
    if np.isnan(values).any():
        return "n/a"
    return f"{values.mean():.{d}f}" + (f" ± {values.std(ddof=1):.{d}f}" if len(values) > 1 else "")


def frequencies(content: LeaveOneOut) -> Table | None:
    """Hospitals left out by models: the share of its cases that each served, all seeds together; None without a super
    model. With the gammas that were chosen, and the score that the best gamma would have given."""
    runs = [(run.without, row) for run in content.runs if isinstance(row := run.rows.get("super"), ServedBySuper)]
    if not runs:
        return None
    names = ["global", *content.hospitals]
    rows = []
    for site in content.hospitals:
        mine = [row for without, row in runs if without == site]
        if not mine:
            continue
        total = sum(row.cases for row in mine)
        share = {name: sum(row.served.get(name, 0) for row in mine) / total for name in names}
        cells = ["–" if name == site else f"{share[name]:.2f}" for name in names]
        gammas = sorted({row.gamma for row in mine}, key=str)
        tops = [content.measure.best(p.score for p in row.points if p.score is not None) for row in mine]
        rows.append([site, *cells, ", ".join(map(str, gammas)), _text(np.array([np.mean(tops)]), _decimals(content))])
    return ["left out", *names, "gamma", "best gamma's score"], rows


def page(content: LeaveOneOut, job: str) -> str:
    """The tables as Markdown."""
    several = ", mean ± standard deviation" if len(content.seeds) > 1 else ""
    text = (
        f"# Leave one hospital out: {job}\n\n"
        f"Test {content.measure.label(content.score)} of the last round's models at the hospital that took no part; "
        f"seeds: {', '.join(map(str, content.seeds))}{several}. Where every hospital has a model of its own: the "
        "mean of them (best: the best of them, which nobody could have known).\n\n"
    )
    if lacking := without_score(content):
        name, there = content.score.replace("_", " "), ", ".join(lacking)
        text += f"No model has {name} at {there}: the mean is that of the others.\n\n"
    text += markdown(*scores(content)) + "\n"
    if found := frequencies(content):
        text += (
            "\nWho served the cases of the hospital left out, with the gamma that the other hospitals' validation "
            "cases chose:\n\n" + markdown(*found) + "\n"
        )
    return text
