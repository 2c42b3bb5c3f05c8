# SPDX-License-Identifier: Apache-2.0
"""Several labels, numbers, and times with events: as tables, images, arrays and recordings declare them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console

from answers import declare
from medpfl.check.reading import inspect
from medpfl.check.terminal_check import run
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.outcome import Several, Survival
from medpfl.data.preparation import Spec
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.data.target import Target

NAN = float("nan")
TWO = {"columns": {"a": "first", "b": "second"}}
LABELS = [(1, NAN), (0, 1), (1, 0), (0, 0), (1, 1), (0, 1)]
ROWS = [("1", ""), ("0", "1"), ("1", "0"), ("0", "0"), ("1", "1"), ("0", "1")]


def load(path: Path, spec: Spec) -> SiteData:
    return load_site_file(path).load("ward", spec)


def write(folder: Path, **dataset: Any) -> Path:
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": {"ward": dataset}}))
    return folder / "site.yaml"


def everything(data: SiteData) -> torch.Tensor:
    """All targets, in an order that says nothing."""
    return torch.cat([samples.targets[:] for samples in data.splits.values()])


def same(found: torch.Tensor, expected: list[tuple[float, ...]]) -> bool:
    """Whether the rows are the same in any order; NaN equals NaN."""
    return sorted(found.nan_to_num(9).tolist()) == sorted(torch.tensor(expected).nan_to_num(9).tolist())


def test_two_labels_of_one_column_are_refused() -> None:
    """A line that was copied and not changed: both labels would always be equal."""
    with pytest.raises(ValueError, match="the column 'first' is named for two labels, which would always be equal"):
        Several(columns={"a": "first", "b": "second", "c": "first"})


def test_one_case_is_read() -> None:
    several = Several.model_validate({**TWO, "yes": ["present", 1], "no": ["absent"], "unknown": ["unsure"]})
    assert several.read({"first": "present", "second": "absent"}) == (1.0, 0.0)
    assert several.read({"first": "1.0", "second": ""}) == pytest.approx((1.0, NAN), nan_ok=True)
    assert several.read({"first": None, "second": "unsure"}) == pytest.approx((NAN, NAN), nan_ok=True)
    survival = Survival(time="t", event="e")
    assert survival.read({"t": "12.5", "e": "1"}) == (12.5, 1.0)
    for cells, words in (
        ({"t": "12", "e": "2"}, "column 'e': '2' is not among the declared values (1, 0)"),
        ({"t": "soon", "e": "1"}, "column 't': expected a number, got 'soon'"),
        ({"t": "-3", "e": "1"}, "column 't': expected a time of at least 0, got -3"),
        ({"t": "", "e": "1"}, "column 't' is missing"),
    ):
        with pytest.raises(ValueError) as caught:
            survival.read(cells)
        assert str(caught.value) == words


def test_tables(tmp_path: Path) -> None:
    several = load(declare(tmp_path, "anna", "several"), Spec(Target.LABELS, ("rows",)))
    targets = everything(several)
    assert several.class_names == ["oedema", "effusion", "nodule"] and targets.shape == (60, 3)
    assert set(targets[~targets.isnan()].tolist()) == {0.0, 1.0} and 10 < int(targets.isnan().sum()) < 60
    survival = load(declare(tmp_path, "anna", "survival"), Spec(Target.SURVIVAL, ("rows",)))
    assert survival.class_names == [] and everything(survival).shape == (60, 2)
    # The parts have events in equal shares: with few of them a test part without any would say nothing.
    shares = [float(samples.targets[:][:, 1].mean()) for samples in survival.splits.values()]
    assert max(shares) - min(shares) < 0.1 < min(shares)
    with pytest.raises(DataError, match=r"learns for each label .* a table with 'several', which is not declared"):
        load(tmp_path / "anna.yaml", Spec(Target.LABELS, ("rows",)))
    (tmp_path / "anna.csv").write_text("age,pain,days,status\n50,1,10,dead\n51,1,11,gone\n")
    with pytest.raises(DataError, match=r"anna\.csv:3: column 'status': 'gone' is not among the declared values"):
        load(tmp_path / "anna.yaml", Spec(Target.SURVIVAL, ("rows",)))


def test_images(tmp_path: Path) -> None:
    lines = ["image,first,second,days,status"]
    for number, (first, second) in enumerate(ROWS):
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{number},{first},{second},{number + 0.5},{number % 2}")
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    common = {"kind": "images", "files": "*.png", "channels": 1, "table": {"file": "list.csv", "image": "image"}}
    spec = Spec(Target.LABELS, ("images",), (4, 4))
    found = load(write(tmp_path, **common, several=TWO), spec)
    assert found.class_names == ["a", "b"] and same(
        everything(found), [(1, NAN), (0, 1), (1, 0), (0, 0), (1, 1), (0, 1)]
    )
    found = load(write(tmp_path, **common, value="days"), Spec(Target.VALUE, ("images",), (4, 4)))
    assert sorted(everything(found).tolist()) == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5] and found.class_names == []
    times = {"time": "days", "event": "status"}
    found = load(write(tmp_path, **common, survival=times), Spec(Target.SURVIVAL, ("images",), (4, 4)))
    assert same(everything(found), [(n + 0.5, n % 2) for n in range(6)])
    with pytest.raises(DataError, match="needs images with 'several', which the dataset does not declare"):
        load(tmp_path / "site.yaml", spec)
    with pytest.raises(SiteFileError, match=r"expected one of .* got 'several' and 'value'"):
        load_site_file(write(tmp_path, **common, several=TWO, value="days"))


def test_arrays(tmp_path: Path) -> None:
    x, y = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4), np.array([[1, 0], [0, 1], [1, 1]] * 2, np.uint8)
    numbers, events = np.arange(6) + 0.5, np.arange(6) % 2
    np.savez(tmp_path / "own.npz", x=x, y=y, days=numbers, status=events, odd=y + 1)
    chest = {
        f"{part}_{key}": value for part in ("train", "val", "test") for key, value in (("images", x), ("labels", y))
    }
    np.savez(tmp_path / "chest.npz", **chest)
    size = (4, 4)
    found = load(
        write(tmp_path, kind="arrays", file="chest.npz", several=["a", "b"]), Spec(Target.LABELS, ("images",), size)
    )
    assert torch.equal(found.splits["test"].targets[:], torch.from_numpy(y).float()) and found.class_names == ["a", "b"]
    own = {"kind": "arrays", "file": "own.npz", "inputs": "x"}
    found = load(write(tmp_path, **own, value="days"), Spec(Target.VALUE, ("images",), size))
    assert sorted(everything(found).tolist()) == numbers.tolist()
    times = {"time": "days", "event": "status"}
    found = load(write(tmp_path, **own, survival=times), Spec(Target.SURVIVAL, ("images",), size))
    assert same(everything(found), [*zip(numbers, events, strict=True)])
    with pytest.raises(DataError, match="needs arrays with 'classes', which is not declared"):
        load(tmp_path / "site.yaml", Spec(Target.CLASS, ("images",), size))
    with pytest.raises(DataError, match=r"odd\[0\]: expected 0, 1 or NaN \(not known\), got 2"):
        load(write(tmp_path, **own, labels="odd", several=["a", "b"]), Spec(Target.LABELS, ("images",), size))
    with pytest.raises(DataError, match=r"'y' has the shape \(6, 2\) .* a column for each of the labels"):
        load(write(tmp_path, **own, labels="y", several=["a", "b", "c"]), Spec(Target.LABELS, ("images",), size))


def test_series(tmp_path: Path) -> None:
    for number, (first, second) in enumerate(ROWS):
        rows = [f"{step},{first},{second},{number + 0.5},{number % 2}" for step in range(8)]
        (tmp_path / f"{number}.csv").write_text("\n".join(["x,first,second,days,status", *rows]) + "\n")
    common = {"kind": "series", "files": [f"{n}.csv" for n in range(6)], "channels": ["x"], "window": {"length": 4}}
    found = load(write(tmp_path, **common, several=TWO), Spec(Target.LABELS, ("windows",)))
    assert same(everything(found), LABELS * 2)
    found = load(write(tmp_path, **common, value="days"), Spec(Target.VALUE, ("windows",)))
    assert sorted(everything(found).tolist()) == sorted([n + 0.5 for n in range(6)] * 2)
    times = {"time": "days", "event": "status"}
    found = load(write(tmp_path, **common, survival=times), Spec(Target.SURVIVAL, ("windows",)))
    assert same(everything(found), [(n + 0.5, n % 2) for n in range(6)] * 2)
    (tmp_path / "3.csv").write_text("x,first,second,days,status\n" + "1,0,0,never,1\n" * 8)
    with pytest.raises(DataError, match=r"3\.csv:2: column 'days': expected a number, got 'never'"):
        load(tmp_path / "site.yaml", Spec(Target.SURVIVAL, ("windows",)))


def test_the_data_check_counts_labels(tmp_path: Path) -> None:
    dataset = load_site_file(declare(tmp_path, "anna", "several")).datasets["ward"]
    found = inspect("ward", dataset)
    targets = everything(load(tmp_path / "anna.yaml", Spec(Target.LABELS, ("rows",))))
    counted = np.sum([split.classes for split in found.splits.values()], axis=0)
    assert not found.problems and counted.tolist() == (targets == 1).sum(dim=0).tolist()
    found = inspect("ward", load_site_file(declare(tmp_path, "anna", "survival")).datasets["ward"])
    assert not found.problems and found.splits["train"].cases == 36


def test_the_data_check_shows_how_many_events_a_split_has(tmp_path: Path) -> None:
    """Cox's model learns from them alone, and a test part with few of them says little."""
    path = declare(tmp_path, "anna", "survival")
    splits = load(path, Spec(Target.SURVIVAL, ("rows",))).splits
    events = {split: int(samples.targets[:][:, 1].sum()) for split, samples in splits.items()}
    assert len(set(events.values())) == 3 and sum(events.values()) < 60, events
    console = Console(record=True, width=100)
    run(path, None, None, tmp_path / "page.html", console)
    said = console.export_text()
    assert "groups" in said and re.search(r"groups\W+events", said), said
    for split, count in events.items():
        assert re.search(rf"{split}\W+\d+\W+\d+\W+{count}\W*\n", said), said
    page = (tmp_path / "page.html").read_text()
    (row,) = re.findall("<tr><td>cases whose event came</td>(.*?)</tr>", page)
    assert re.findall(r"<td>(\d+) ", row) == [str(events[split]) for split in ("train", "validation", "test")]
    run(declare(tmp_path, "anna", "value"), None, None, tmp_path / "page.html", console)
    assert "events" not in console.export_text() and "event came" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "written",
    [
        "survival: {time: days, event: status, yes: [dead], no: [alive]}",  # as docs/tasks.md has it
        "survival:\n  time: days\n  event: status\n  'yes': [dead]\n  \"no\": [alive]",
    ],
)
def test_yes_and_no_are_keys_as_they_are_written(tmp_path: Path, written: str) -> None:
    """YAML reads both as truth values, without quotation marks."""
    rows = [f"{row},{row / 7:.3f},{row + 1},{'dead' if row % 2 else 'alive'}" for row in range(20)]
    (tmp_path / "r.csv").write_text("\n".join(["id,x,days,status", *rows]) + "\n")
    indented = written.replace("\n", "\n    ")
    text = f"datasets:\n  ward:\n    kind: table\n    files: [r.csv]\n    features: {{x: number}}\n    {indented}\n"
    (tmp_path / "site.yaml").write_text(text)
    found = everything(load(tmp_path / "site.yaml", Spec(Target.SURVIVAL, ("rows",))))
    assert same(found, [(row + 1, row % 2) for row in range(20)])


def test_yes_in_two_ways_is_refused(tmp_path: Path) -> None:
    several = "several: {columns: {a: a, b: b}, yes: [1], 'yes': [2]}"
    text = f"datasets: {{ward: {{kind: table, files: [r.csv], features: {{x: number}}, {several}}}}}\n"
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(SiteFileError, match=r"'datasets\.ward\.several': the key 'yes' is there twice"):
        load_site_file(tmp_path / "site.yaml")


@pytest.mark.parametrize("written", ["yes: [yes], no: [no]", "yes: [True], no: [False]", "unknown: [no]"])
def test_values_that_yaml_reads_as_truth_values_are_refused(tmp_path: Path, written: str) -> None:
    """They became 1 and 0, and each row's "yes" was said not to be declared."""
    several = f"several: {{columns: {{a: a, b: b}}, {written}}}"
    text = f"datasets: {{ward: {{kind: table, files: [r.csv], features: {{x: number}}, {several}}}}}\n"
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(SiteFileError, match=r"several.*YAML reads yes, no, .* as truth values; put them in quotes"):
        load_site_file(tmp_path / "site.yaml")


def test_the_data_check_tells_of_splits_in_which_the_event_never_came(tmp_path: Path) -> None:
    rows = [f"{row},{row / 7:.3f},{row + 1},no" for row in range(40)]
    (tmp_path / "r.csv").write_text("\n".join(["id,x,t,e", *rows]) + "\n")
    survival = {"time": "t", "event": "e", "yes": ["yes"], "no": ["no"]}
    path = write(tmp_path, kind="table", files=["r.csv"], features={"x": "number"}, survival=survival)
    found = inspect("ward", load_site_file(path).datasets["ward"])
    train = found.splits["train"]
    said = f"ward: the event came in none of the {train.cases} cases of the train split, so nothing can be learnt"
    assert train.events == 0 and any(text.startswith(said) for text in found.warnings), found.warnings
    assert sum("the event came in none" in text for text in found.warnings) == 3
    (tmp_path / "r.csv").write_text("\n".join(["id,x,t,e", *rows]).replace("no", "yes") + "\n")
    found = inspect("ward", load_site_file(path).datasets["ward"])
    assert found.splits["train"].events == train.cases and not found.warnings


@pytest.mark.parametrize("column", ["x", "t"])
def test_a_number_that_single_precision_does_not_hold(tmp_path: Path, column: str) -> None:
    """It became infinity, and with it the hospital's weights."""
    cells = {"x": "1", "t": "2", "e": "yes", column: "1e300"}
    rows = [f"{row},1,2,no" for row in range(20)] + ["last," + ",".join(cells.values())]
    (tmp_path / "r.csv").write_text("\n".join(["id,x,t,e", *rows]) + "\n")
    survival = {"time": "t", "event": "e", "yes": ["yes"], "no": ["no"]}
    path = write(tmp_path, kind="table", files=["r.csv"], features={"x": "number"}, survival=survival)
    with pytest.raises(DataError, match=rf"r\.csv:22: column '{column}': expected a number of at most 3.4e\+38, got"):
        load(path, Spec(Target.SURVIVAL, ("rows",)))
