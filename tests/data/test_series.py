# SPDX-License-Identifier: Apache-2.0
"""Time series: real recordings in, windows out; nothing of a test window is ever in a training window."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from medpfl.core.errors import DataError, PolicyRefused
from medpfl.data.declared import Problems
from medpfl.data.patterns import find_files
from medpfl.data.policy import Policy
from medpfl.data.preparation import Spec
from medpfl.data.samples import SiteData
from medpfl.data.series.declare import Series
from medpfl.data.series.recordings import interpolated, windows
from medpfl.data.site_file import load_site_file
from medpfl.rounds.hospital.policy import check_scored

WINDOWS = Spec("class", ("windows",))

FILES = ["a.csv", "b.csv", "c.csv"]
DECLARED: dict[str, Any] = {
    "kind": "series",
    "files": FILES,
    "channels": ["x", "y"],
    "label": {"column": "act", "classes": {"lying": [1], "walking": [4]}, "ignore": [0]},
    "window": {"length": 4, "step": 2},
}


def declare(folder: Path, storage: dict[str, Any] | None = None, **others: Any) -> Series:
    series = {key: value for key, value in (DECLARED | others).items() if value is not None}
    content = {"storage": storage or {}, "datasets": {"s": series}}
    (folder / "site.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return load_site_file(folder / "site.yaml").dataset("s", Series)


def frame(labels: list[int], start: int = 0) -> pd.DataFrame:
    """Channel x counts the steps, so that every sample is known by its value."""
    steps = np.arange(start, start + len(labels))
    return pd.DataFrame({"x": steps, "y": -1.5 * steps, "act": labels})


def three(folder: Path, labels: list[int] | None = None) -> None:
    labels = labels or [1] * 7 + [0] * 2 + [4] * 6 + [1] * 3
    for number, name in enumerate(FILES):
        frame(labels, 100 * number).to_csv(folder / name, index=False)


def raw(data: SiteData, split: str) -> NDArray[np.float64]:
    """A split's windows, N x C x length, as they were in the files."""
    mean, scale = np.array(data.preparation.mean), np.array(data.preparation.scale)
    values: NDArray[np.float64] = data.splits[split].inputs[:].numpy() * scale[:, None] + mean[:, None]
    return values


def test_windows_lie_within_runs_of_one_label(tmp_path: Path) -> None:
    three(tmp_path)
    data = declare(tmp_path).load(WINDOWS)
    found = {split: raw(data, split)[:, 0].round(4).tolist() for split in data.splits}
    assert sorted(len(windows) for windows in found.values()) == [4, 4, 4]
    for split, inner in found.items():
        first = inner[0][0]
        expected = [[first + s + i for i in range(4)] for s in (0, 2, 9, 11)]  # 7 steps: 2 windows; 6: 2; 3: none
        assert inner == expected, split
        assert data.splits[split].targets.tolist() == [0, 0, 1, 1]
        assert data.splits[split].names[2].split(":")[1] == "11-14"  # lines of the file
    assert data.class_names == ["lying", "walking"]
    np.testing.assert_allclose(raw(data, "test")[:, 1], -1.5 * raw(data, "test")[:, 0], atol=1e-3)


@pytest.mark.parametrize("form", ["tsv", "parquet", "headerless", "label text"])
def test_every_form_of_file_gives_the_same_windows(tmp_path: Path, form: str) -> None:
    three(tmp_path)
    expected = declare(tmp_path).load(WINDOWS)
    names, others = FILES, {}
    frames = [pd.read_csv(tmp_path / name) for name in FILES]
    if form == "tsv":
        names = [name.replace("csv", "tsv") for name in FILES]
        for name, one in zip(names, frames, strict=True):
            one.to_csv(tmp_path / name, sep="\t", index=False)
    elif form == "parquet":
        names = [name.replace("csv", "parquet") for name in FILES]
        for name, one in zip(names, frames, strict=True):
            one[["act", "y", "x"]].to_parquet(tmp_path / name)
    elif form == "headerless":
        others = {"columns": ["x", "y", "act"], "separator": " "}
        for name, one in zip(names, frames, strict=True):
            one.to_csv(tmp_path / name, sep=" ", index=False, header=False)
    else:
        label = DECLARED["label"] | {"classes": {"lying": ["down", "1.0"], "walking": ["up"]}}
        others = {"label": label}
        for name, one in zip(names, frames, strict=True):
            texts = one["act"].map({0: "0.0", 1: "down", 4: "up"})
            one.assign(act=texts).to_csv(tmp_path / name, index=False)
    data = declare(tmp_path, files=names, **others).load(WINDOWS)
    for split, samples in expected.splits.items():
        assert np.array_equal(data.splits[split].inputs[:].numpy(), samples.inputs[:].numpy())
        assert np.array_equal(data.splits[split].targets[:].numpy(), samples.targets[:].numpy())
    assert data.preparation.mean == expected.preparation.mean


def test_arrays_are_recordings_with_one_label_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y, who = rng.normal(size=(30, 3, 8)), rng.integers(0, 3, (30, 1)), np.repeat(np.arange(10), 3)
    np.savez(tmp_path / "ecg.npz", x=x, y=y, who=who)
    label = {"column": "y", "classes": {"normal": [0], "ill": [1]}, "ignore": [2]}
    form: dict[str, Any] = {"files": ["ecg.npz"], "inputs": "x", "channels": None, "label": label}
    whole = declare(tmp_path, **form, window=None, split={"group": "who"}).load(WINDOWS)
    used = {split: [int(n.removeprefix("ecg.npz[")[:-1]) for n in s.names] for split, s in whole.splits.items()}
    assert sorted(i for some in used.values() for i in some) == np.flatnonzero(y[:, 0] < 2).tolist()
    owners = [{int(who[i]) for i in some} for some in used.values()]
    assert all(not one & other for one, other in itertools.combinations(owners, 2))
    for split, some in used.items():
        np.testing.assert_allclose(raw(whole, split), x[some], atol=1e-6)
        assert whole.splits[split].targets.tolist() == y[some, 0].tolist()
    cut = declare(tmp_path, **form, window={"length": 3}, split={"group": "who"}).load(WINDOWS)
    assert len(cut.splits["train"]) == 2 * len(whole.splits["train"])
    assert cut.splits["train"].names[1] == f"ecg.npz[{used['train'][0]}]:3-5"


def test_a_group_is_in_one_split_and_windows_end_where_it_changes(tmp_path: Path) -> None:
    who = ["p"] * 5 + ["q"] * 5 + ["p"] * 5 + ["r"] * 5
    frame([1] * 20).assign(who=who).to_csv(tmp_path / "a.csv", index=False)
    frame([4] * 20, 100).assign(who=who).to_csv(tmp_path / "b.csv", index=False)
    dataset = declare(tmp_path, files=["a.csv", "b.csv"], split={"group": "who"})
    listing = dataset.cases(Problems())
    groups = {split: {case.group for case in cases} for split, cases in listing.items()}
    assert sorted(map(len, groups.values())) == [1, 1, 1] and set.union(*groups.values()) == {"p", "q", "r"}
    for case in itertools.chain(*listing.values()):
        steps = dataset.read(case).image[0].astype(int) % 100
        assert {who[step] for step in steps} == {case.group}


def test_a_column_may_name_the_splits(tmp_path: Path) -> None:
    part = ["train"] * 9 + ["val"] * 5 + ["test"] * 6
    frame([1] * 20).assign(part=part, who="p").to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(DataError, match=r"'a\.csv' is in the train split and in the validation split"):
        declare(tmp_path, files=["a.csv"], split={"column": "part"}).load(WINDOWS)
    for name, split in zip(FILES, ("training", "val", "testing"), strict=True):
        frame([1] * 8).assign(part=split).to_csv(tmp_path / name, index=False)
    data = declare(tmp_path, split={"column": "part"}).load(WINDOWS)
    assert [samples.names[0].split(":")[0] for samples in data.splits.values()] == FILES


def test_only_the_training_part_standardises(tmp_path: Path) -> None:
    three(tmp_path)
    before = declare(tmp_path).load(WINDOWS)
    train = before.splits["train"].names[0].split(":")[0]
    used = pd.read_csv(tmp_path / train).query("act != 0")[["x", "y"]].to_numpy()[:13]  # without the run of 3 steps
    np.testing.assert_allclose(before.preparation.mean, used.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(before.preparation.scale, used.std(axis=0), rtol=1e-6)
    for name in FILES:
        if name != train:
            frame([1] * 7 + [4] * 9, 5000).to_csv(tmp_path / name, index=False)
    after = declare(tmp_path).load(WINDOWS)
    assert after.preparation == before.preparation
    assert np.array_equal(after.splits["train"].inputs[:].numpy(), before.splits["train"].inputs[:].numpy())


def test_missing_samples(tmp_path: Path) -> None:
    three(tmp_path)
    text = (tmp_path / "b.csv").read_text().splitlines()
    text[3] = ",-153.0,1"  # step 2 of a run of 7
    text[9] = ",,0"  # an ignored step may lack anything
    (tmp_path / "b.csv").write_text("\n".join(text))
    with pytest.raises(DataError, match=r"b\.csv:4: channel 'x' is missing \(1 samples.*'missing_samples: interp"):
        declare(tmp_path).load(WINDOWS)
    dataset = declare(tmp_path, missing_samples="interpolate")
    cases = [case for case in itertools.chain(*dataset.cases(Problems()).values()) if case.name == "b.csv:2-5"]
    assert np.isnan(dataset.read(cases[0]).image).tolist() == [[False, False, True, False], [False] * 4]
    three(tmp_path)
    expected, data = declare(tmp_path).load(WINDOWS), dataset.load(WINDOWS)
    for split in expected.splits:
        np.testing.assert_allclose(raw(data, split), raw(expected, split), atol=1e-3)  # a straight line's gap


def test_interpolation_takes_nothing_from_another_run(tmp_path: Path) -> None:
    nan = float("nan")
    run = np.array([[nan, nan], [2, nan], [nan, nan], [4, nan], [nan, nan]], dtype=np.float32)
    filled = interpolated(run)
    assert filled[:, 0].tolist() == [2, 2, 3, 4, 4] and np.isnan(filled[:, 1]).all()
    three(tmp_path, [1] * 6 + [4] * 6)
    broken = pd.read_csv(tmp_path / "a.csv").astype(float)
    broken.loc[4:6, "x"] = nan  # the end of one run and the start of the next
    broken.to_csv(tmp_path / "a.csv", index=False)
    data = declare(tmp_path, missing_samples="interpolate").load(WINDOWS)
    split = next(split for split, samples in data.splits.items() if samples.names[0].startswith("a.csv"))
    expected = [[0, 1, 2, 3], [2, 3, 3, 3], [7, 7, 8, 9], [8, 9, 10, 11]]
    np.testing.assert_allclose(raw(data, split)[:, 0], expected, atol=1e-4)


def test_a_channel_that_is_never_there_in_a_run(tmp_path: Path) -> None:
    three(tmp_path)
    recording = pd.read_csv(tmp_path / "a.csv")
    recording["y"] = recording["y"].mask(recording["act"] == 4)
    recording.to_csv(tmp_path / "a.csv", index=False, na_rep="NaN")
    with pytest.raises(DataError, match=r"a\.csv:11-16: channel 'y' has no value in this run"):
        declare(tmp_path, missing_samples="interpolate").load(WINDOWS)


def test_a_single_recording_is_cut_by_time(tmp_path: Path) -> None:
    frame(([1] * 20 + [4] * 30) * 2).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(DataError, match=r"a\.csv: 1 recordings.*cannot be cut into 3 splits.*'split: \{time: true\}'"):
        declare(tmp_path, files=["a.csv"]).load(WINDOWS)
    data = declare(tmp_path, files=["a.csv"], window={"length": 4, "step": 4}, split={"time": True}).load(
        Spec("class", ("windows",))
    )
    steps = {split: raw(data, split)[:, 0].round().astype(int) for split in data.splits}
    # class 1 has steps 0-19 and 50-69, class 4 has 20-49 and 70-99: 60 % of each, then 20 %, then 20 %
    assert set(steps["train"].ravel()) == {*range(0, 20), *range(50, 54), *range(20, 48), *range(70, 74)}
    assert set(steps["validation"].ravel()) == {*range(54, 62), *range(76, 88)}
    assert set(steps["test"].ravel()) == {*range(62, 70), *range(88, 100)}


def test_windows_of_a_recording_that_is_cut_by_time_are_of_one_patient(tmp_path: Path) -> None:
    """Every piece between two changes of label passed for a patient, so that the score of a single one was told."""
    frame(([1] * 20 + [4] * 30) * 2).to_csv(tmp_path / "a.csv", index=False)
    window = {"length": 4, "step": 4}
    data = declare(tmp_path, files=["a.csv"], window=window, split={"time": True}).load(WINDOWS)
    assert [len(set(samples.patients.tolist())) for samples in data.splits.values()] == [1, 1, 1]
    with pytest.raises(PolicyRefused, match=r"validation split has fewer; .* only recording .*'least_scored: 1'"):
        check_scored(Policy(), data)
    check_scored(Policy(least_scored=1), data)
    frame(([1] * 20 + [4] * 30) * 2).to_csv(tmp_path / "b.csv", index=False)
    data = declare(tmp_path, files=["a.csv", "b.csv"], window=window, split={"time": True}).load(WINDOWS)
    assert set(data.splits["train"].owners or []) == {"a.csv", "b.csv"}


def test_more_than_the_memory_budget_gives_the_same(tmp_path: Path) -> None:
    three(tmp_path)
    expected = declare(tmp_path).load(WINDOWS)
    data = declare(tmp_path, storage={"memory_gb": 1e-7}).load(WINDOWS)  # 107 bytes
    assert not hasattr(data.splits["train"].inputs, "numpy")  # in a file
    for split, samples in expected.splits.items():
        assert np.array_equal(data.splits[split].inputs[:].numpy(), samples.inputs[:].numpy())


def test_windows_of_an_array_by_hand() -> None:
    values = np.arange(10, dtype=np.float32).reshape(5, 2)
    assert windows(values, 3, 2).tolist() == [[[0, 2, 4], [1, 3, 5]], [[4, 6, 8], [5, 7, 9]]]
    assert windows(values, 5, 9).shape == (1, 2, 5) and windows(values, 6, 1).shape == (0, 2, 6)


recordings = st.lists(
    st.lists(st.tuples(st.sampled_from([0, 1, 4]), st.integers(1, 12)), min_size=1, max_size=5), min_size=1, max_size=5
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs=recordings, length=st.integers(1, 6), step=st.integers(1, 8), time=st.booleans(), seed=st.integers(0, 9))
@pytest.mark.slow
def test_no_sample_of_a_window_is_in_another_split(
    tmp_path_factory: pytest.TempPathFactory,
    runs: list[list[tuple[int, int]]],
    length: int,
    step: int,
    time: bool,
    seed: int,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    label_of: dict[int, int] = {}
    names = []
    for number, recording in enumerate(runs):
        labels = [label for label, count in recording for _ in range(count)]
        names.append(f"r{number}.parquet")
        frame(labels, 1000 * number).to_parquet(folder / names[-1])
        label_of |= {1000 * number + place: label for place, label in enumerate(labels)}
    split = {"time": True} if time else {"seed": seed}
    fractions = {"fractions": {"train": 0.5, "test": 0.5}}
    dataset = declare(folder, files=names, window={"length": length, "step": step}, split=split | fractions)
    try:
        data = dataset.load(WINDOWS)
    except DataError:
        assume(False)
    seen: dict[int, str] = {}
    for split_name, samples in data.splits.items():
        steps = raw(data, split_name)[:, 0].round().astype(int)
        for window, target in zip(steps, samples.targets.tolist(), strict=True):
            assert window.tolist() == list(range(window[0], window[0] + length))  # consecutive, of one recording
            assert {label_of[place] for place in window.tolist()} == {(1, 4)[target]}
            for place in window.tolist():
                assert seen.setdefault(place, split_name) == split_name
            if not time:
                owner = int(window[0]) // 1000
                assert seen.setdefault(-1 - owner, split_name) == split_name


def test_files_by_pattern_whose_placeholders_are_columns(tmp_path: Path) -> None:
    """A group and the label stand in the path; a name that looks like a pattern and is there is that file."""
    for number in range(8):
        folder = tmp_path / f"p{number // 2}" / ("walking", "lying")[number % 2]
        folder.mkdir(parents=True)
        frame([0] * 8, 100 * number).drop(columns="act").to_csv(folder / f"[{number}].csv", index=False)
    label = {"column": "act", "classes": {"lying": ["lying"], "walking": ["walking"]}}
    declared = declare(tmp_path, files="{who}/{act}/*.csv", label=label, split={"group": "who"})
    data = declared.load(WINDOWS)
    owners = {split: set(samples.owners) for split, samples in data.splits.items()}
    assert set.union(*owners.values()) == {"p0", "p1", "p2", "p3"} and sum(map(len, owners.values())) == 4
    for split, samples in data.splits.items():
        for window, target in zip(raw(data, split), samples.targets[:].tolist(), strict=True):
            assert data.class_names[target] == ("walking", "lying")[round(float(window[0, 0])) // 100 % 2]
    literal = "p0/walking/[0].csv"
    assert [file.name for file in find_files(tmp_path, [literal], Problems())] == [literal]
