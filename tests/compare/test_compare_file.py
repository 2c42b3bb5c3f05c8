# SPDX-License-Identifier: Apache-2.0
"""Comparison files, fairness refusals and the paired test: nothing is trained here."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from medpfl.compare.collect import check_initial_weights
from medpfl.compare.entries import check_equal_work
from medpfl.compare.file import Comparison, load_comparison
from medpfl.compare.intervals import needed
from medpfl.compare.plan import make_plan
from medpfl.compare.run_results import Initial, UnseenRun
from medpfl.compare.statistics import in_words, paired_gain, smallest_p
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Identity, Mean, ServerAdam, SoftPull
from medpfl.methods.optimizers import Sgd
from small_jobs import write_table_sites

SOFT_PULL = {"path": "medpfl.methods.softpull.SoftPull"}
GOOD: dict[str, Any] = {
    "name": "small",
    "task": {"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "blood", "hidden": [4]}},
    "rounds": 3,
    "seeds": [0, 1],
    "steps": 5,
    "lr": 0.05,
    "methods": {"Soft": SOFT_PULL},
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}, sort_keys=False))
    return path


def plan_of(folder: Path, **changes: Any) -> Any:
    return make_plan(load_comparison(write(folder, **changes)), write_table_sites(folder / "sites"))


@pytest.mark.parametrize("written", ["1e-05", "1E-5", "1e-5", "10e-6", "1.0e-05"])
def test_numbers_with_an_exponent_are_numbers_as_in_json(tmp_path: Path, written: str) -> None:
    text = json.dumps({**GOOD, "lr": "LR", "methods": {"Soft": {**SOFT_PULL, "args": {"lr": "LR"}}}})
    path = tmp_path / "compare.json"
    path.write_text(text.replace('"LR"', written))
    file = load_comparison(path)
    assert file.lr == file.methods["Soft"].args["lr"] == 1e-05


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"color": "red"}, "unknown key 'color'"),
        ({"acumulate": 2}, "unknown key 'acumulate'; did you mean 'accumulate'?"),
        ({"accumulate": 0}, "Training's accumulate must be at least 1, got 0"),
        ({"clip_gradient": "12"}, "argument 'clip_gradient' of Training must be a number or null, got '12'"),
        (
            {"optimizer": {"path": "medpfl.methods.optimizers.Sgd", "args": {"momentun": 0.9}}},
            "optimizer: unknown argument 'momentun' of Sgd; it has: weight_decay, momentum, nesterov; did you mean "
            "'momentum'?",
        ),
        ({"optimizer": {"path": "medpfl.tasks.tabular.Tabular"}}, "'medpfl.tasks.tabular.Tabular' is no Optimizer"),
        ({"rounds": 0}, "'rounds': input should be greater than 0, got 0"),
        ({"rounds": "3"}, "'rounds': input should be a valid integer, got '3'"),
        ({"seeds": []}, "'seeds': list should have at least 1 item"),
        ({"seeds": [0, 1, 0]}, "'seeds' names a seed twice: [0, 1, 0]"),
        ({"seeds": [-1]}, "'seeds.0': input should be greater than or equal to 0, got -1"),
        ({"epochs": 2}, "give 'steps' or 'epochs', not both"),
        ({"lr": 0.0}, "'lr': input should be greater than 0"),
        ({"optimizer": "lion"}, "argument 'optimizer' of Training must be 'adam' or 'sgd' or an Optimizer, got 'lion'"),
        ({"name": "../up"}, "'name': string should match pattern"),
        ({"target": float("nan")}, "'target': input should be a finite number"),
        ({"demo": "liver"}, "'demo' must be one of phantom, heart, skin,"),
        (
            {"methods": {"A": {**SOFT_PULL, "sweep": {"lr": [1], "model.lam": [1]}}}},
            "'methods.A.sweep': dictionary should",
        ),
        ({"methods": {"A": {**SOFT_PULL, "sweep": {"model.lam": [0.5, 0.5]}}}}, "methods.A.sweep names a value twice"),
        (
            {"tuning": {"budget": 2, "seeds": [7], "tune": {"lr": [0.1, 0.01, 0.1]}}},
            "tuning.tune.lr names a value twice: [0.1, 0.01, 0.1]",
        ),
        (
            {
                "methods": {"A": {**SOFT_PULL, "tune": {"model.lam": [0.5, 0.5]}}},
                "tuning": {"budget": 2, "seeds": [7], "tune": {}},
            },
            "methods.A.tune.model.lam names a value twice: [0.5, 0.5]",
        ),
        (
            {"tuning": {"budget": 2, "seeds": [7, 7], "tune": {"lr": [0.1, 0.01]}}},
            "'tuning.seeds' names a seed twice: [7, 7]",
        ),
        (
            {"methods": {"A": {**SOFT_PULL, "sweep": {"steps": [2, 3]}}}},
            "methods.A.sweep may not set 'steps': it is the same",
        ),
        (
            {"methods": {"A": {**SOFT_PULL, "sweep": {"lr": [1, 2]}}, "A lr 2": SOFT_PULL}},
            "a point of a sweep has the name of another method",
        ),
        ({"methods": {"Pooled": SOFT_PULL}}, "'Pooled' is taken: 'pooled: true' adds it"),
        ({"methods": {"average": SOFT_PULL}}, "'average' is what the average of a hospital's models is called"),
        ({"pooled": "yes"}, "'pooled': input should be a valid boolean, got 'yes'"),
        ({"methods": {"FedAvg": SOFT_PULL}}, "'FedAvg' is taken: it is in every comparison already"),
        ({"methods": {"Soft": {**SOFT_PULL, "args": {"steps": 9}}}}, "methods.Soft.args may not set 'steps'"),
        ({"methods": {"Soft": {**SOFT_PULL, "kwargs": {}}}}, "unknown key 'methods.Soft.kwargs'"),
        ({"methods": {"Soft": {}}}, "'methods.Soft.path' is missing"),
        ({"methods": [SOFT_PULL]}, "'methods': input should be a valid dictionary"),
    ],
)
def test_a_broken_file_gets_one_sentence(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_comparison(write(tmp_path, **changes))
    assert words in str(caught.value) and "compare.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "not valid YAML"),
        ("- 1", "expected a mapping"),
        ("rounds: 3\nrounds: 4", "the key 'rounds' is there twice"),
        ("name: 2026-02-30", "'2026-02-30' is no timestamp: day is out of range for month"),
        ("rounds: !!int ''", "'' is no int"),
        ('name: "\\U00110000"', "not valid YAML: chr.. arg not in range"),
    ],
)
def test_a_file_that_is_no_mapping_gets_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_comparison(tmp_path / "broken.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_comparison(tmp_path / "missing.yaml")


@pytest.mark.parametrize("model", ["global", "super"])
def test_a_method_with_the_name_of_another_one_s_row_is_refused(tmp_path: Path, model: str) -> None:
    """Their runs would be one row, with the scores and the pairs of both."""
    two: dict[str, Any] = {"Sum": {"path": "medpfl.methods.fedsm.FedSM"}, f"Sum ({model})": SOFT_PULL}
    with pytest.raises(ConfigError, match=rf"'Sum \({model}\)' is the row of another model of Sum"):
        plan_of(tmp_path, methods=two)
    assert plan_of(tmp_path, methods={"Soft": SOFT_PULL, "Soft (personal)": SOFT_PULL}).runs


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"path": "medpfl.methods.softpull.Pull"}, "methods.Soft: there is no class"),
        ({"path": "medpfl.core.mixers.Mean"}, "methods.Soft: 'medpfl.core.mixers.Mean' is no Method"),
        ({"path": "medpfl.methods.local.Local"}, "methods.Soft: Local is in every comparison already"),
        ({**SOFT_PULL, "args": {"mu": 1}}, "methods.Soft: unknown argument 'mu' of SoftPull"),
        (
            {**SOFT_PULL, "slots": {"head": {"path": "medpfl.core.mixers.Mean"}}},
            "there is no slot 'head'; its slots are",
        ),
        ({**SOFT_PULL, "slots": {"model": SOFT_PULL}}, "is no Mixer"),
        (
            {**SOFT_PULL, "slots": {"model": {"path": "medpfl.core.mixers.SoftPull", "args": {"lam": 0.1}}}},
            "SoftPull's lam must be in",
        ),
        (
            {"path": "medpfl.methods.fedamp.FedAMP"},
            "methods.Soft: FedAMP has no default for slot 'anchor': name AttentiveMessages with its alpha and sigma; "
            "write it in the comparison file as methods.Soft.slots.anchor: {path: ..., args: ...}",
        ),
        (
            {"path": "medpfl.methods.l2gd.L2GD", "args": {"optimizer": "sgd"}},
            "in the comparison file as methods.Soft.slots.mixed: {path: ..., args: ...}",
        ),
        (
            {
                "path": "medpfl.methods.fedamp.FedAMP",
                "slots": {"anchor": {"path": "medpfl.core.mixers.AttentiveMessages", "args": {"alpha": 9, "sigma": 1}}},
            },
            "methods.Soft.slots.anchor: AttentiveMessages' alpha must be at most sigma / (K - 1)",
        ),
        (
            {
                "path": "medpfl.methods.softpull.SoftPull",
                "slots": {
                    "model": {
                        "path": "medpfl.core.mixers.StatisticsDistance",
                        "args": {"statistics": "batch_norm_running", "from_round": 99},
                    }
                },
            },
            "methods.Soft.slots.model: StatisticsDistance's from_round is 99, and the job has",
        ),
        (
            {"path": "own_method.Parted"},
            "methods.Soft: 'components' of Parted must name a server component for its slot 'bias', such as Mean(); it "
            "names: model; write it in the comparison file as methods.Soft.slots.bias: {path: ..., args: ...}",
        ),
        ({"path": "bounded_fedavg.OtherStart"}, "unfair: Soft starts its network 'model' from other initial weights"),
    ],
)
def test_a_wrong_method_gets_one_sentence(tmp_path: Path, entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(tmp_path, methods={"Soft": entry})
    assert words in str(caught.value)


@pytest.mark.slow
def test_training_is_everybodys_but_for_what_a_method_names(tmp_path: Path) -> None:
    nesterov = {"path": "medpfl.methods.optimizers.Sgd", "args": {"momentum": 0.9, "nesterov": True}}
    given = {"optimizer": nesterov, "schedule": "cosine", "clip_gradient": 12, "accumulate": 2, "precision": "fp32"}
    methods = {"Soft": SOFT_PULL, "Reset": {**SOFT_PULL, "args": {"optimizer_state": "reset", "schedule": "constant"}}}
    found = {entry.name: entry.method for entry in plan_of(tmp_path, **given, methods=methods).entries}
    for name in ("Local", "FedAvg", "Soft"):
        method = found[name]
        assert method.optimizer == Sgd(momentum=0.9, nesterov=True) and method.schedule == "cosine"
        assert (method.clip_gradient, method.accumulate, method.precision) == (12.0, 2, "fp32")
    assert (found["Reset"].optimizer_state, found["Reset"].schedule) == ("reset", "constant")
    with pytest.raises(ConfigError, match="may not set 'accumulate': it is the same for every"):
        plan_of(tmp_path, methods={"Soft": {**SOFT_PULL, "args": {"accumulate": 2}}})


def test_slots_take_the_methods_components_else_the_mean(tmp_path: Path) -> None:
    methods = {
        "Soft": SOFT_PULL,
        "Softer": {**SOFT_PULL, "slots": {"model": {"path": "medpfl.core.mixers.SoftPull", "args": {"lam": 0.5}}}},
        "SM": {"path": "medpfl.methods.fedsm.FedSM"},
        "Bounded": {"path": "bounded_fedavg.BoundedFedAvg", "args": {"bound": 0.5}},
    }
    entries = {entry.name: entry for entry in plan_of(tmp_path, methods=methods).entries}
    assert list(entries) == ["Local", "FedAvg", *methods]
    assert entries["Local"].mixers == {"local": Identity()}
    assert entries["Soft"].mixers == {"model": SoftPull()} and entries["Softer"].mixers == {"model": SoftPull(lam=0.5)}
    assert entries["SM"].mixers == {"global": Mean(), "personal": SoftPull(), "selector": ServerAdam()}
    assert entries["Bounded"].mixers == {"model": Mean()}
    assert {entry.method.steps for entry in entries.values()} == {5}


@pytest.mark.slow
def test_what_changes_a_result_changes_the_runs_name(tmp_path: Path) -> None:
    def digests(**changes: Any) -> dict[tuple[str, int], str]:
        return {(run.name, run.seed): run.digest for run in plan_of(tmp_path, **changes).runs}

    first = digests()
    assert digests() == first and len(set(first.values())) == 6
    assert digests(name="other", target=0.9) == first  # a title and a line in a table
    for change in ({"rounds": 4}, {"lr": 0.1}, {"steps": 6}, {"task": {**GOOD["task"], "args": {"dataset": "blood"}}}):
        assert not set(digests(**change).values()) & set(first.values())
    tuned = digests(finetune=2)  # only FedAvg's runs have that phase
    assert {key[0] for key in first if tuned[key] != first[key]} == {"FedAvg"}
    table = tmp_path / "sites" / "anna.csv"
    plan = load_comparison(write(tmp_path))
    table.write_text(table.read_text().replace(table.read_text().splitlines()[1].split(",")[0], "0.5", 1))
    files = {path.stem: path for path in (tmp_path / "sites").glob("*.yaml")}
    assert not {run.digest for run in make_plan(plan, files).runs} & set(first.values())


def test_unequal_work_and_unequal_starts_are_refused(tmp_path: Path) -> None:
    entries = plan_of(tmp_path).entries
    more = dataclasses.replace(entries[2], method=dataclasses.replace(entries[2].method, steps=50))
    with pytest.raises(ConfigError, match="unfair: Soft trains with steps 50, Local with 5"):
        check_equal_work([*entries[:2], more])
    longer = [dataclasses.replace(entries[2].method, epochs=4, steps=steps) for steps in (5, None)]
    check_equal_work([*entries[:2], dataclasses.replace(entries[2], method=longer[0])])  # steps count
    first = dataclasses.replace(entries[0], method=dataclasses.replace(entries[0].method, steps=None))
    with pytest.raises(ConfigError, match="unfair: Soft trains with epochs 4, Local with 1"):
        check_equal_work([first, dataclasses.replace(entries[2], method=longer[1])])
    runs = [
        UnseenRun(
            seed=3, split=None, without="anna", method=name, initial=Initial(digest=name, same=[], own=[]), rows={}
        )
        for name in "AB"
    ]
    with pytest.raises(ConfigError, match="unfair: with seed 3, B started from other initial weights than A"):
        check_initial_weights(runs)


def test_a_comparison_needs_hospitals_with_all_splits(tmp_path: Path) -> None:
    file = Comparison.model_validate(GOOD)
    files = write_table_sites(tmp_path / "sites")
    with pytest.raises(ConfigError, match="at least 2 hospitals, got 1: anna"):
        make_plan(file, {"anna": files["anna"]})
    declared = yaml.safe_load(files["berta"].read_text())
    declared["datasets"]["blood"]["split"] = {"fractions": {"train": 0.7, "test": 0.3}}
    files["berta"].write_text(yaml.safe_dump(declared))
    with pytest.raises(ConfigError, match="berta has no validation samples"):
        make_plan(file, files)


def test_paired_gain_by_hand() -> None:
    # Differences 0.1, 0.2, 0.3: of the 8 sign patterns only +++ and --- have a mean as far from 0 as 0.2.
    found = paired_gain([0.6, 0.7, 0.8], [0.5, 0.5, 0.5])
    assert (
        found.mean == pytest.approx(0.2) and found.deviation == pytest.approx(0.1) and found.p == pytest.approx(2 / 8)
    )
    assert (found.wins, found.losses, found.pairs) == (3, 0, 3)
    # Differences 1, -1, 2: means 4/3 (+++), 0 and 2/3 (two patterns each sign); |mean| >= 2/3 in 6 of 8.
    assert paired_gain([1, 0, 2], [0, 1, 0]).p == pytest.approx(6 / 8)
    # A tie doubles the patterns without changing their means: 0, 1, 1 has p = 4 / 8.
    assert paired_gain([0.0, 1.0, 1.0], [0.0, 0.0, 0.0]).p == pytest.approx(4 / 8)
    assert paired_gain([0.5, 0.5], [0.5, 0.5]).p == 1.0
    assert paired_gain([0.5], [0.4]).p is None
    assert paired_gain([0.5, float("nan"), 0.7], [0.4, 0.1, 0.5]).pairs == 2
    with pytest.raises(ValueError, match="no pair"):
        paired_gain([float("nan")], [0.1])


def test_a_gain_of_nothing_is_nothing() -> None:
    """Differences of 0.3, -0.1 and -0.2 have a mean of -9e-18: the hospital would have done better alone, and 10^33
    times the patients would have shown it."""
    found = paired_gain([0.8, 0.4, 0.3], [0.5, 0.5, 0.5])
    assert str(found.mean) == "0.0" and (found.wins, found.losses) == (1, 2)
    told = needed(found.mean, found.deviation, (-0.3, 0.3), 9)
    assert told.times is None and told.seeds is None


@pytest.mark.parametrize("pairs", [2, 5, 8])
def test_p_equals_counting_all_sign_patterns(pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    for _ in range(5):
        scores, reference = rng.integers(0, 20, (2, pairs)) / 20  # ties and zeros, as small test sets give
        difference = np.round(scores - reference, 9)
        means = [abs(np.mean(signs * difference)) for signs in itertools.product([1, -1], repeat=pairs)]
        expected = np.mean(np.array(means) >= abs(difference.mean()) - 1e-12)
        assert paired_gain(scores.tolist(), reference.tolist()).p == pytest.approx(expected)
    assert paired_gain([1.0] * pairs, [0.0] * pairs).p == pytest.approx(smallest_p(pairs))


@pytest.mark.parametrize(
    ("gained", "of", "far"),
    [
        ([1, 1, 2, -2, 0, 1, -1, 2, 2, 3], 6, 144),  # at six test patients: 128 of 1024 patterns were found
        ([2, 2, -7, 3, 6, 0], 23, 40),
        ([-1, -1, 3, -3, 3, -1, 1, 3, 0, 1], 12, 568),
    ],
)
def test_sign_patterns_that_tie_count_whatever_the_decimals(gained: list[int], of: int, far: int) -> None:
    """In whole numbers of patients, and as shares of them, which no number of decimals holds exactly."""
    sums = [
        abs(sum(sign * one for sign, one in zip(signs, gained, strict=True)))
        for signs in itertools.product([1, -1], repeat=len(gained))
    ]
    assert sum(one >= abs(sum(gained)) for one in sums) == far
    found = paired_gain([one / of for one in gained], [0.0] * len(gained))
    assert found.p == pytest.approx(far / 2 ** len(gained))


def test_many_pairs_are_told_as_drawn_at_random() -> None:
    """Five splits with five seeds have more sign patterns than are gone through: no p is as small as 2 / 2^25."""
    assert paired_gain([1.0] * 25, [0.0] * 25).p == pytest.approx(smallest_p(25)) and smallest_p(25) > 3e-5
    assert in_words(25, "seed") == (
        "two-sided sign-flip permutation test with 65,536 sign patterns at random, paired by seed"
    )
    assert in_words(16, "seed") == "two-sided exact sign-flip permutation test, paired by seed"
