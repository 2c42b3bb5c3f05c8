# SPDX-License-Identifier: Apache-2.0
"""The super model's threshold, chosen on the hospitals' pooled validation cases."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from medpfl.core.errors import MedPFLError, RefusedUpdate
from medpfl.methods.joint_study import Found, Line, SplitStudy, Study
from medpfl.tasks.metrics.measure import Measure

GAMMAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
"""The thresholds that are tried: every hospital tries the same ones, so that their answers can be added up."""


def choose_gamma(studies: Mapping[str, Study], hospitals: Sequence[str], measure: Measure) -> Found:
    """The threshold with the best validation score, hospitals weighted by their cases; no test counts.

    Ties go to the larger threshold: the validation cases do not care, and a case unlike all of them gets the global
    model. A hospital that is not among the selector's classes is reported and has no say.

    Args:
        measure: which scores are better.

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
    gamma = min(scores, key=lambda value: (measure.rank(round(scores[value], 9)), 1.0 if value is None else -value))
    lines = [_line(site, studies[site].test, gamma, hospitals) for site in sorted(studies)]
    return Found(gamma, scores[gamma], lines)


def _line(site: str, test: SplitStudy, gamma: float | None, hospitals: Sequence[str]) -> Line:
    point = next(point for point in test.points if point.gamma == gamma)
    own = test.alone[1 + hospitals.index(site)] if site in hospitals else None
    return Line(site, test.cases, test.alone[0], own, point.score, point.counts)


def read_study(site: str, content: object, hospitals: int, tried: Sequence[float | None] = GAMMAS) -> Study:
    """A hospital's answer about a super model, checked.

    Args:
        hospitals: how many personal models it holds.
        tried: the thresholds that hospitals try.

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
        told = [point.gamma for point in split.points]
        whole = all(len(p.counts) == hospitals + 1 and sum(p.counts) == split.cases for p in split.points)
        if told != list(tried) or not whole or len(split.alone) != hospitals + 1:
            raise RefusedUpdate(f"{site}: its study of the super model does not fit a model of {hospitals} hospitals")
    return found
