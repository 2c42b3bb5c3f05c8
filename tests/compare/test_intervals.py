# SPDX-License-Identifier: Apache-2.0
"""Intervals of a comparison, what would show a difference, and what hospitals choose in it."""

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from comparing import SOFT, compared
from medpfl.compare import comparison_tables
from medpfl.compare.chosen import ALL, AVERAGE, Rows
from medpfl.compare.intervals import corrected, needed, of_mean, resampled
from medpfl.compare.patients import Sheets
from medpfl.compare.report import write_report
from medpfl.compare.results import Gain
from medpfl.compare.statistics import paired_gain
from medpfl.data.samples import Samples
from medpfl.tasks.metrics.certainty import interval_of
from medpfl.tasks.metrics.labels import Sensitivity
from medpfl.tasks.metrics.masks import Dice
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.numbers import R2
from medpfl.tasks.metrics.sheet import Sheet, sheet_of_cases
from small_jobs import write_table_sites


def sheet(values: list[float]) -> Sheet:
    names = [str(number) for number in range(len(values))]
    targets = torch.zeros(len(names))
    return sheet_of_cases(Dice(), values, Samples(targets[:, None], targets, np.arange(len(names)), names))


def test_draws_vary_with_patients_and_with_seeds() -> None:
    rng = np.random.default_rng(0)
    patients, seeds = rng.normal(size=30), rng.normal(size=5)
    by_patients = resampled([sheet(patients.tolist())] * 5, "anna")
    assert by_patients[0].std() == pytest.approx(patients.std() / np.sqrt(30), rel=0.15)
    assert np.abs(by_patients[1]).max() < 1e-12
    by_seeds = resampled([sheet([float(seed)] * 30) for seed in seeds], "anna")
    assert by_seeds[0] == pytest.approx(seeds.mean()) and by_seeds[1].mean() == pytest.approx(0, abs=0.05)
    assert by_seeds[1].std() == pytest.approx(seeds.std() / np.sqrt(5), rel=0.15)
    both = resampled([sheet((patients + seed).tolist()) for seed in seeds], "anna")
    assert both.sum(axis=0).std() == pytest.approx(np.hypot(by_patients[0].std(), by_seeds[1].std()), rel=0.15)


def gain_of(values: NDArray[np.float64]) -> tuple[float, float]:
    """The interval of a hospital's gain from these gains, seeds x patients."""
    sheets: dict[str, dict[tuple[int | None, int], Sheets]] = {
        name: {(None, seed): {"anna": {"test": sheet((right * one).tolist())}} for seed, one in enumerate(values)}
        for name, right in (("Local", 0), ("Good", 1))
    }
    rows = Rows(sheets, ["anna"], Measure(), "Local", None, anna)
    mean = paired_gain(values.mean(axis=1).tolist(), [0.0] * len(values))
    gain, by_site = rows.certain("Good", "Local", mean, {"anna": mean})
    assert gain.interval is not None and gain.interval == by_site["anna"].interval
    return gain.interval


@pytest.mark.parametrize("patients", [2, 3, 4, 5, 30])
def test_a_hospital_with_few_patients_has_students_interval(patients: int) -> None:
    """It ended at the outermost patients: with 2 it held the true gain in 48 of 100 comparisons, with 3 in 77."""
    from scipy.stats import ttest_1samp

    values = np.random.default_rng(patients).normal(size=(1, patients))
    expected = ttest_1samp(values[0], 0).confidence_interval(0.95)
    low, high = gain_of(values)
    assert high - low == pytest.approx(expected.high - expected.low, rel=0.1)


def test_few_seeds_make_a_wide_interval() -> None:
    """Of three seeds and patients who all gain alike it is that of three numbers; it was as wide as the seeds are."""
    from scipy.stats import ttest_1samp

    seeds = np.array([0.1, 0.3, 0.2])
    expected = ttest_1samp(seeds, 0).confidence_interval(0.95)
    low, high = gain_of(np.repeat(seeds[:, None], 20, axis=1))
    assert high - low == pytest.approx(expected.high - expected.low, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("patients", "seeds", "share"), [(30, 2, 0.5), (30, 5, 0.6), (3, 1, 0.0), (2, 1, 0.0)])
def test_intervals_hold_the_true_gain(patients: int, seeds: int, share: float) -> None:
    """Of 300 generated comparisons without a gain, the seeds with this share of the variance."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        of_seeds = rng.normal(size=(seeds, 1)) * np.sqrt(share / (1 - share) / patients * seeds)
        low, high = gain_of(rng.normal(size=patients) + of_seeds)
        held += low <= 0 <= high
    assert held / 300 > 0.92


def test_repeated_splits_are_corrected_as_nadeau_and_bengio_do() -> None:
    from scipy.stats import ttest_1samp

    values = [0.1, 0.3, 0.2, 0.4]
    plain = ttest_1samp(values, 0).confidence_interval(0.95)
    found, independent = corrected(values, 0.25), corrected(values, 0.0)
    assert independent == pytest.approx((plain.low, plain.high), abs=1e-6)
    assert found is not None
    assert found[1] - found[0] == pytest.approx((plain.high - plain.low) * np.sqrt((1 / 4 + 0.25) / (1 / 4)), abs=1e-5)
    assert corrected([0.1], 0.25) is None


def test_a_few_splits_that_gain_exactly_alike_are_not_sure() -> None:
    """[-0.125, -0.125] of two splits in which one of eight test patients was lost: "surely below Local". Without any
    true gain two such splits are alike in twelve of a hundred hospitals, and not the five that an interval misses."""
    for values in ([-0.125, -0.125], [1 / 3, 1 / 3, 1 - 2 / 3]):
        assert corrected(values, 0.25) is None
    assert corrected([0.0, 0.0], 0.25) == (0, 0)  # equal models, say
    assert corrected([0.125] * 6, 0.25) == (0.125, 0.125)


def test_patients_that_would_show_a_gain_follow_from_the_error_of_splits() -> None:
    """The interval of two splits is 12.7 standard errors to either side; it was taken for 1.96 of them, and told that
    42 times as many patients are needed as are."""
    values, ratio = [0.1, 0.3], 0.25
    error = np.sqrt((1 / 2 + ratio) * np.var(values, ddof=1))
    mean = paired_gain(values, [0.0, 0.0])
    sheets: dict[str, dict[tuple[int | None, int], Sheets]] = {
        name: {(split, 0): {"anna": {"test": sheet([value] * 8)}} for split, value in enumerate(of_splits)}
        for name, of_splits in (("Local", [0.0, 0.0]), ("Good", values))
    }
    rows = Rows(sheets, ["anna"], Measure(), "Local", {"anna": ratio}, anna)
    gain, by_site = rows.certain("Good", "Local", mean, {"anna": mean})
    for found in (gain, by_site["anna"]):
        assert found.interval == corrected(values, ratio)
        assert found.needed is not None and found.needed.times == pytest.approx((2.801585 * error / 0.2) ** 2, abs=0.01)


def test_a_hospital_without_an_interval_leaves_the_mean_none() -> None:
    """Two hospitals with one test patient each had a mean gain with the interval of the seeds alone: [0.1, 0.1]."""
    for patients in (1, 2):
        sheets: dict[str, dict[tuple[int | None, int], Sheets]] = {
            name: {(None, 0): {site: {"test": sheet([value, 2 * value][:patients])} for site in ("anna", "berta")}}
            for name, value in (("Local", 0.0), ("Good", 0.1))
        }
        rows = Rows(sheets, ["anna", "berta"], Measure(), "Local", None, lambda pairs: np.ones((len(pairs), 2), bool))
        mean = paired_gain([0.1], [0.0])
        gain, by_site = rows.certain("Good", "Local", mean, dict.fromkeys(("anna", "berta"), mean))
        assert [(found.interval is None) for found in (gain, *by_site.values())] == [patients == 1] * 3


@pytest.mark.parametrize("patients", [2, 5, 6])
def test_a_few_patients_who_gain_exactly_alike_leave_no_interval(patients: int) -> None:
    """Two patients of whom a model had both wrong and Local both right were "surely below Local": [-1.0, -1.0]."""
    draws = {
        name: np.stack([
            resampled([sheet([right] * patients)], "anna")[0], np.zeros(1000)
        ]) for name, right in (("alike", -1.0), ("equal", 0.0))
    }  # fmt: skip
    others = resampled([sheet(np.random.default_rng(0).normal(size=40).tolist())], "berta")
    for found in (of_mean([draws["alike"]], [patients], 1), of_mean([draws["alike"], others], [patients, 40], 1)):
        assert (found[0] is None) == (patients < 6)
    assert of_mean([draws["equal"]], [patients], 1)[0] == (0.0, 0.0)  # of two models that say the same


def test_two_patients_have_no_interval_of_r2() -> None:
    """One alone has no R2, and so every draw with a value was of both: the interval had no width."""
    truth = torch.tensor([1.0, 3.0])
    samples = Samples(truth[:, None], truth, np.arange(2), ["0", "1"])
    one, other = (Sheet(R2(), torch.tensor(said), samples, np.arange(2)) for said in ([1.2, 2.0], [2.0, 2.1]))
    for site in (
        "anna",
        "berta",
        "clara",
        "dora",
        "emil",
        "fritz",
    ):  # in some, fewer than half of the draws are of both
        assert of_mean([resampled([one], site) - resampled([other], site)], [2], 1)[0] is None


def test_gains_of_any_size_have_an_interval() -> None:
    """R2 of a model that diverged is -1e80, say; the square of its variance is beyond all numbers."""
    draws = np.stack([np.random.default_rng(0).normal(size=1000), np.zeros(1000)])
    found, count = of_mean([draws, 2 * draws], [9, 5], 1)
    for size in (1e90, 1e-5):
        other, same = of_mean([draws * size, 2 * draws * size], [9, 5], 1)
        assert found and other and same == pytest.approx(count)
        assert np.array(other) / size == pytest.approx(np.array(found), rel=1e-3)


def test_a_few_draws_far_away_do_not_move_the_interval() -> None:
    """R2 of six patients is -1000 where hardly any of the drawn numbers differ. Three such draws moved all others: in
    one of twenty simulated comparisons the gain itself lay outside of its interval."""
    by_patients = np.random.default_rng(0).normal(0.2, 0.01, size=1000)
    plain, _ = of_mean([np.stack([by_patients, np.zeros(1000)])], [6], 1)
    by_patients[:3] = -1000
    found, _ = of_mean([np.stack([by_patients, np.zeros(1000)])], [6], 1)
    assert plain is not None and found is not None and found[0] < 0.2 < found[1]
    assert found == pytest.approx(plain, abs=0.02)


@pytest.mark.parametrize("patients", [[3, 40, 40], [3, 3, 3], [40, 40, 40]])
def test_a_mean_is_no_surer_than_its_hospitals(patients: list[int]) -> None:
    """Welch's interval of a mean of unlike variances. All patients were counted together, as if they were one
    hospital's: with 3 patients beside twice 40 the interval held the true gain in 78 of 100 comparisons."""
    from scipy.stats import t

    rng = np.random.default_rng(0)
    values = {str(k): rng.normal(size=n) for k, n in enumerate(patients)}
    sheets: dict[str, dict[tuple[int | None, int], Sheets]] = {
        name: {(None, 0): {site: {"test": sheet((right * found).tolist())} for site, found in values.items()}}
        for name, right in (("Local", 0), ("Good", 1))
    }
    every = np.ones((1, len(patients)), dtype=bool)
    rows = Rows(sheets, list(values), Measure(), "Local", None, lambda pairs: every)
    gain, _ = rows.certain("Good", "Local", paired_gain([0.1], [0.0]), {})
    errors = np.array([found.var(ddof=1) / len(found) for found in values.values()])
    freedom = errors.sum() ** 2 / (errors**2 / (np.array(patients) - 1)).sum()
    reach = t.ppf(0.975, freedom) * np.sqrt(errors.sum()) / len(patients)
    assert gain.interval is not None and gain.needed is not None and gain.needed.times is not None
    assert (gain.interval[1] - gain.interval[0]) / 2 == pytest.approx(reach, rel=0.25)
    error = np.sqrt(errors.sum()) / len(patients)
    assert gain.needed.times == pytest.approx((2.801585 * error / 0.1) ** 2, rel=0.45)


def test_the_interval_of_one_hospital_is_that_of_a_job() -> None:
    draws = np.stack([np.random.default_rng(0).normal(size=1000), np.zeros(1000)])
    found, count = of_mean([draws], [9], 1)
    assert found == pytest.approx(interval_of(draws[0], 9), rel=0.05) and count == 9
    equal = np.zeros((2, 1000))
    assert of_mean([equal, equal], [3, 5], 2) == ((0.0, 0.0), 7.0)
    assert of_mean([draws, np.full((2, 1000), np.nan)], [3, 5], 1)[0] is None


def test_a_hospital_without_a_score_does_not_widen_the_interval_of_the_mean() -> None:
    """Of repeated splits the mean's interval goes by test samples to training samples, the mean of the hospitals: also
    of one at which no model has a score, and which is in no mean. With ten times as many test samples as training
    samples there it was more than twice as wide."""
    values = [0.1, 0.2, 0.3]
    sheets: dict[str, dict[tuple[int | None, int], Sheets]] = {
        name: {
            (split, 0): {"anna": {"test": sheet([value] * 8)}, "berta": {"test": sheet([np.nan] * 8)}}
            for split, value in enumerate(at)
        }
        for name, at in (("Local", [0.0] * 3), ("Good", values))
    }
    ratio, counted = {"anna": 0.25, "berta": 10.0}, np.array([[True, False]] * 3)
    rows = Rows(sheets, ["anna", "berta"], Measure(), "Local", ratio, lambda pairs: counted)
    mean = paired_gain(values, [0.0] * 3)
    gain, by_site = rows.certain("Good", "Local", mean, {"anna": mean})
    assert gain.interval == by_site["anna"].interval == corrected(values, 0.25)


def test_seeds_of_a_split_are_no_further_splits() -> None:
    """Of two splits with five seeds that change nothing the interval is that of one seed; it was that of ten splits, a
    ninth as wide, and held the true gain in 64 of 100 comparisons."""
    values, ratio = [0.1, 0.3], 0.25
    sheets: dict[str, dict[tuple[int | None, int], Sheets]] = {
        name: {
            (split, seed): {"anna": {"test": sheet([value] * 8)}} for split, value in enumerate(at) for seed in range(5)
        }
        for name, at in (("Local", [0.0, 0.0]), ("Good", values))
    }
    rows = Rows(sheets, ["anna"], Measure(), "Local", {"anna": ratio}, anna)
    mean = paired_gain(np.repeat(values, 5).tolist(), [0.0] * 10)
    gain, by_site = rows.certain("Good", "Local", mean, {"anna": mean})
    error = np.sqrt((1 / 2 + ratio) * np.var(values, ddof=1))
    for found in (gain, by_site["anna"]):
        assert found.interval == corrected(values, ratio)
        assert found.needed is not None and found.needed.times == pytest.approx((2.801585 * error / 0.2) ** 2, abs=0.01)


def test_splits_that_would_show_a_gain_are_counted_as_splits() -> None:
    """It was the number of runs, by the deviation over all of them: three splits with forty seeds needed fewer "seeds"
    than there were, beside an interval that holds 0."""
    values, ratio = [0.1, 0.2, 0.6], 0.25
    sheets: dict[str, dict[tuple[int | None, int], Sheets]] = {
        name: {
            (split, seed): {"anna": {"test": sheet([value] * 8)}} for split, value in enumerate(at) for seed in range(9)
        }
        for name, at in (("Local", [0.0] * 3), ("Good", values))
    }
    rows = Rows(sheets, ["anna"], Measure(), "Local", {"anna": ratio}, anna)
    mean = paired_gain(np.repeat(values, 9).tolist(), [0.0] * 27)
    gain, by_site = rows.certain("Good", "Local", mean, {"anna": mean})
    assert gain.interval is not None and gain.interval[0] < 0
    for found in (gain, by_site["anna"]):
        assert found.needed == needed(0.3, float(np.std(values, ddof=1)), gain.interval, 3, ratio)
        assert found.needed is not None and found.needed.seeds is None  # with overlapping ones no number shows it
    error = np.sqrt(1 / 10 + 0.01) * 0.2
    rng, kept = np.random.default_rng(0), needed(error * 3.1, 0.2, None, 9, 0.01).seeds
    assert kept is not None
    common = rng.normal(0, 0.2 * np.sqrt(0.01), size=(20_000, 1))
    splits = error * 3.1 + common + rng.normal(0, 0.2, size=(20_000, kept))
    shown = [found is not None and found[0] > 0 for found in (corrected(row, 0.01) for row in splits[:4000].tolist())]
    assert np.mean(shown) == pytest.approx(0.8, abs=0.03)


def test_splits_with_unequal_numbers_of_runs_leave_no_interval() -> None:
    """Where a run had failed, the interval was around the mean of the splits' means (here 0.15), and the gain beside it
    is the mean of the runs (0.2)."""
    runs = [(0, 0, 0.0), (1, 0, 0.3), (1, 1, 0.3)]
    sheets: dict[str, dict[tuple[int | None, int], Sheets]] = {
        name: {(split, seed): {"anna": {"test": sheet([value * right] * 8)}} for split, seed, value in runs}
        for name, right in (("Local", 0), ("Good", 1))
    }
    mean = paired_gain([value for *_, value in runs], [0.0] * 3)
    for pairs, known in ((list(sheets["Good"]), False), ([(0, 0), (1, 1)], True)):
        mine = {**sheets, "Good": {pair: sheets["Good"][pair] for pair in pairs}}
        rows = Rows(mine, ["anna"], Measure(), "Local", {"anna": 0.25}, anna)
        gain, by_site = rows.certain("Good", "Local", mean, {"anna": mean})
        assert [found.interval is not None for found in (gain, by_site["anna"])] == [known, known]


@pytest.mark.parametrize(("pairs", "told"), [(5, ""), (6, " (p 0.031)")])
def test_a_p_that_cannot_be_small_is_not_told(pairs: int, told: str) -> None:
    gain = paired_gain([1.0] * pairs, [0.0] * pairs)
    assert "(p " in comparison_tables.gain_text(gain, 3)  # a file of before, without intervals, is shown as it was
    sure = gain.model_copy(update={"interval": (0.9, 1.1)})
    assert comparison_tables.gain_text(sure, 3) == f"+1.000 [0.900, 1.100]{told}"


def anna(pairs: Sequence[tuple[int | None, int]]) -> NDArray[np.bool_]:
    """The only hospital counts in every run."""
    return np.ones((len(pairs), 1), dtype=bool)


def test_hospitals_choose_run_by_run() -> None:
    rng = np.random.default_rng(0)
    local = {seed: rng.normal(size=12) for seed in (0, 1)}

    def run(seed: int, gain: float) -> Sheets:
        values = sheet((local[seed] + gain + 0.01 * rng.normal(size=12)).tolist())
        return {"anna": {"validation": values, "test": values}}

    sheets = {
        "Local": {(None, seed): run(seed, 0.0) for seed in (0, 1)},
        "Good": {(None, seed): run(seed, [0.5, -0.5][seed]) for seed in (0, 1)},
    }
    rows = Rows(sheets, ["anna"], Measure(), "Local", None, anna)
    row = rows.choose("Good", ["Good"])
    assert row is not None and row.picks == {"anna": {"Good": 1, "Local": 1}} and not row.below
    assert row.gain.mean == pytest.approx(0.25, abs=0.02)
    assert rows.choose("Other", ["Good"]) is not None
    sheets["Worse"] = {(None, seed): run(seed, gain) for seed, gain in enumerate([-0.5, -0.48])}
    gain, by_site = rows.certain("Worse", "Local", paired_gain([-0.5, -0.48], [0, 0]), {})
    assert gain.interval is not None and gain.interval[1] < 0 and not by_site


def test_the_average_has_a_threshold_of_its_own() -> None:
    """As in a job: each model finds half of the ill at 0.4, and their average all of them, at 0.2."""
    ill = torch.arange(20) % 2
    truth = Samples(torch.empty(20, 0), ill, np.arange(20), [str(number) for number in range(20)], 2)

    def run(found: Tensor) -> Sheets:
        given = torch.where((ill == 1) & found, 0.4, 0.0)
        one = Sheet(Sensitivity(0.4), torch.stack([1 - given, given], dim=1), truth, np.arange(20))
        return {"anna": {"validation": one, "test": one}}

    first = torch.arange(20) < 10
    runs = {"Local": {(None, 0): run(first)}, "Other": {(None, 0): run(~first)}}
    row = Rows(runs, ["anna"], Measure(), "Local", None, anna).choose("Other", ["Other"])
    assert row is not None and row.picks == {"anna": {AVERAGE: 1}} and row.score.mean == 1.0


@pytest.mark.slow
def test_a_comparison_says_what_hospitals_choose(tmp_path: Path) -> None:
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"], rows=60)
    plan, found = compared(tmp_path, sites, seeds=[0, 1], methods={"SoftPull": SOFT})
    assert [row.name for row in found.chosen] == [ALL, "SoftPull"]
    for row in found.rows:
        if row.gain:
            assert row.gain.interval is not None and row.gain.interval[0] <= row.gain.mean <= row.gain.interval[1]
            for each in row.hospitals.values():
                assert isinstance(each.gain, Gain) and each.gain.interval is not None
    for chosen in found.chosen:
        for site in ("anna", "berta"):
            assert sum(chosen.picks[site].values()) == 2
    text, page = comparison_tables.markdown(found), write_report(found, tmp_path / "results").read_text()
    for part in (comparison_tables.CHOSEN, "hierarchical bootstrap", ALL):
        assert part in text and part in " ".join(html.unescape(page).split())
    assert "(p " not in text
    for file in (tmp_path / "results" / "runs").glob("*/cases.npz"):
        file.unlink()  # as runs of before
    from medpfl.compare.collect import collect

    before = collect(plan, tmp_path / "results", {})
    assert not before.chosen and all(row.gain is None or row.gain.interval is None for row in before.rows)
    assert comparison_tables.CHOSEN not in comparison_tables.markdown(before)
