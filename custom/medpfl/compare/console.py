# SPDX-License-Identifier: Apache-2.0
"""The leaderboard and the gains, on the console and as Markdown."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def ranked(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, best mean first."""
    return sorted(content["rows"], key=lambda row: -(row["best"]["mean"] if row["best"]["mean"] is not None else -9e9))


def score_text(stat: dict[str, Any] | None) -> str:
    """ "0.812 ± 0.010"; of one seed without deviation."""
    if stat is None or stat["mean"] is None:
        return "n/a"
    return f"{stat['mean']:.3f}" + (f" ± {stat['sd']:.3f}" if stat["sd"] is not None else "")


def gain_text(gain: dict[str, Any] | None) -> str:
    """ "+0.031 (p 0.06)" """
    if gain is None:
        return ""
    return f"{gain['mean']:+.3f}" + (f" (p {p_text(gain['p'])})" if gain["p"] is not None else "")


def p_text(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def bytes_text(value: float | None) -> str:
    if value is None:
        return "n/a"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def leaderboard(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["method", "best round", "last round", "gain over Local", "worst-off hospital"]
    rows = []
    for row in ranked(content):
        last = score_text(row["last"]) if row["curve"] else "–"
        worst = f"{row['worst']['hospital']} {row['worst']['score']:.3f}" if row["worst"] else "n/a"
        rows.append([row["name"], score_text(row["best"]), last, gain_text(row["gain"]), worst])
    return head, rows


def gains(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Gain over local training: methods by hospitals."""
    sites = content["hospitals"]
    rows = [row for row in ranked(content) if row["gain"]]
    lines = [
        [row["name"], gain_text(row["gain"]), *(gain_text(row["hospitals"][site]["gain"]) for site in sites)]
        for row in rows
    ]
    return ["method", "mean", *sites], lines


def hospitals(content: dict[str, Any], choice: str = "best") -> tuple[list[str], list[list[str]]]:
    """Test score: methods by hospitals."""
    sites = content["hospitals"]
    rows = [row for row in ranked(content) if choice == "best" or row["curve"]]
    lines = [[row["name"], *(score_text(row["hospitals"][site][choice]) for site in sites)] for row in rows]
    return ["method", *sites], lines


def metrics(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of all metrics: test of the best round, mean of the hospitals."""
    names = list(ranked(content)[0]["metrics"])
    rows = [[row["name"], *(score_text(row["metrics"].get(name)) for name in names)] for row in ranked(content)]
    return ["method", *(name.replace("_", " ") for name in names)], rows


def print_comparison(content: dict[str, Any], folder: Path, console: Console) -> None:
    """Leaderboard, gains, failures, and where the report is."""
    seeds = len(content["seeds"])
    title = f"{content['comparison']}: test {content['score'].replace('_', ' ')}, mean of the hospitals; seeds: {seeds}"
    for heading, (head, rows) in ((title, leaderboard(content)), ("Gain over local training", gains(content))):
        table = Table(title=heading)
        for number, name in enumerate(head):
            table.add_column(name, justify="right" if number else "left")
        for row in rows:
            table.add_row(*(cell.replace(" (p", "\n(p") for cell in row))
        console.print(table)
    console.print(f"p: {content['test']}; smallest possible p: {content['smallest_p']:.3g}")
    for failure in content["failures"]:
        text = f"{failure['method']}, seed {failure['seed']} failed: {failure['reason']}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: {folder / 'report.html'}", soft_wrap=True)


def markdown(content: dict[str, Any]) -> str:
    """The same as Markdown, with the scores hospital by hospital and all metrics."""
    parts = []
    tables = [
        ("Leaderboard", leaderboard(content)),
        ("Hospital by hospital", hospitals(content)),
        ("Gain over local training", gains(content)),
    ]
    if len(content["rows"][0]["metrics"]) > 1:
        tables.append(("All metrics, mean of the hospitals", metrics(content)))
    for title, (head, rows) in tables:
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        parts.append(f"## {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
    text = "\n\n".join(parts)
    return f"# {content['comparison']}\n\n{_caption(content)}\n\n{text}\n"


def _caption(content: dict[str, Any]) -> str:
    versions = content["versions"]
    return (
        f"Test {content['score'].replace('_', ' ')}, mean ± standard deviation over the seeds "
        f"{', '.join(map(str, content['seeds']))}; the round was chosen by the mean validation score. "
        f"p: {content['test']}; the smallest possible is {content['smallest_p']:.3g}. Written {content['written']}; "
        f"MedPFL {versions['medpfl']}, torch {versions['torch']}, Python {versions['python']}."
    )
