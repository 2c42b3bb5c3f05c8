# SPDX-License-Identifier: Apache-2.0
"""The comparison files of docs/results: every class and argument in them is there, and their first line runs them."""

from pathlib import Path

import pytest

from medpfl.compare.comparison_tables import budget_text
from medpfl.compare.entries import build_codecs
from medpfl.compare.file import load_comparison
from medpfl.compare.results import Results
from medpfl.component import build, import_named
from medpfl.core.mixers import Mixer
from medpfl.methods.contract import Method
from medpfl.results.compact import read_compact
from medpfl.tasks.contract import Task

FILES = sorted((Path(__file__).resolve().parents[2] / "docs" / "results").glob("compare-*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_it_names_is_there(path: Path) -> None:
    loaded = load_comparison(path)
    import_named(loaded.model_dump())  # as ``medpfl compare`` does: a study's own method
    assert path.stem == f"compare-{loaded.name}"
    assert f"medpfl compare docs/results/{path.name} " in path.read_text(encoding="utf-8").split("\n")[0] + " "
    build(loaded.task.model_dump(), Task, "task")
    for name, entry in loaded.methods.items():
        for argument, value in entry.swept or [("", None)]:
            slot, _, key = argument.rpartition(".")
            args = entry.args if slot or not key else {**entry.args, key: value}
            build({"path": entry.path, "args": args}, Method, name)
            for place, mixer in entry.slots.items():
                args = {**mixer.args, key: value} if place == slot else mixer.args
                build({"path": mixer.path, "args": args}, Mixer, f"{name}.{place}")
        if entry.codecs:
            build_codecs(entry.codecs.model_dump(), name)


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.with_suffix(".md").exists()], ids=lambda path: path.stem
)
def test_its_page_says_what_was_tried_before(path: Path) -> None:
    file = load_comparison(path)
    told = Results.model_validate(read_compact(path.with_suffix(".json.xz")), strict=False)
    assert budget_text(told.model_copy(update={"file": file})) in path.with_suffix(".md").read_text(encoding="utf-8")
    for name, entry in file.methods.items():  # no paper gives a tau for these data
        if any("tau" in mixer.args for mixer in entry.slots.values()) and name == "pFedNet" and not entry.sweep:
            assert "tau" in entry.chosen
