# SPDX-License-Identifier: Apache-2.0
"""The site file: what is accepted, and one sentence for everything that is not."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hospitals import change_yaml, write_table
from medpfl.core.errors import SiteFileError
from medpfl.data.readout import UNDECIDED
from medpfl.data.site_file import ENVIRONMENT_VARIABLE, SiteFile, find_site_file, load_site_file
from medpfl.data.table.declare import Table
from medpfl.data.volumes.declare import Volumes
from medpfl.tasks import MultiLabel, Tabular

GOOD: dict[str, Any] = {
    "site": "a",
    "datasets": {
        "organ": {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}},
        "heart": {
            "kind": "table",
            "files": ["heart.csv"],
            "features": {"age": "number", "cp": [1, 2, "x"]},
            "label": {"column": "num", "classes": {"healthy": [0], "ill": [1, 2]}},
            "split": {"seed": 3, "fractions": {"train": 0.5, "test": 0.5}, "stratify": True},
        },
    },
}


def write(folder: Path, content: Any, name: str = "site.yaml") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def changed(*keys: str, to: Any) -> dict[str, Any]:
    """GOOD with one place changed; ``to=None`` removes the key."""
    content = copy.deepcopy(GOOD)
    place = content
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    if to is None:
        del place[keys[-1]]
    else:
        place[keys[-1]] = to
    return content


def test_a_valid_file(tmp_path: Path) -> None:
    site = load_site_file(write(tmp_path, GOOD), "a")
    heart = site.dataset("heart", Table)
    assert isinstance(heart, Table)
    assert heart.features == {"age": "number", "cp": [1, 2, "x"]}
    assert heart.split.fractions == {"train": 0.5, "test": 0.5}
    assert heart._folder == tmp_path
    organ = site.dataset("organ", Volumes)
    assert isinstance(organ, Volumes)
    assert organ.labels == {0: "background", 1: "organ"} and organ.split.group == "patient"


MASKS = {"files": "masks/*.png", "suffix": "_m", "labels": {0: "background", 1: "lesion\u202e"}}
HEART = ("datasets", "heart")
ORGAN = ("datasets", "organ")


@pytest.mark.parametrize(
    ("keys", "to", "words"),
    [
        (("colour",), 1, ["unknown key 'colour'"]),
        ((*ORGAN, "colour"), 1, ["unknown key 'datasets.organ.colour'"]),
        ((*HEART, "colour"), 1, ["unknown key 'datasets.heart.colour'"]),
        ((*HEART, "label", "colour"), 1, ["unknown key 'datasets.heart.label.colour'"]),
        ((*HEART, "split", "colour"), 1, ["unknown key 'datasets.heart.split.colour'"]),
        (("datasets",), None, ["key 'datasets' is missing"]),
        ((*ORGAN, "datalist"), None, ["key 'datasets.organ.datalist' is missing"]),
        ((*HEART, "label"), None, ["'datasets.heart': expected one of 'label', ", "got none of them"]),
        ((*HEART, "kind"), None, ["'datasets.heart.kind' is missing", "'volumes'", "'table'"]),
        ((*HEART, "kind"), "tables", ["'datasets.heart.kind'", "'volumes'", "'table'", "got 'tables'"]),
        (("datasets", "table"), {"kind": "table"}, ["key 'datasets.table.files' is missing"]),
        (HEART, 5, ["'datasets.heart'", "5"]),
        (("site",), 5, ["'site'", "string", "got 5"]),
        ((*HEART, "files"), [], ["'datasets.heart.files'", "at least 1"]),
        ((*HEART, "split", "fractions"), {"train": 0.5, "test": 0.4}, ["sum to 1", "0.9"]),
        ((*HEART, "split", "fractions"), {"train": 1.5, "test": -0.5}, ["above 0"]),
        ((*HEART, "split", "fractions"), {"train": float("nan"), "test": 0.5}, ["above 0"]),
        ((*HEART, "split", "fractions"), {"train": 0.5, "validation": 0.5}, ["at least 'train' and 'test'"]),
        ((*HEART, "split", "fractions"), {"train": 0.5, "dev": 0.5}, ["fractions.dev", "'train', 'validation'"]),
        ((*HEART, "split", "group"), "patient", ["'group' and 'stratify' cannot be combined"]),
        ((*HEART, "separator"), "", ["'datasets.heart.separator'", "at least 1"]),
        ((*HEART, "separator"), ",,", ["'datasets.heart.separator'", "at most 1"]),
        ((*HEART, "separator"), "\n", ["'datasets.heart.separator'", "comma"]),
        ((*HEART, "columns"), ["a", "b", "a"], ["'datasets.heart.columns'", "'a' is listed twice"]),
        ((*HEART, "missing_rows"), "keep", ["missing_rows", "'drop', 'refuse' or 'impute'", "got 'keep'"]),
        ((*HEART, "features", "age"), "numeric", ["'datasets.heart.features.age'", "'number' or a list", "'numeric'"]),
        ((*HEART, "features", "cp"), [1], ["features.cp'", "at least 2 categories"]),
        ((*HEART, "features", "cp"), [1, 2, 1.0], ["features.cp'", "1.0 is listed twice"]),
        ((*HEART, "features", "cp"), [True, False], ["features.cp'", "put them in quotes"]),
        ((*HEART, "features", "num"), "number", ["'num', is also a feature"]),
        ((*HEART, "label", "classes"), {"one": [1]}, ["label.classes", "at least 2"]),
        ((*HEART, "label", "classes"), {"one": [1], "two": [1, 2]}, ["label.classes", "1 is listed twice"]),
        ((*HEART, "label", "classes"), {"one": [1], "two": []}, ["every class needs at least one value"]),
        ((*ORGAN, "labels"), {0: "background", 2: "organ"}, ["'datasets.organ'", "without gaps", "[0, 2]"]),
        ((*ORGAN, "labels"), {1: "a", 2: "b"}, ["without gaps", "[1, 2]"]),
        (
            (*ORGAN, "labels"),
            {value: f"region {value}" for value in range(UNDECIDED + 1)},
            ["at most 255 labels", "got 256"],
        ),
        ((*ORGAN, "labels"), {0: "background"}, ["'datasets.organ.labels'", "at least 2"]),
        (
            (*ORGAN, "labels"),
            {0: "background", 1: "a", 2: "a"},
            ["'datasets.organ': the label's name 'a' is there twice"],
        ),
        ((*ORGAN, "labels"), {0: "background", 1: ""}, ["a class's name has 1 to 100 characters", "got ''"]),
        (
            ("datasets", "skin"),
            {"kind": "images", "files": "*.png", "masks": MASKS, "label": GOOD["datasets"]["heart"]["label"]},
            ["'datasets.skin.masks': a class's name has 1 to 100 characters", r"got 'lesion\u202e'"],
        ),
        ((*HEART, "split"), {"group": ""}, ["'datasets.heart.split.group'", "at least 1", "got ''"]),
        ((*ORGAN, "split"), {"column": ""}, ["'datasets.organ.split.column'", "at least 1", "got ''"]),
        ((*ORGAN, "label_map"), {255: 4}, ["label_map: 255 is mapped to 4, which is not among the labels"]),
        ((*ORGAN, "split", "seed"), -1, ["'datasets.organ.split.seed'", "greater than or equal to 0, got -1"]),
        ((*ORGAN, "split", "seed"), 2**32, ["'datasets.organ.split.seed'", "less than 4294967296, got 4294967296"]),
        ((*ORGAN, "split"), {"column": "part", "seed": 1}, ["'column' names the splits, so 'seed' has nothing to cut"]),
        (("policy",), {"most_epsilon": True}, ["'policy.most_epsilon'", "number", "got True"]),
        (("policy",), {"most_epsilon": float("inf")}, ["'policy.most_epsilon'", "finite", "got inf"]),
        (("policy",), {"delta": False}, ["'policy.delta'", "number", "got False"]),
        (("storage",), {"memory_gb": 0}, ["'storage.memory_gb'", "greater than 0", "got 0"]),
        (("storage",), {"memory": 5}, ["unknown key 'storage.memory'"]),
        ((*ORGAN, "split"), {"stratify": True}, ["'stratify' needs one class a case"]),
    ],
)
def test_one_sentence_names_the_key(tmp_path: Path, keys: tuple[str, ...], to: Any, words: list[str]) -> None:
    path = write(tmp_path, changed(*keys, to=to))
    with pytest.raises(SiteFileError) as caught:
        load_site_file(path, "a")
    sentence = str(caught.value)
    for word in [str(path), *words]:
        assert word in sentence
    assert "\n" not in sentence and str(tmp_path) not in caught.value.public


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("site: a\ndatasets: {organ: [\n", ["line 3", "not valid YAML"]),
        ("site: a\n\tdatasets: 1\n", ["line 2", "not valid YAML"]),
        ("- a\n- b\n", ["expected a mapping", "got list"]),
        ("", ["expected a mapping", "got NoneType"]),
        ("site: 2020-13-45\n", ["line 1", "not valid YAML: '2020-13-45' is no timestamp: month must be in 1..12"]),
        ("a:\n  site: !!int ''\n", ["line 2", "not valid YAML: '' is no int"]),
        ("site: !!bool x\n", ["not valid YAML: 'x' is no bool"]),
        ("site: !!timestamp x\n", ["not valid YAML: 'x' is no timestamp"]),
        ("site: !!map [a]\n", ["not valid YAML: this is no map"]),
        ("!!python/object/apply:os.getcwd []\n", ["line 1", "not valid YAML"]),
        ("[" * 3000, ["not valid YAML"]),
    ],
)
@pytest.mark.slow
def test_text_that_is_no_site_file(tmp_path: Path, text: str, words: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SiteFileError) as caught:
        load_site_file(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_bytes(b"site: \xff\xfe\n")
    with pytest.raises(SiteFileError, match=r"expected YAML as text in UTF-8, got other bytes \(at 6\)"):
        load_site_file(tmp_path / "site.yaml")


def test_a_folder_holds_a_file_per_hospital(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "a.yaml")
    assert load_site_file(tmp_path, "a").site == "a"
    with pytest.raises(SiteFileError, match=r"cannot read the site file .*b\.yaml: No such file"):
        load_site_file(tmp_path, "b")
    with pytest.raises(SiteFileError, match="is a folder"):
        load_site_file(tmp_path)


def test_the_file_of_another_hospital_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(SiteFileError, match="site file of 'a', but this hospital is 'b'"):
        load_site_file(path, "b")
    nameless = write(tmp_path, changed("site", to=None), "nameless.yaml")
    assert load_site_file(nameless, "b").site is None


def test_a_job_gets_only_what_is_declared(tmp_path: Path) -> None:
    site = load_site_file(write(tmp_path, GOOD))
    with pytest.raises(SiteFileError, match=r"dataset 'lung'.*declared: heart, organ") as caught:
        site.dataset("lung", Volumes)
    assert caught.value.public == "dataset 'lung' is not declared at this hospital"
    with pytest.raises(SiteFileError, match="'heart' is of kind 'table', the job's task needs 'volumes'") as caught:
        site.dataset("heart", Volumes)
    assert str(tmp_path) not in caught.value.public


def test_a_task_of_all_inputs_lacks_the_size_of_images(tmp_path: Path) -> None:
    columns = {"columns": {"a": "a", "b": "b"}}
    kinds: dict[str, dict[str, Any]] = {
        "images": {"files": ["*.png"], "table": {"file": "a.csv", "image": "x"}, "several": columns},
        "arrays": {"file": "a.npz", "several": ["a", "b"]},
    }
    datasets = {kind: {"kind": kind, **content} for kind, content in kinds.items()}
    site = load_site_file(write(tmp_path, {"datasets": {**datasets, "organ": GOOD["datasets"]["organ"]}}))
    lacking = "; to learn from images it lacks their 'size' in the job, such as [64, 64]"
    for kind in kinds:
        with pytest.raises(SiteFileError) as caught:
            site.load(kind, MultiLabel(dataset=kind).spec)
        assert str(caught.value).endswith(f"is of kind '{kind}', the job's task needs 'table' or 'series'{lacking}")
        assert caught.value.public == f"dataset '{kind}' is of another kind than the job's task needs{lacking}"
    for name, task in (("organ", MultiLabel(dataset="organ")), ("images", Tabular(dataset="images"))):
        with pytest.raises(SiteFileError) as caught:
            site.load(name, task.spec)
        assert "size" not in str(caught.value)


def test_where_the_site_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: tmp_path / name for name in ("scope", "variable", "kit")}
    for name, folder in places.items():
        folder.mkdir()
        write(folder, {"datasets": {name: GOOD["datasets"]["organ"]}}, "a.yaml")
    scope: dict[str, object] = {"site_file": str(places["scope"] / "a.yaml")}

    def found(scope: dict[str, object] | None) -> list[str]:
        return list(find_site_file("a", scope, places["kit"]).datasets)

    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(places["variable"] / "a.yaml"))
    assert found(scope) == ["scope"]
    assert found({}) == found(None) == ["variable"]
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(places["variable"]))
    assert found(None) == ["variable"]
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert found(None) == ["kit"]
    (places["kit"] / "a.yaml").rename(places["kit"] / "site.yaml")
    assert found(None) == ["kit"]


def test_no_site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    with pytest.raises(SiteFileError) as caught:
        find_site_file("a", None, tmp_path)
    for word in ("no site file for 'a'", ENVIRONMENT_VARIABLE, str(tmp_path / "a.yaml"), str(tmp_path / "site.yaml")):
        assert word in str(caught.value)
    assert caught.value.public == "this hospital has no site file"
    with pytest.raises(SiteFileError, match="no startup kit folder"):
        find_site_file("a", None, None)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def only_site_file_errors(tmp_path_factory: pytest.TempPathFactory, fill: Callable[[Path], object]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    fill(path)
    try:
        assert isinstance(load_site_file(path), SiteFile)
    except SiteFileError as error:
        assert str(path) in str(error)


fuzz = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@fuzz
@given(place=st.sampled_from([(), ("datasets",), ORGAN, HEART]), data=st.data())
@pytest.mark.slow
def test_any_value_anywhere(tmp_path_factory: pytest.TempPathFactory, place: tuple[str, ...], data: Any) -> None:
    content = copy.deepcopy(GOOD)
    inner = content
    for key in place:
        inner = inner[key]
    key = data.draw(st.sampled_from(sorted(inner)))
    if isinstance(inner[key], dict) and data.draw(st.booleans()):
        inner[key][data.draw(st.sampled_from(list(inner[key])))] = data.draw(values)
    else:
        inner[key] = data.draw(values)
    text = yaml.safe_dump(content)
    only_site_file_errors(tmp_path_factory, lambda path: path.write_text(text, encoding="utf-8"))


@pytest.mark.slow
@fuzz
@given(text=st.text(alphabet="ab:-[]{}!&*#|>'\"0129.,?% \n\t", max_size=40).map(str.encode) | st.binary(max_size=20))
def test_any_text(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    only_site_file_errors(tmp_path_factory, lambda path: path.write_bytes(text))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda site: site.update(polcy={}), "unknown key 'polcy'; did you mean 'policy'?"),
        (
            lambda site: site.update(policy={"least_sample": 3}),
            "'policy.least_sample'; did you mean 'least_",
        ),
        (
            lambda site: site["datasets"]["blood"].update(fetures={}),
            "blood.fetures'; did you mean 'features'?",
        ),
        (lambda site: site["datasets"]["blood"].update(split={"gruop": "x"}), "split.gruop'; did you mean 'group'?"),
        (lambda site: site.update(storage={"memory": 3}), "'storage.memory'; did you mean 'memory_gb'?"),
    ],
)
def test_a_misspelt_key_is_told_with_the_one_that_was_meant(
    tmp_path: Path, change: Callable[[Any], object], words: str
) -> None:
    path = write_table(tmp_path)
    change_yaml(path, change)
    with pytest.raises(SiteFileError, match=re.escape(words)):
        load_site_file(path)
