# SPDX-License-Identifier: Apache-2.0
"""What inputs mean in words, and the first difference."""

from pathlib import Path
from typing import Any

import pytest

from hospitals import change_yaml, write_table
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.meaning import LONGEST, described, other_inputs
from medpfl.data.preparation import Spec
from medpfl.data.site_file import load_site_file
from medpfl.data.target import Target


def test_words() -> None:
    assert described("age", "number", "years") == "age: number in years"
    assert described("cp", [1, 2.0, "3"]) == "cp: 1 or 2 or 3"
    assert described("cp", [1, 2.0, "3"]) != described("cp", [2, 1, 3])


def test_what_is_long_or_odd_is_told_by_its_hash() -> None:
    codes = [f"I{number}" for number in range(1000)]
    told = described("icd", codes)
    assert len(told) <= LONGEST and told.startswith("icd: of SHA-256 ")
    assert told != described("icd", codes[::-1])
    assert described("a\nb", "number").startswith("a?b: of SHA-256 ")
    assert len(described("x" * 10_000, "number")) <= LONGEST


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (["a", "b"], ["a", "b"], None),
        ([], [], None),
        (["a", "b"], ["b", "a"], "my input 1 is 'a', your 'b': the same features stand in another order"),
        (["a"], ["a", "b"], "my input 2 is 'nothing', your 'b'"),
        (["a", "c"], ["a"], "my input 2 is 'c', your 'nothing'"),
    ],
)
def test_the_first_difference(mine: list[str], theirs: list[str], words: str | None) -> None:
    found = other_inputs(mine, "my", theirs, "your")
    assert found == words if words is None else words in str(found)


def meaning(path: Path) -> list[str]:
    data = load_site_file(path).load("blood", Spec(Target.CLASS, ("rows",)))
    assert data.preparation is not None
    return data.preparation.meaning()


def blood(path: Path, **change: Any) -> Path:
    change_yaml(path, lambda content: content["datasets"]["blood"].update(change))
    return path


def test_a_table_says_features_categories_and_units(tmp_path: Path) -> None:
    path = blood(write_table(tmp_path), units={"age": "years"})
    assert meaning(path) == ["age: number in years", "sex: m or f", "crp: number"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_renamed_columns_are_the_same_data(tmp_path: Path, kind: str) -> None:
    import pandas as pd

    path = write_table(tmp_path)
    expected = load_site_file(path).load("blood", Spec(Target.CLASS, ("rows",)))
    frame = pd.read_csv(tmp_path / "blood.csv").rename(columns={"age": "Alter", "sick": "krank"})
    if kind == "csv":
        frame.to_csv(tmp_path / "blut.csv", index=False)
    else:
        frame.to_parquet(tmp_path / "blut.parquet")
    blood(path, files=[f"blut.{kind}"], rename={"Alter": "age", "krank": "sick"})
    data = load_site_file(path).load("blood", Spec(Target.CLASS, ("rows",)))
    for split, samples in expected.splits.items():
        assert data.splits[split].inputs[:].equal(samples.inputs[:])
        assert data.splits[split].targets[:].equal(samples.targets[:])


def test_rename_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    path = blood(write_table(tmp_path), rename={"aeg": "age"})
    with pytest.raises(DataError, match=r"column 'aeg', which 'rename' names, is missing; did you mean 'age'\?"):
        meaning(path)
    with pytest.raises(SiteFileError, match="two columns are renamed to 'age'"):
        meaning(blood(path, rename={"a": "age", "b": "age"}))
    with pytest.raises(SiteFileError, match=r"'units' names 'aeg', .* did you mean 'age'\?"):
        meaning(blood(path, rename={}, units={"aeg": "years"}))
