# SPDX-License-Identifier: Apache-2.0
"""What the tables say of the models that hospitals chose, and how sure the test scores are."""

import math
from statistics import NormalDist

from medpfl.methods.references import AVERAGE
from medpfl.results.schema import EvaluationSummary, FinalLine, Summary, TrainingSummary
from medpfl.results.tables import REFERENCE_NAMES, ResultTable, decimals_of
from medpfl.tasks.metrics.certainty import Certainty, Interval, error_of, interval_text
from medpfl.tasks.metrics.digits import fewer
from medpfl.tasks.metrics.measure import Measure

POWER = 0.8


def label_of(model: str) -> str:
    """A deployed model's name in tables."""
    return REFERENCE_NAMES.get(model, model.replace("_", " ").capitalize())


def chosen_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """What each hospital's validation cases chose, with its test: headings and rows; none where nothing was chosen, and
    in files of before."""
    if not isinstance(summary, TrainingSummary) or not summary.chosen:
        return [], []
    decimals = fewer(decimals_of(summary, summary.score))
    rows = []
    for site, row in summary.chosen.items():
        value, found = row.test.metrics.get(summary.score), row.test.certainty
        score = "n/a" if value is None else f"{value:.{decimals}f}"
        told = found is not None and found.gain is not None
        gain = f"{found.gain:+.{decimals}f} {interval_text(found.gained, decimals)}" if found and told else ""
        sure = interval_text(found.interval, decimals) if found and value is not None else ""
        patients = str(found.patients) if found else ""
        rows.append([site, label_of(row.test.model), f"{score} {sure}".strip(), gain.strip(), patients])
    return ["hospital", "chosen", f"test {summary.label(summary.score)}", "gain over local", "test patients"], rows


def _test(line: FinalLine, score: str, measure: Measure, decimals: int) -> str:
    value = line.metrics.get(score)
    if value is None:
        return "n/a"
    return line.certainty.short(value, measure, decimals) if line.certainty else f"{value:.{decimals}f}"


def paid(summary: Summary) -> str:
    """How many hospitals take another model than their own, and whether they gain, in a sentence or two; "" where
    nothing was chosen."""
    if not isinstance(summary, TrainingSummary) or not summary.chosen:
        return ""
    rows = list(summary.chosen.values())
    joined = [row for row in rows if row.test.model != "local"]
    if not joined:
        return "No hospital takes another model than the one it trained alone: their validation cases support none."
    text = (
        f"{len(joined)} of {len(rows)} hospital{'' if len(rows) == 1 else 's'} take{'s' if len(joined) == 1 else ''} "
        f"another model than the one trained there alone, which {'its' if len(joined) == 1 else 'their'} validation "
        "cases support."
    )
    known = [found for row in joined if row.test.certainty and (found := row.test.certainty.gained)]
    defined = any(row.test.metrics.get(summary.score) is not None for row in joined)  # else no number makes it sure
    if len(joined) == 1:
        return f"{text}{_of_one(summary, joined[0].test.model, known, defined)}"
    text += _trained_longer(summary, [row.test.model for row in joined])
    if not defined:
        return text
    if not known:
        return f"{text} They have too few test patients to say how sure that is."
    above, below = sum(low > 0 for low, _ in known), sum(high < 0 for _, high in known)
    return (
        f"{text} On their test patients the gain over the local model is surely above zero (its whole 95 % interval) "
        f"at {above} of them and surely below zero at {below}."
    )


def _of_one(summary: TrainingSummary, model: str, known: list[Interval], defined: bool) -> str:
    """The further sentences, where one hospital takes another model than its own; ``defined``: its test score is."""
    text = _trained_longer(summary, [model])
    if not defined:
        return text
    if not known:
        return f"{text} It has too few test patients to say how sure that is."
    ((low, high),) = known
    what = "surely above" if low > 0 else "surely below" if high < 0 else "neither surely above nor surely below"
    return f"{text} On its test patients the gain over the local model is {what} zero (95 % interval)."


def _trained_longer(summary: TrainingSummary, chosen: list[str]) -> str:
    """How many of the chosen models were fine-tuned for rounds that the local model has not; "" where none was."""
    longer = {model: after for model, after in summary.scored.items() if model.endswith("_finetuned")}
    count = sum(model in longer or (model == AVERAGE and bool(longer)) for model in chosen)
    if not count:
        return ""
    where = f"At {count} of them it" if len(chosen) > 1 else "That"
    return (
        f" {where} is {' or '.join(map(label_of, longer))}, or the average with it, whose score is after "
        f"{' or '.join(longer.values())}: some of that gain can be the longer training."
    )


def power_notes(summary: Summary) -> list[str]:
    """For each hospital whose chosen model's gain is not sure: how many test patients would show one of that size."""
    if not isinstance(summary, TrainingSummary):
        return []
    notes, decimals = [], fewer(decimals_of(summary, summary.score))
    for site, row in summary.chosen.items():
        found = row.test.certainty
        needed = patients_needed(found) if found else None
        if found and found.gain is not None and needed is not None and needed > found.patients:
            if round(abs(found.gain), decimals) == 0:  # as it is shown; of nothing no number of patients shows anything
                continue
            notes.append(
                f"{site}: a difference of {abs(found.gain):.{decimals}f} would show on about {needed} test patients; "
                f"it has {found.patients}."
            )
    return notes


def patients_needed(found: Certainty) -> int | None:
    """So many patients would show a gain of this size: two-sided 5 %, power 80 %, normal approximation.

    n' = n ((z_{0.975} + z_{0.8}) s / |gain|)^2 with s the standard error of the gain on n patients. None where there is
    no gain, or it varies by nothing, or it is so near to nothing that the number is beyond all numbers.
    """
    if found.gain is None or found.gained is None or not found.gain or found.gained[0] == found.gained[1]:
        return None
    normal = NormalDist()
    error = error_of(found.gained, found.patients)
    times = (normal.inv_cdf(0.975) + normal.inv_cdf(POWER)) * error / abs(found.gain)
    needed = found.patients * times * times  # not ** 2, which raises an error where a product is infinite
    return math.ceil(needed) if math.isfinite(needed) else None


def interval_table(summary: Summary, table: ResultTable, choice: str = "best") -> tuple[list[str], list[list[str]]]:
    """How sure each score of the table is: models by hospitals; no lines where nothing is known."""
    if isinstance(summary, EvaluationSummary):
        return [], []
    lines = {
        (line.model, line.site): line
        for line in summary.test
        if line.choice == choice or line.model == "fedavg_finetuned"
    }
    if not any(line.certainty for line in lines.values()):
        return [], []
    measure, decimals = summary.measure(summary.score), fewer(decimals_of(summary, summary.score))
    rows = []
    for model, label in zip(table.models, table.labels, strict=True):
        found = [lines.get((model, site)) for site in table.sites]
        rows.append([label, *(_test(line, summary.score, measure, decimals) if line else "" for line in found)])
    return ["model", *(f"{site}{_patients(summary, site)}" for site in table.sites)], rows


def _patients(summary: TrainingSummary, site: str) -> str:
    count = next((line.certainty.patients for line in summary.test if line.site == site and line.certainty), None)
    return "" if count is None else f" ({count} test patients)"
