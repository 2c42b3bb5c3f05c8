# SPDX-License-Identifier: Apache-2.0
"""A job's progress as a person can follow it: a live table on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from medpfl.results.files import parse_lines
from medpfl.results.schema import Line, RoundLine, ValidationLine
from medpfl.tasks.metrics.digits import digits


class Progress:
    """Follows the server's metrics.jsonl while the job writes it."""

    def __init__(self, job: str, rounds: int, file: Path, console: Console):
        self.job, self.rounds, self.file, self.console = job, rounds, file, console
        self._read = 0
        self._round = 0
        self._began: float | None = None
        self._metrics: dict[str, dict[str, Mapping[str, float | None]]] = {}
        self._score = ""
        """The metric that chooses the best round: the one whose mean over the hospitals is told."""
        self._live = Live(console=console, refresh_per_second=2, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        else:
            length = f"{self.rounds} round{'s' if self.rounds > 1 else ''}" if self.rounds else "evaluation only"
            self.console.print(f"{self.job}: submitted, {length}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self) -> None:
        """Read what is new and show it."""
        for line in self._new_lines():
            if isinstance(line, ValidationLine) and line.model not in line.metrics:  # diagnoses bear their own name
                self._metrics.setdefault(line.site, {})[line.model] = line.metrics
                if line.site == "mean":
                    self._score = next(iter(line.metrics))
            elif isinstance(line, RoundLine):
                self._round = line.round
                self._began = self._began or time.monotonic() - line.seconds
                if not self._live:
                    self.console.print(self._plain(), soft_wrap=True)
        if self._live:
            self._live.update(self._table())

    def _new_lines(self) -> list[Line]:
        if not self.file.exists():
            return []
        with open(self.file, encoding="utf-8") as stream:
            stream.seek(self._read)
            text = stream.read()
        whole = text[: text.rfind("\n") + 1]  # the last line may still be half-written
        self._read += len(whole.encode())
        return parse_lines(whole, self.file)

    def _scores(self) -> dict[str, dict[str, float]]:
        """Hospital (or "mean") to model to its value of the one metric that is shown."""
        known = {
            site: {model: value for model, found in models.items() if (value := found.get(self._score)) is not None}
            for site, models in self._metrics.items()
        }
        return {site: models for site, models in known.items() if models}

    def _left(self) -> str:
        if self._began is None or not self._round:
            return "starting"
        left = (time.monotonic() - self._began) / self._round * (self.rounds - self._round)
        return f"about {left:.0f} s left" if self._round < self.rounds else "final evaluation"

    def _plain(self) -> str:
        found = self._scores()
        d = digits(value for models in found.values() for value in models.values())
        scores = "; ".join(
            f"{site} " + " ".join(f"{model} {value:.{d}f}" for model, value in sorted(models.items()))
            for site, models in sorted(found.items())
        )
        told = f"; validation {self._score.replace('_', ' ')}: {scores}" if scores else ""
        return f"round {self._round}/{self.rounds}, {self._left()}{told}"

    def _table(self) -> Group:
        scores = self._scores()
        models = sorted({model for found in scores.values() for model in found})
        d = digits(value for found in scores.values() for value in found.values())
        table = Table("hospital", *models, title=f"validation {self._score.replace('_', ' ')}")
        for site in sorted(scores, key=lambda name: (name == "mean", name)):
            table.add_row(site, *(f"{scores[site].get(model, float('nan')):.{d}f}" for model in models))
        head = Table.grid(padding=(0, 1))  # a bar on its own would not end its line
        head.add_row(
            ProgressBar(total=self.rounds, completed=self._round, width=40),
            f"{self.job}: round {self._round}/{self.rounds}, {self._left()}",
        )
        return Group(head, table) if models else Group(head)
