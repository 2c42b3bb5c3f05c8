# SPDX-License-Identifier: Apache-2.0
"""Several splits, paired with the seeds; and hospitals that are left out of training and tested."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.special import stdtrit

from comparing import SOFT, compared, do, plan_of
from medpfl.compare.comparison_tables import markdown
from medpfl.compare.data import reader, split_digest
from medpfl.compare.plan import Plan
from medpfl.compare.results import Results
from medpfl.compare.run_results import ServedBySuper, UnseenRun
from medpfl.compare.runner import read_run
from medpfl.compare.statistics import paired_gain
from medpfl.component import spec_of
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import evaluate_on
from medpfl.models.by_hospital import ByHospital
from medpfl.models.tabnet import TabNet
from medpfl.tasks.tabular import Tabular
from small_jobs import write_table_sites

TASK = Tabular(dataset="blood", hidden=(4,))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], Plan, Results]:
    """Three hospitals, two splits, each hospital left out once."""
    folder = tmp_path_factory.mktemp("splits")
    sites = write_table_sites(folder / "sites", ["anna", "berta", "clara"])
    methods = {"Soft": {**SOFT, "slots": {"model": {"path": "medpfl.core.mixers.SoftPull", "args": {"lam": 0.6}}}}}
    plan, content = compared(folder, sites, splits=[0, 7], unseen=True, methods=methods)
    return folder / "results", sites, plan, content


def data_of(sites: dict[str, Path], site: str, split: int) -> SiteData:
    return TASK.load(reader(split)(sites[site], site))


def test_a_split_is_drawn_with_its_seed(table_sites: dict[str, Path]) -> None:
    own = TASK.load(load_site_file(table_sites["anna"], "anna"))
    zero, seven = data_of(table_sites, "anna", 0), data_of(table_sites, "anna", 7)
    names = [{split: samples.names for split, samples in data.splits.items()} for data in (own, zero, seven)]
    assert names[0] == names[1] != names[2]  # the file's own seed is 0
    whole = [sorted(name for part in each.values() for name in part) for each in names]
    assert whole[0] == whole[1] == whole[2] and len(set(whole[0])) == len(whole[0])
    assert {split: len(part) for split, part in names[1].items()} == {s: len(p) for s, p in names[2].items()}


def test_other_patients_make_other_runs(tmp_path: Path) -> None:
    """Where a column names the split, a patient's number that is declared later changed no digest, and the intervals of
    the runs that were kept drew single rows."""
    file = write_table_sites(tmp_path / "sites", ["anna"])["anna"]
    table = tmp_path / "sites" / "anna.csv"
    head, *lines = table.read_text().splitlines()
    parts = ["train"] * 20 + ["validation"] * 10 + ["test"] * 10
    rows = [f"{line},{number // 2},{part}" for number, (line, part) in enumerate(zip(lines, parts, strict=True))]
    table.write_text("\n".join([f"{head},patient,part", *rows]) + "\n")
    declared = yaml.safe_load(file.read_text())

    def digest(**more: str) -> str:
        declared["datasets"]["blood"]["split"] = {"column": "part", **more}
        file.write_text(yaml.safe_dump(declared))
        return split_digest(TASK.load(load_site_file(file, "anna")))

    assert digest() == digest() != digest(group="patient") == digest(group="patient")


@pytest.mark.slow
def test_scores_and_gains_are_paired_by_split_and_seed(
    done: tuple[Path, dict[str, Path], Plan, Results],
) -> None:
    results, sites, plan, content = done
    assert content.pairs == 2 and content.test.endswith("paired by split and seed")
    assert [split.seed for split in content.splits] == [0, 7]
    rows = {row.name: row for row in content.rows}
    for name, model in (("Local", "local"), ("Soft", "personal")):
        assert rows[name].pairs == [(0, 0), (7, 0)]
        for place, split in enumerate((0, 7)):
            run = next(run for run in plan.runs if (run.name, run.split, run.without) == (name, split, None))
            for site in sites:
                path = (
                    results / "runs" / run.digest / "home" / site / "compared" / "models" / f"{model}-best.safetensors"
                )
                found = evaluate_on(load_deployed(path), data_of(sites, site, split), "test").metrics["accuracy"]
                assert rows[name].hospitals[site].best.values[place] == pytest.approx(found, abs=1e-6)
    for site in sites:
        values = [np.array(rows[name].hospitals[site].best.values) for name in ("Soft", "Local")]
        assert rows["Soft"].hospitals[site].gain.mean == pytest.approx((values[0] - values[1]).mean(), abs=1e-6)
        assert rows["Soft"].hospitals[site].gain.pairs == 2
    assert "over the splits 0, 7 and the seed 0;" in markdown(content)


def test_seeds_of_a_split_are_no_further_pairs_of_the_test() -> None:
    """Of two splits with five seeds that change nothing p was that of ten pairs, 0.002, where both splits gain or both
    lose, as they do in every second comparison without any true gain."""
    splits = np.repeat([0, 1], 5).tolist()
    values, none = np.repeat([0.1, 0.3], 5).tolist(), [0.0] * 10
    found = paired_gain(values, none, splits)
    assert (found.p, found.pairs, found.splits, found.wins) == (0.5, 10, 2, 10)
    assert found.mean == 0.2 and found.deviation == pytest.approx(np.std(values, ddof=1))
    assert found.model_copy(update={"interval": (0.1, 0.3)}).shown_p is None  # two splits cannot have a small one
    assert paired_gain([0.1, 0.3], [0.0, 0.0], [0, 1]) == paired_gain([0.1, 0.3], [0.0, 0.0])
    assert paired_gain(values, none, [None] * 10) == paired_gain(values, none)
    one = values[:5], none[:5]
    assert paired_gain(*one, [3] * 5) == paired_gain(*one)  # of a single split each seed counts
    of_six = paired_gain([0.1, 0.2, 0.1, float("nan")] * 6, [0.0] * 24, [split for split in range(6) for _ in range(4)])
    assert of_six.p == pytest.approx(2 / 2**6) and (of_six.pairs, of_six.splits) == (18, 6)
    assert of_six.model_copy(update={"interval": (0.1, 0.2)}).shown_p == of_six.p


@pytest.mark.slow
@pytest.mark.slow
def test_intervals_go_by_the_hospitals_own_sizes(tmp_path: Path) -> None:
    """A hospital that tests on half of its cases had the interval of the mean hospital, which was too narrow for it."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    declared = yaml.safe_load(sites["berta"].read_text())
    declared["datasets"]["blood"]["split"] = {"fractions": {"train": 0.3, "validation": 0.2, "test": 0.5}}
    sites["berta"].write_text(yaml.safe_dump(declared))
    task = {"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "blood", "hidden": [4], "score": "brier"}}
    _, content = compared(tmp_path, sites, splits=[0, 7, 8], task=task)
    for site in ("anna", "berta"):
        ratio = np.mean([split.sizes[site]["test"] / split.sizes[site]["train"] for split in content.splits])
        assert (ratio > 1) == (site == "berta")
        gain = next(row for row in content.rows if row.name == "FedAvg").hospitals[site].gain
        assert gain is not None and gain.deviation and gain.interval is not None
        reach = stdtrit(2, 0.975) * np.sqrt((1 / 3 + ratio) * gain.deviation**2)
        np.testing.assert_allclose(gain.interval, [gain.mean - reach, gain.mean + reach], atol=2e-6)


def test_calibration_bins_add_up_to_the_error(done: tuple[Path, dict[str, Path], Plan, Results]) -> None:
    content = done[3]
    for row in content.rows:
        for site, found in row.calibration.items():
            count, hits, total = np.array(found.bins).T
            tests = [split.sizes[site]["test"] for split in content.splits]
            assert count.sum() == sum(tests) and (hits <= count).all()
            accuracy = np.average(row.hospitals[site].best.values, weights=tests)
            assert hits.sum() / count.sum() == pytest.approx(accuracy, abs=1e-6)
            assert 0 <= found.ece <= 1 and (total <= count + 1e-9).all()


@pytest.mark.slow
def test_a_hospital_left_out_is_tested_with_the_others_models(
    done: tuple[Path, dict[str, Path], Plan, Results],
) -> None:
    results, sites, plan, content = done
    table = {row.name: row for row in content.unseen}
    assert list(table) == [
        "Local",
        "FedAvg",
        "FedAvg before the mean",
        "FedAvg + fine-tuning",
        "Soft",
        "Soft (personal_before_pull)",
    ]
    for name, model in (("FedAvg", "fedavg"), ("Soft", "personal")):
        for site in sites:
            for place, split in enumerate((0, 7)):
                run = next(run for run in plan.runs if (run.name, run.split, run.without) == (name, split, site))
                home = results / "runs" / run.digest / "home"
                others = sorted(set(sites) - {site})
                assert sorted(path.name for path in home.iterdir() if path.is_dir()) == others
                found = []
                for other in others:
                    deployed = load_deployed(home / other / "compared" / "models" / f"{model}-best.safetensors")
                    assert deployed.meta.recipe.hospitals == 2
                    found.append(evaluate_on(deployed, data_of(sites, site, split), "test").metrics["accuracy"])
                assert table[name].hospitals[site].values[place] == pytest.approx(np.mean(found), abs=1e-6)
    means = [[row.hospitals[site].values for site in sites] for row in content.unseen]
    assert [row.mean.values for row in content.unseen] == np.mean(means, axis=1).round(6).tolist()
    assert "## Tested at a hospital that took no part" in markdown(content)


@pytest.mark.slow
def test_hospitals_with_different_networks_are_left_out_in_turn(tmp_path: Path) -> None:
    """When all runs were done there was no table: a run without a hospital "started from other initial weights"."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta", "clara"])
    networks = ByHospital(anna=TabNet(steps=2), default=TabNet(steps=3))
    task = spec_of(Tabular(dataset="blood", architecture=networks))
    _, content = compared(tmp_path, sites, task=task, rounds=1, steps=2, unseen=True)
    (row,) = content.unseen
    assert row.name == "Local" and row.mean is not None and row.hospitals.keys() == sites.keys()


@pytest.mark.slow
def test_what_serves_an_unseen_hospital_may_be_a_model_of_its_own(tmp_path: Path) -> None:
    """FedSM's super model, chosen on the validation cases of those that took part, as the split cut them."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta", "clara"])
    plan = plan_of(tmp_path, sites, splits=[5, 6], unseen=True, methods={"SM": {"path": "medpfl.methods.fedsm.FedSM"}})
    run = next(run for run in plan.runs if (run.name, run.split, run.without) == ("SM", 6, "berta"))
    do([run], sites, tmp_path / "results")
    rows = read_run(tmp_path / "results", run, UnseenRun).rows
    assert {"SM", "SM (global)", "SM (super)"} <= rows.keys()
    served = rows["SM (super)"]
    assert isinstance(served, ServedBySuper)
    assert sum(served.served.values()) == served.cases == plan.splits[1].sizes["berta"]["test"]


@pytest.mark.parametrize(
    ("changes", "split", "words"),
    [
        ({"splits": [0, 0]}, {}, "'splits' names a seed twice"),
        ({"splits": [3]}, {}, "'splits': list should have at least 2 items"),
        (
            {"splits": [0, 1]},
            {"column": "part"},
            "dora's data are cut alike with the seeds 0 and 1; several splits need",
        ),
        ({"splits": [0, 1]}, {"folds": ["part"]}, "'folds' are other columns beside 'column', which is missing"),
    ],
)
def test_splits_that_cannot_be_get_one_sentence(
    tmp_path: Path, table_sites: dict[str, Path], changes: dict[str, Any], split: dict[str, Any], words: str
) -> None:
    if split:
        table = table_sites["dora"].with_suffix(".csv")
        lines = table.read_text().splitlines()
        parts = ["train", "validation", "test"] * len(lines)
        table.write_text("\n".join([f"{lines[0]},part", *(f"{a},{b}" for a, b in zip(lines[1:], parts, strict=False))]))
        declared = yaml.safe_load(table_sites["dora"].read_text())
        declared["datasets"]["blood"]["split"] = split
        table_sites["dora"].write_text(yaml.safe_dump(declared))
    with pytest.raises(MedPFLError) as caught:
        plan_of(tmp_path, table_sites, **changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_leaving_out_needs_enough_hospitals(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    two = {site: table_sites[site] for site in ("anna", "berta")}
    with pytest.raises(ConfigError, match="a comparison that leaves hospitals out needs at least 3 hospitals, got 2"):
        plan_of(tmp_path, two, unseen=True)
    tight = {**SOFT, "slots": {"model": {"path": "medpfl.core.mixers.SoftPull", "args": {"lam": 0.3}}}}
    assert plan_of(tmp_path, table_sites, methods={"Soft": tight}).runs  # of four hospitals 0.25 is the least
    with pytest.raises(ConfigError, match=r"'unseen': methods\.Soft\.slots\.model: SoftPull's lam must be in"):
        plan_of(tmp_path, table_sites, methods={"Soft": tight}, unseen=True)
