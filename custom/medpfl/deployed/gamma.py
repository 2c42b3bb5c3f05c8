# SPDX-License-Identifier: Apache-2.0
"""A super model's threshold, chosen on the hospitals' pooled validation cases, and how it does with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from medpfl.core.errors import MedPFLError, RefusedUpdate
from medpfl.deployed.selection import GAMMAS, SplitStudy, Study


@dataclass(frozen=True)
class Line:
    """One hospital's test: scores (None: not defined) and where its cases went.

    Attributes:
        served: number of cases served by the global model, then by each hospital's personal model.
        own: score of the hospital's own personal model; None also for a hospital that took no part in training.
    """

    hospital: str
    cases: int
    global_: float | None
    own: float | None
    super_: float | None
    served: list[int]


@dataclass(frozen=True)
class Found:
    """``gamma``: the chosen threshold (None: the selector needs none); ``validation``: its pooled score; ``lines``:
    the hospitals' tests with it."""

    gamma: float | None
    validation: float
    lines: list[Line]


def choose_gamma(studies: Mapping[str, Study], hospitals: Sequence[str]) -> Found:
    """The threshold with the best validation score, hospitals weighted by their cases; no test counts.

    Ties go to the larger threshold: the validation cases do not care, and a case unlike all of them gets the global
    model. A hospital that is not among the selector's classes is reported and has no say.

    Raises:
        MedPFLError: no hospital of the selector's has validation cases.
    """
    voters = [
        split for site in sorted(studies) if site in hospitals and (split := studies[site].validation) is not None
    ]
    scores: dict[float | None, float] = {}
    for index, point in enumerate(voters[0].points if voters else []):
        known = [(split.cases, score) for split in voters if (score := split.points[index].score) is not None]
        if known:
            scores[point.gamma] = sum(n * score for n, score in known) / sum(n for n, _ in known)
    if not scores:
        raise MedPFLError("no hospital has validation cases to choose gamma on; give one with --gamma")
    gamma = max(scores, key=lambda value: (round(scores[value], 9), -1.0 if value is None else value))
    lines = [_line(site, studies[site].test, gamma, hospitals) for site in sorted(studies)]
    return Found(gamma, scores[gamma], lines)


def _line(site: str, test: SplitStudy, gamma: float | None, hospitals: Sequence[str]) -> Line:
    point = next(point for point in test.points if point.gamma == gamma)
    own = test.alone[1 + hospitals.index(site)] if site in hospitals else None
    return Line(site, test.cases, test.alone[0], own, point.score, point.counts)


def read_study(site: str, content: Any, hospitals: int) -> Study:
    """A hospital's answer about a super model, checked.

    Raises:
        RefusedUpdate: naming the hospital.
    """
    try:
        found = Study.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise RefusedUpdate(f"{site}: its study of the super model: '{place}': {problem['msg'].lower()}") from error
    for split in (found.validation, found.test):
        if split is None:
            continue
        tried = tuple(point.gamma for point in split.points)
        whole = all(len(p.counts) == hospitals + 1 and sum(p.counts) == split.cases for p in split.points)
        if tried not in (GAMMAS, (None,)) or not whole or len(split.alone) != hospitals + 1:
            raise RefusedUpdate(f"{site}: its study of the super model does not fit a model of {hospitals} hospitals")
    return found


def table(found: Found, hospitals: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: test scores of the global, the hospital's own personal and the super model, and the share of
    cases served by the global model, the hospital's own and another's; below, the hospitals' unweighted mean and the
    mean over all cases."""
    head = ["hospital", "cases", "global", "personal", "super", "by global", "by own", "by others"]
    rows = []
    for line in found.lines:
        own = line.served[1 + hospitals.index(line.hospital)] if line.hospital in hospitals else 0
        shares = (line.served[0], own, sum(line.served[1:]) - own)
        rows.append([
            line.hospital if line.hospital in hospitals else f"{line.hospital} (not in training)", str(line.cases),
            *map(_text, (line.global_, line.own, line.super_)),
            *(f"{count / line.cases:.0%}" for count in shares),
        ])  # fmt: skip
    trained = [line for line in found.lines if line.hospital in hospitals]
    for title, weights in (("client average", [1] * len(trained)), ("all cases", [line.cases for line in trained])):
        columns = ([getattr(line, name) for line in trained] for name in ("global_", "own", "super_"))
        means = [_text(_mean(column, weights)) for column in columns]
        rows.append([title, str(sum(line.cases for line in trained)), *means, "", "", ""])
    return head, rows


def _mean(values: list[float | None], weights: list[int]) -> float | None:
    if not values or any(value is None for value in values):
        return None
    return sum(w * v for w, v in zip(weights, values, strict=True) if v is not None) / sum(weights)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table as Markdown, all columns but the first aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
