# SPDX-License-Identifier: Apache-2.0
"""A comparison's tables: the leaderboard, the gains and every other, on the console and as Markdown."""

from collections import Counter
from pathlib import Path
from typing import Literal

from rich.console import Console

from medpfl.compare.arranging import ranked
from medpfl.compare.constant import ALWAYS, always, always_mean, beside, warnings
from medpfl.compare.file import LOCAL, Range
from medpfl.compare.level import level_text
from medpfl.compare.results import Gain, MetricStat, Results, Row, Stat
from medpfl.compare.runs import values_text
from medpfl.core.errors import counted
from medpfl.deployed import joint_table
from medpfl.results.schema import Direction
from medpfl.results.terminal_blocks import print_table
from medpfl.tasks.metrics.digits import amount, digits

CHOSEN = "What the hospitals' own validation cases choose"
PRIVACY = "What noise has cost in one run: epsilon of each hospital, of the runs the largest"
NEEDED = "What would show a gain of this size (two-sided 5 %, power 80 %)"


def score_text(stat: Stat | None, decimals: int) -> str:
    """ "0.812 ± 0.010"; of one seed without deviation."""
    if stat is None or stat.mean is None:
        return "n/a"
    return f"{stat.mean:.{decimals}f}" + (f" ± {stat.sd:.{decimals}f}" if stat.sd is not None else "")


def gain_text(gain: Gain | None, decimals: int) -> str:
    """ "+0.031 [0.011, 0.052] (p 0.002)" """
    if gain is None:
        return ""
    between = f" [{gain.interval[0]:.{decimals}f}, {gain.interval[1]:.{decimals}f}]" if gain.interval else ""
    return f"{gain.mean:+.{decimals}f}{between}" + (f" (p {p_text(p)})" if (p := gain.shown_p) is not None else "")


def p_text(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def bytes_text(value: float | None) -> str:
    if value is None:
        return "n/a"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{amount(value / size)} {unit}"
    return f"{value:.0f} B"


def leaderboard(content: Results) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    others, d = beside(content), content.decimals(content.score)
    names = [content.label(name) for name in others]
    apart = any(row.to_first for row in content.rows)
    compared = ["gain over Local", *(["to the first"] if apart else [])]
    head = ["method", "best round", *names, "last round", *compared, "worst-off hospital"]
    told = any(row.scored for row in content.rows)
    rows = []
    for row in ranked(content):
        last = score_text(row.last, d) if row.curve else "–"
        worst = f"{row.worst.hospital} {row.worst.score:.{d}f}" if row.worst else "n/a"
        more = [score_text(row.metrics.get(name), content.decimals(name)) for name in others]
        scored = [row.scored or ""] if told else []
        found = [gain_text(row.gain, d), *([gain_text(row.to_first, d)] if apart else [])]
        name = _with_runs(row.name, len(row.pairs), content)
        rows.append([name, score_text(row.best, d), *more, last, *found, worst, *scored])
    always_same = [[*line, *([""] if told else [])] for line in majority(content)]
    return [*head, *(["scored after"] if told else [])], rows + always_same


def _with_runs(name: str, runs: int, content: Results) -> str:
    """The row's name, with the number of its runs where some are missing."""
    return f"{name} ({runs} of {content.pairs} runs)" if runs < content.pairs else name


def majority(content: Results) -> list[list[str]]:
    """The leaderboard's last line: a model that learnt nothing but which class is the most frequent; or none."""
    means, each = always_mean(content), always(content)
    if not means:
        return []
    worst = min(each, key=lambda site: each[site][content.score])
    shown = [means.get(name, "n/a") for name in (content.score, *beside(content))]
    apart = [""] if any(row.to_first for row in content.rows) else []
    return [[ALWAYS, *shown, "–", "", *apart, f"{worst} {each[worst][content.score]:.3f}"]]


def gains(content: Results) -> tuple[list[str], list[list[str]]]:
    """Gain over local training: methods by hospitals."""
    sites, d = content.hospitals, content.decimals(content.score)
    rows = [(row, [row.gain, *(row.hospitals[site].gain for site in sites)]) for row in ranked(content) if row.gain]
    lines = [[row.name, *(gain_text(gain, d) for gain in found)] for row, found in rows]
    return ["method", "mean", *sites], lines


def hospitals(content: Results, choice: Literal["best", "last"] = "best") -> tuple[list[str], list[list[str]]]:
    """Test score: methods by hospitals."""
    sites, d = content.hospitals, content.decimals(content.score)
    rows = [row for row in ranked(content) if choice == "best" or row.curve]
    lines = []
    for row in rows:
        tested = [row.hospitals[site].best if choice == "best" else row.hospitals[site].last for site in sites]
        lines.append([row.name, *(score_text(stat, d) for stat in tested)])
    if each := always(content):
        lines.append([ALWAYS, *(f"{each[site][content.score]:.3f}" for site in sites)])
    return ["method", *sites], lines


def chosen(content: Results) -> tuple[list[str], list[list[str]]]:
    """What hospitals would take by their validation cases; no lines where it is not known."""
    lines, d = [], content.decimals(content.score)
    for row in content.chosen:
        total = Counter[str]()
        for found in row.picks.values():
            total.update(found)
        picks = ", ".join(f"{name} {count}" for name, count in total.most_common(3))
        certain = any(gain.interval for gain in row.hospitals.values())
        below = ", ".join(row.below) or ("none" if certain else "not known")
        name = _with_runs(row.name, len(row.score.values), content)
        lines.append([name, score_text(row.score, d), gain_text(row.gain, d), below, picks])
    worse = "surely below Local" if content.measure.direction == "higher" else "surely worse than Local"
    return ["models to choose from", "chosen", "gain over Local", worse, "most often taken"], lines


def power(content: Results) -> tuple[list[str], list[list[str]]]:
    """What would show the gains: seeds (or splits), and times the test patients; no lines where it is not known."""
    lines, d = [], content.decimals(content.score)
    for row in ranked(content):
        if row.gain and row.gain.needed:
            times, seeds = row.gain.needed.times, row.gain.needed.seeds
            cells = ["–" if seeds is None else str(seeds), "–" if times is None else f"{times:.1f}"]
            lines.append([row.name, gain_text(row.gain, d), *cells])
    what = "splits" if len(content.splits) > 1 else "seeds"
    return ["method", "gain over Local", f"{what} that would show it", "times the test patients"], lines


def metrics(content: Results) -> tuple[list[str], list[list[str]]]:
    """Every metric, tested at the best round, mean of the hospitals; no lines where there is only one."""
    head, rows = _metrics([(row.name, row.metrics) for row in ranked(content)], content)
    return head, rows if len(head) > 2 else []


def together(content: Results) -> tuple[list[str], list[list[str]]]:
    """The same on all hospitals' test cases together, mean of the hospitals' models."""
    return _metrics([(row.name, row.together) for row in ranked(content)], content)


def _metrics(tested: list[tuple[str, dict[str, MetricStat]]], content: Results) -> tuple[list[str], list[list[str]]]:
    order, every = [content.score, *content.metrics], dict.fromkeys(name for _, found in tested for name in found)
    names = sorted(every, key=lambda name: order.index(name) if name in order else len(order))
    shown = {name: content.decimals(name) for name in names}
    rows = [[method, *(score_text(found.get(name), shown[name]) for name in names)] for method, found in tested]
    return ["method", *map(content.label, names)], rows


def other_metrics(content: Results) -> list[tuple[str, tuple[list[str], list[list[str]]]]]:
    """Of every metric but the score: its name and its table, methods by hospitals, in the leaderboard's order."""
    sites, rows = content.hospitals, ranked(content)
    found = []
    for name in dict.fromkeys(name for row in rows for name in row.metrics):
        if name != content.score:
            d = content.decimals(name)
            lines = [
                [row.name, *(score_text(row.metrics[name].hospitals[site], d) for site in sites)]
                for row in rows
                if name in row.metrics and row.metrics[name].hospitals
            ]
            found.append((content.label(name), (["method", *sites], lines)))
    return found


def unseen(content: Results) -> tuple[list[str], list[list[str]]]:
    """What models reach at a hospital that took no part in their training: methods by hospitals left out."""
    sites, d = content.hospitals, content.decimals(content.score)
    lines = [
        [row.name, score_text(row.mean, d), *(score_text(row.hospitals.get(site), d) for site in sites)]
        for row in sorted(content.unseen, key=lambda row: content.measure.rank(row.mean.mean if row.mean else None))
    ]
    alone = next((row for row in content.rows if row.name == LOCAL), None)
    if alone:
        own = [score_text(stat, d) for stat in (alone.best, *(alone.hospitals[site].best for site in sites))]
        lines.append(["(for comparison: its own local model)", *own])
    return ["method", "mean", *sites], lines


def searches(content: Results) -> tuple[list[str], list[list[str]]]:
    """Every candidate of every search with its validation score; the chosen ones are marked."""
    lines: list[list[str]] = []
    d = 1 + digits(candidate.mean for search in content.tuning or [] for candidate in search.candidates)
    for search in content.tuning or []:
        name = search.method + (f", split {search.split}" if search.split is not None else "")
        for place, candidate in enumerate(search.candidates):
            untold = "no validation score" if candidate.finished else "not done"
            failed = "could not be trained" if candidate.reason else untold
            text = f"{candidate.mean:.{d}f}" if candidate.mean is not None else failed
            chosen = "chosen" if place == search.chosen else ""
            lines.append([name, values_text(candidate.values), text, chosen])
    of_score = content.measure.label("score")  # "score (days, lower is better)"
    return ["method", "candidate", f"mean validation {of_score}", ""], lines


def cost(content: Results) -> tuple[list[str], list[list[str]]]:
    """Bytes and seconds of one hospital: a round, and until the target."""
    lines = []
    for row in ranked(content):
        reach, cells = row.reach, ["–"] * 3
        if reach and reach.median_round is None:
            cells[0] = "not reached"
        elif reach:
            seconds = f"{reach.seconds:.1f}" if reach.seconds is not None else "n/a"
            rounds = f"{reach.median_round:g} ({reach.reached} of {counted(len(row.pairs), 'run')})"
            cells = [rounds, bytes_text(reach.bytes_per_hospital), seconds]
        sent, received = (_sent(row, way) for way in ("from_site", "to_site"))
        lines.append([row.name, sent, received, f"{row.seconds.mean:.3f}", *cells])
    head = ["up, a round", "down, a round", "s, a round", "rounds to target", "bytes to target", "s to target"]
    return ["method", *head], lines


def _sent(row: Row, way: Direction) -> str:
    text = bytes_text(row.bytes[way])
    return f"{text} (1/{row.ratio[way]:.3g})" if row.ratio else text


def privacy(content: Results) -> tuple[list[str], list[list[str]]]:
    """Of methods with noise: whom it protects, delta, and each hospital's epsilon; no lines without noise."""
    lines = []
    for row in ranked(content):
        if told := list(row.privacy.values()):
            level = f"{told[0].level}, fixed seed: protects nothing" if any(s.fixed for s in told) else told[0].level
            cells = (f"{row.privacy[site].epsilon:.3f}" if site in row.privacy else "–" for site in content.hospitals)
            lines.append([row.name, level, f"{told[0].delta:g}", *cells])
    return ["method", "level", "delta", *content.hospitals], lines


def calibrations(content: Results) -> tuple[list[str], list[list[str]]]:
    """Expected calibration error and Brier score: methods by hospitals; no lines where they are not defined."""
    sites = content.hospitals
    lines = [
        [
            row.name,
            *(f"{row.calibration[site].ece:.3f} / {row.calibration[site].brier:.3f}" for site in sites),
        ]
        for row in ranked(content)
        if row.calibration
    ]
    return ["method", *sites], lines


def selections(content: Results) -> tuple[list[str], list[list[str]]]:
    """Of super models: which model served what share of a hospital's test cases, and the gammas; no lines without."""
    found = [(row.name, row.selection) for row in ranked(content) if row.selection]
    if not found:
        return [], []
    names = list(next(iter(found[0][1].served.values())))
    lines = []
    for method, selection in found:
        gammas = ", ".join("–" if value is None else f"{value:g}" for value in selection.gammas)
        for site, shares in selection.served.items():
            lines.append([method, gammas, site, *(f"{share:.2f}" for share in shares.values())])
    return ["method", "gamma of each run", "cases of", *names], lines


def print_comparison(content: Results, folder: Path, console: Console) -> None:
    """Leaderboard, gains, failures, and where the report is."""
    title = f"{content.comparison}: test {content.label(content.score)}, mean of the hospitals"
    tables = [(f"{title}; {runs_text(content)}", leaderboard(content)), ("Gain over local training", gains(content))]
    if content.chosen:
        tables.append((CHOSEN, chosen(content)))
    if (spent := privacy(content))[1]:
        tables.append((PRIVACY, spent))
    if content.unseen:
        tables.append(("Tested at a hospital that took no part", unseen(content)))
    for heading, (head, rows) in tables:
        print_table(console, heading, head, [[_in_two_lines(cell) for cell in row] for row in rows])
    for text in filter(None, [level_text(content), *warnings(content)]):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"p: {content.test}; smallest possible p: {content.smallest_p:.3g}")
    for failure in content.failures:
        text = f"{failure.run} failed: {failure.reason}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: {folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def _in_two_lines(cell: str) -> str:
    """ "+0.041 (p 0.250)" with the p below, so that more columns stand beside each other."""
    gain, found, p = cell.partition(" (p ")
    return f"{gain}\np {p.removesuffix(')')}" if found else cell


def runs_text(content: Results) -> str:
    """ "3 splits x 5 seeds" """
    texts = [(len(content.splits), "split"), (len(content.seeds), "seed")]
    if len(content.splits) == 1:
        del texts[0]
    return " x ".join(f"{count} {what}{'s' if count > 1 else ''}" for count, what in texts)


def markdown(content: Results) -> str:
    """The same as Markdown, with every other table."""
    parts = []
    tables = (
        ("Leaderboard", leaderboard(content)),
        ("Hospital by hospital", hospitals(content)),
        ("Gain over local training", gains(content)),
        (CHOSEN, chosen(content)),
        (NEEDED, power(content)),
        ("All metrics, mean of the hospitals", metrics(content)),
        *((f"Hospital by hospital: {name}", table) for name, table in other_metrics(content)),
        ("Tested on all hospitals' cases together, mean of the hospitals' models", together(content)),
        ("Tested at a hospital that took no part", unseen(content) if content.unseen else ([], [])),
        ("Which model served whose test cases", selections(content)),
        (PRIVACY, privacy(content)),
        ("Cost of one hospital", cost(content)),
        ("Calibration on the test sets: expected calibration error / Brier score", calibrations(content)),
        ("Search of arguments", searches(content)),
    )
    for title, (head, rows) in tables:
        if rows:
            parts.append(f"## {title}\n\n{joint_table.markdown(head, rows)}")
    if content.failures:
        parts.insert(
            0, "Not in these tables:\n\n" + "\n".join(f"- {one.run}: {one.reason}" for one in content.failures)
        )
    text = "\n\n".join(filter(None, [level_text(content), *warnings(content), *parts]))
    return f"# {content.comparison}\n\n{_caption(content)}\n\n{text}\n"


def _caption(content: Results) -> str:
    versions = content.versions
    splits = [split.seed for split in content.splits]
    seeds = ", ".join(map(str, content.seeds))
    over = f"the seed{'' if len(content.seeds) == 1 else 's'} {seeds}"
    if len(splits) > 1:
        over = f"the splits {', '.join(map(str, splits))} and {over}"
    found = f"mean ± standard deviation over {over}" if content.pairs > 1 else f"of {over}"
    return (
        f"Test {content.label(content.score)}, {found}; the round was chosen by the mean validation score. "
        f"{budget_text(content)} {interval_note(content)}p: {content.test}; the smallest possible is "
        f"{content.smallest_p:.3g}. "
        f"Written {content.written}; "
        f"MedPFL {versions.medpfl}, torch {versions.torch}, Python {versions.python}."
    )


def interval_note(content: Results) -> str:
    """What the brackets are, in a sentence; "" where there are none."""
    if not any(row.gain and row.gain.interval for row in content.rows):
        return ""
    what, corrected = "Seeds", ""
    if len(content.splits) > 1:
        how = "over the splits, with Nadeau and Bengio's corrected variance"
        what, corrected = "Splits", " (of each split the mean of its seeds, and that variance)"
    elif content.pairs > 1:
        how = "from patients and seeds, both drawn anew 1000 times (hierarchical bootstrap)"
    else:
        how = "from patients, drawn anew 1000 times; with one seed they say nothing of training again"
    return (
        f"In brackets: 95 % intervals of the gain {how}. {what} that would show a gain: the fewest with which a paired "
        f"t-test of this mean and deviation{corrected} has the power, by the noncentral t; patients: n' / n = "
        f"((1.96 + 0.84) s / gain)², s the gain's standard error. {_first_note(content)}"
    )


def _first_note(content: Results) -> str:
    if not any(row.to_first for row in content.rows):
        return ""
    return (
        "To the first: how far a row is from the one with the best mean, whose lead is a little too large, as this "
        "test picked it. "
    )


def budget_text(content: Results) -> str:
    """What was searched, in a sentence or two."""
    tuning = content.file.tuning
    chosen = {name: entry.chosen for name, entry in content.file.methods.items() if entry.chosen}
    before = "".join(f" Found before it: {name}: {how}." for name, how in chosen.items())
    if not tuning:
        return f"No search in this comparison; arguments are as written in its file.{before}"
    each = " on each split" if len(content.splits) > 1 else ""
    axes = [*tuning.tune.values(), *(axis for entry in content.file.methods.values() for axis in entry.tune.values())]
    ranges = ""
    if any(isinstance(axis, Range) for axis in axes):
        ranges = " Optuna's tree-structured Parzen estimator proposed candidates from ranges by the scores so far."
    unseen = ""
    if content.file.unseen:
        unseen = (
            " A hospital that is left out of runs was in the search: its validation cases had a say in the arguments."
        )
    return (
        f"Tuning budget: {tuning.budget} candidates for every method{each}, references included, by the mean "
        f"validation score of their best round; seeds {', '.join(map(str, tuning.seeds))}, which take no part "
        f"in the results, and no test set was read.{ranges}{unseen}{before}"
    )
