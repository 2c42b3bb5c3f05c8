# SPDX-License-Identifier: Apache-2.0
"""What a card says of whose data its model learnt from."""

import pytest
from pydantic import JsonValue

from medpfl.deployed.card import card
from medpfl.deployed.model_file import Chosen, History, ModelMeta, Recipe
from medpfl.tasks.metrics.calibration import Calibration

ALONE, TOGETHER = "nothing that other hospitals learnt in this job is in it", "together with the other hospitals"


def shown(model: str, chosen: str | None = None, count: int = 9) -> str:
    spec: dict[str, JsonValue] = {"path": "x.Y", "args": {}}
    recipe = Recipe(method=spec, task=spec, deployed=model, classes=["a", "b"], input_shape=[2], hospitals=count)
    choice = None
    if chosen:
        choice = Chosen(
            model=chosen, best=chosen, candidates={"local": 0.5, "fedavg": 0.5}, patients=count, gain=None,
            interval=None, error=None, needed=None,
        )  # fmt: skip
    history = History(
        job="j", site="s", model=model, choice="best", round=1, cases={"train": 9, "test": count}, samples_by_class={},
        test={"accuracy": 0.5}, calibration=Calibration(ece=0.1, brier=0.1, samples=count), preparation={},
        chosen=choice,
    )  # fmt: skip
    return card(ModelMeta(recipe=recipe, history=history, parameters=1, versions={}), "m.safetensors", {})


@pytest.mark.parametrize(("model", "chosen", "words"), [
    ("local", None, ALONE),
    ("fedavg", None, TOGETHER),
    ("chosen", "local", ALONE),
    ("chosen", "fedavg", TOGETHER),
])  # fmt: skip
def test_what_a_hospital_trained_alone_is_not_said_to_be_of_all(model: str, chosen: str | None, words: str) -> None:
    text = shown(model, chosen)
    assert words in text and ({ALONE, TOGETHER} - {words}).pop() not in text


def test_a_heading_stands_by_itself_behind_a_table() -> None:
    assert "\n\n## Intended use\n" in shown("chosen", "local")


def test_one_case_and_one_hospital_are_no_several() -> None:
    """The card of a hospital with a single test case said "1 test cases" and "these 1 samples"."""
    text = shown("chosen", "local", count=1)
    assert "with 1 hospital\n" in text and "own 1 test case, read after" in text and "on 1 sample:" in text
    assert "own 1 validation patient supports the model" in text and "1 test cases" not in text
    assert "own 9 validation patients support the model" in shown("chosen", "local")
