# SPDX-License-Identifier: Apache-2.0
"""A hospital's own page: what a job brought it, for its clinicians. It is made of the models' files that the job left
here, tells of single patients, and stays beside them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from medpfl.component import build
from medpfl.core.errors import ConfigError, MedPFLError, counted
from medpfl.deployed.card import why
from medpfl.deployed.evaluate import write_text
from medpfl.deployed.model_file import Chosen, History, ModelMeta, read_description
from medpfl.methods.references import AVERAGE
from medpfl.results.chosen import label_of
from medpfl.results.glossary import Glossary, spelled
from medpfl.results.sentences import LOCAL, Brought, sentence
from medpfl.rounds.hospital.cases import Cases, read_cases
from medpfl.rounds.hospital.details import Details, GroupScore, read_details
from medpfl.tasks.contract import Task
from medpfl.tasks.metrics.certainty import interval_text
from medpfl.tasks.metrics.decision import Decided
from medpfl.tasks.metrics.digits import digits, fewer, threshold_text
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.operating import LEAST, SPECIFICITY, OperatingPoint, Share

if TYPE_CHECKING:
    from jinja2 import Template

PAGE = "hospital.html"
CHOSEN = "chosen-best"
"""Of the files of the model that the hospital takes."""

NOTHING = Chosen(model="", patients=0, gain=None, error=None, interval=None, candidates={})
"""What stands in a choice's place where there was nothing to choose from."""


@dataclass(frozen=True)
class Candidate:
    """A line of the table of models; texts."""

    label: str
    taken: bool
    validation: str
    test: str
    gain: str


@dataclass(frozen=True)
class Point:
    """A line of the table of fixed specificities; texts. ``few``: why there is no number, "" where there is one."""

    finding: str
    few: str = ""
    sensitivity: str = ""
    specificity: str = ""
    threshold: str = ""


def write_page(folder: Path) -> Path:
    """Write the page of the models in ``folder``, for this account only; returns its path.

    Raises:
        MedPFLError: no job left a model there, or a file is broken.
    """
    file = folder / f"{CHOSEN}.safetensors"
    models = {path: read_description(path) for path in sorted(folder.glob("*-best.safetensors")) if path != file}
    others = {meta.history.model: meta.history for meta in models.values() if meta.history}
    if not others:
        raise MedPFLError(f"{folder}: no model there; expected the folder in which a job left a hospital's models")
    if not file.is_file():
        file = next(path for path, meta in models.items() if meta.history)
        taken = models[file]
        history, chosen = _told(file, taken), NOTHING
    else:
        taken = read_description(file)
        history = _told(file, taken)
        chosen = _how(file, history)
    measure = _measure(file, taken)
    score = history.score or ""
    metric = spelled(measure.called(score, taken.recipe.classes))
    told = chosen.model_copy(
        update={"model": label_of(chosen.model), "best": None if chosen.best is None else label_of(chosen.best)}
    )
    cases, details = Cases(), Details()
    if chosen.model:
        details = read_details(file)
        count = history.cases.get("test")
        cases = read_cases(file.with_suffix(".csv"), score, measure, taken.recipe.classes, count)
    page = _template().render(
        glossary=Glossary([history.site]),
        count_of=counted,
        history=history,
        chosen=chosen,
        sentence=_sentence(history, chosen, others, metric, measure),
        label=label_of(chosen.model),
        why=why(told),
        metric=metric,
        heading=f"{metric} ({measure.unit})" if measure.unit else metric,
        unit=f" ({measure.unit})" if measure.unit else "",
        lower=measure.direction == "lower",
        candidates=_candidates(history, chosen, others, measure),
        untested=AVERAGE in chosen.candidates and chosen.model != AVERAGE,
        classes=taken.recipe.classes,
        cases=cases,
        curves=_curves(cases.decisions),
        points=[_point(one, taken.recipe.classes) for one in chosen.operating],
        aim=SPECIFICITY,
        pictures=details.pictures,
        place=_place([one.case for one in (*cases.worst, cases.middle, cases.best, *details.pictures) if one]),
        groups=[(one, _scored(one, digits(o.score for o in details.subgroups))) for one in details.subgroups],
        patients=history.certainty.patients if history.certainty else None,
    )
    place = folder / PAGE
    write_text(place, page, private=True)
    return place


def _place(cases: Sequence[str]) -> str:
    """The folder in which all of these files lie, as "/data/scans/", which is then said once; "" of other names."""
    if not cases or not all(PurePath(case).is_absolute() for case in cases):
        return ""
    return os.path.join(os.path.commonpath([PurePath(case).parent for case in cases]), "")


@cache
def _template() -> "Template":
    """Compiled once for all hospitals of a process."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, select_autoescape

    loader = ChoiceLoader([PackageLoader("medpfl.rounds.hospital", "."), PackageLoader("medpfl.results", ".")])
    environment = Environment(loader=loader, autoescape=select_autoescape(), trim_blocks=True)
    return environment.get_template("page.html")


def _told(file: Path, meta: ModelMeta) -> History:
    if meta.history is None or meta.history.score is None:
        raise MedPFLError(f"{file}: it does not say where it is from; expected a model that a job left at a hospital")
    return meta.history


def _how(file: Path, history: History) -> Chosen:
    if history.chosen is None:
        raise MedPFLError(f"{file}: it does not say how it was chosen; expected a model that a job left at a hospital")
    return history.chosen


def _measure(file: Path, meta: ModelMeta) -> Measure:
    try:
        task: Task = build(meta.recipe.task, Task, "task")
    except ConfigError as error:
        raise MedPFLError(f"{file}: {error}") from error
    return task.measures.get(meta.history.score or "", Measure()) if meta.history else Measure()


def _sentence(history: History, chosen: Chosen, others: dict[str, History], metric: str, measure: Measure) -> str:
    local = others.get(LOCAL)
    if not chosen.model:
        if local is None:
            return (
                f"No model was chosen for {history.site}: this job trained no local model to compare the others with."
            )
        return f"No model was chosen for {history.site}: this job left it one only."
    score = history.test.get(history.score or "")
    if score is None:
        return f"{history.site} takes a model whose {metric} is not defined on its test cases."
    count = history.certainty.patients if history.certainty else history.cases["test"]
    return sentence(
        Brought(
            site=history.site,
            model=chosen.model,
            score=score,
            certainty=history.certainty,
            local=local.test.get(history.score or "") if local else None,
            cases=counted(count, "test patient" if history.certainty else "test case"),
            metric=metric,
            measure=measure,
        )
    )


def _candidates(history: History, chosen: Chosen, others: dict[str, History], measure: Measure) -> list[Candidate]:
    """The models in the order of their validation scores; the average has a test only where it was taken."""
    tested = {**others, chosen.model: history} if chosen.model else others
    names = list(dict.fromkeys([*chosen.candidates, *tested]))
    names.sort(key=lambda name: measure.rank(chosen.candidates.get(name)))
    score = history.score or ""
    d = digits([*chosen.candidates.values(), *(one.test.get(score) for one in tested.values())])
    return [_candidate(name, chosen, tested.get(name), score, d) for name in names]


def _candidate(name: str, chosen: Chosen, tested: History | None, score: str, d: int) -> Candidate:
    seen = chosen.candidates.get(name)
    value = tested.test.get(score) if tested else None
    sure = tested.certainty if tested else None
    return Candidate(
        label=label_of(name),
        taken=name == chosen.model,
        validation="" if seen is None else f"{seen:.{d}f}",
        test=""
        if value is None
        else f"{value:.{d}f} {interval_text(sure.interval if sure else None, fewer(d))}".strip(),
        gain="" if sure is None or sure.gain is None else f"{sure.gain:+.{d}f} {interval_text(sure.gained, fewer(d))}",
    )


def _point(one: OperatingPoint, classes: list[str]) -> Point:
    finding = classes[one.label]
    if one.threshold is None:
        return Point(
            finding,
            few=f"{counted(one.negatives, 'validation patient')} without it; a threshold needs at least {LEAST}.",
        )
    return Point(
        finding,
        sensitivity=_share(one.sensitivity, "with"),
        specificity=_share(one.specificity, "without"),
        threshold=threshold_text(one.threshold, 3),
    )


def _scored(one: GroupScore, d: int) -> str:
    if not one.scored:
        return "too few patients"
    return "not defined" if one.score is None else f"{one.score:.{d}f} {interval_text(one.interval, fewer(d))}".strip()


def _share(found: Share | None, which: str) -> str:
    if found is None:
        return f"no test case {which} it"
    return f"{found.value:.2f} {interval_text((found.low, found.high))}, {counted(found.patients, 'patient')}"


def _curves(decisions: tuple[Decided, ...]) -> dict[str, str]:
    """Points of an SVG of 100 x 60: net benefit by threshold; what is worse than nobody by far ends at ``cut``."""
    if not decisions:
        return {}
    model, everybody = [one.benefit for one in decisions], [one.acting_on_all for one in decisions]
    top = max(0.05, *model, *everybody)
    low = -top / 5

    def points(values: list[float]) -> str:
        places = zip((one.threshold for one in decisions), values, strict=True)
        return " ".join(f"{100 * at:.1f},{50 - 48 * max(value, low) / top:.1f}" for at, value in places)

    return {
        "model": points(model),
        "all": points(everybody),
        "top": f"{top:.2f}",
        "cut": f"{low:.2f}" if min(*model, *everybody) < low else "",
    }
