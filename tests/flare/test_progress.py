# SPDX-License-Identifier: Apache-2.0
"""The line that says how far a job is: one metric, named, of every hospital and their mean."""

import io
from pathlib import Path

from rich.console import Console

from medpfl.flare.progress import Progress
from medpfl.results.callbacks import ResultFiles
from medpfl.results.record import Record
from medpfl.results.schema import ValidationLine


def test_hospitals_and_their_mean_are_of_the_metric_that_chooses(tmp_path: Path) -> None:
    text = io.StringIO()
    record = Record("small", ("anna", "berta"), [ResultFiles(tmp_path)], [])
    for site, accuracy, balanced in (("anna", 0.9, 0.1), ("berta", 0.8, 0.3)):
        metrics = {"accuracy": accuracy, "balanced_accuracy": balanced}
        record.metric(ValidationLine(site=site, model="personal", round=1, metrics=metrics))
    record.mean_score(1, "personal", "balanced_accuracy", 0.2)
    record.round(1, {}, 1.0)
    with Progress("small", 3, tmp_path / "metrics.jsonl", Console(file=text, width=300)) as seen:
        seen.update()
    told = "validation balanced accuracy: anna personal 0.100; berta personal 0.300; mean personal 0.200"
    assert told in text.getvalue()
