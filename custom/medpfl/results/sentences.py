# SPDX-License-Identifier: Apache-2.0
"""What joining brought, one plain sentence for each hospital: what a report begins with."""

from dataclasses import dataclass

from medpfl.results.glossary import spelled
from medpfl.results.schema import ChosenRow, Summary, TrainingSummary
from medpfl.tasks.metrics.certainty import Certainty, Interval, decimals_for
from medpfl.tasks.metrics.digits import digits, fewer
from medpfl.tasks.metrics.measure import Measure

LOCAL = "local"


def sentences(summary: Summary) -> list[str]:
    """A sentence for each hospital of the federation, on the model that it takes; none where nothing was chosen."""
    if not isinstance(summary, TrainingSummary) or not summary.chosen:
        return []
    return [_sentence(site, summary) for site in dict.fromkeys([*summary.roster, *summary.chosen])]


@dataclass(frozen=True)
class Brought:
    """What a hospital takes and has.

    Attributes:
        model: that it takes; ``score``: of its test; ``certainty``: of that.
        local: the test score of its own model; None where there is none.
        cases: how many it was tested on, in words.
        metric: the score's name as it is written; ``measure``: which values of it are better.
    """

    site: str
    model: str
    score: float
    certainty: Certainty | None
    local: float | None
    cases: str
    metric: str
    measure: Measure


def _sentence(site: str, summary: TrainingSummary) -> str:
    row = summary.chosen.get(site)
    if row is None and any(line.site == site for line in summary.test):
        return f"{site} did not say which model it takes."
    if row is None:
        return f"{site} has no test result here."
    measure = summary.measure(summary.score)
    metric = spelled(measure.called(summary.score, summary.classes))
    score = row.test.metrics.get(summary.score)
    if score is None:
        has = "kept its own model, whose" if row.test.model == LOCAL else "takes a model whose"
        return f"{site} {has} {metric} is not defined on its test cases."
    return sentence(
        Brought(
            site=site,
            model=row.test.model,
            score=score,
            certainty=row.test.certainty,
            local=_local_score(site, row.test.choice, summary),
            cases=_cases(site, row, summary),
            metric=metric,
            measure=measure,
        )
    )


def sentence(found: Brought) -> str:
    """What joining brought to one hospital."""
    site, cases, measure, score = found.site, found.cases, found.measure, found.score
    decimals = fewer(digits([score, found.local]))
    metric = f"test {found.metric}"
    if measure.direction == "lower":
        metric += " (lower is better)"
    if found.model == LOCAL:
        sure = _sure("", found.certainty.interval if found.certainty else None, decimals)
        return f"{site} kept its own model: its {metric} is {measure.text(score, decimals)} on {cases} ({sure})."
    if found.local is None:
        told = measure.text(score, decimals)
        return f"{site} takes a model with a {metric} of {told} on {cases}; its own model has none."
    gained = found.certainty.gained if found.certainty else None
    chance = ", which these patients cannot tell from chance" if gained and gained[0] <= 0 <= gained[1] else ""
    change = _change(metric, found.local, score, measure, decimals)
    return f"At {site}, joining {change} on {cases}{chance} ({_sure(' of the gain', gained, decimals)})."


def _change(metric: str, local: float, score: float, measure: Measure, decimals: int) -> str:
    shown = decimals if f"{local:.{decimals}f}" != f"{score:.{decimals}f}" else decimals + 1
    before, after = f"{local:.{shown}f}", measure.text(score, shown)
    if before == f"{score:.{shown}f}":
        return f"left the {metric} at {after}"
    better = "raised" if measure.direction == "higher" else "lowered"
    if measure.better(score, local):
        return f"{better} the {metric} from {before} to {after}"
    return f"made the {metric} worse, from {before} to {after},"


def _cases(site: str, row: ChosenRow, summary: TrainingSummary) -> str:
    if row.test.certainty:
        return f"{row.test.certainty.patients} test patients"
    count = summary.sizes.get(site, {}).get("test")
    return "its test cases" if count is None else f"{count} test sample{'' if count == 1 else 's'}"


def _sure(of: str, found: Interval | None, decimals: int) -> str:
    if found is None:
        return "no interval is known"
    decimals = decimals_for(found, decimals)
    return f"95 % interval{of}: {found[0]:.{decimals}f} to {found[1]:.{decimals}f}"


def _local_score(site: str, choice: str, summary: TrainingSummary) -> float | None:
    lines = (line for line in summary.test if (line.site, line.model, line.choice) == (site, LOCAL, choice))
    return next((line.metrics.get(summary.score) for line in lines), None)
