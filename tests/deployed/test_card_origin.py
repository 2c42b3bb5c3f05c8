# SPDX-License-Identifier: Apache-2.0
"""What a card says of whose data its model learnt from."""

import pytest
from pydantic import JsonValue

from medpfl.deployed.card import card
from medpfl.deployed.model_file import Chosen, History, ModelMeta, Recipe

ALONE, TOGETHER = "nothing that other hospitals learnt in this job is in it", "together with the other hospitals"


def shown(model: str, chosen: str | None = None) -> str:
    spec: dict[str, JsonValue] = {"path": "x.Y", "args": {}}
    recipe = Recipe(method=spec, task=spec, deployed=model, classes=["a", "b"], input_shape=[2], hospitals=2)
    choice = None
    if chosen:
        choice = Chosen(
            model=chosen, best=chosen, candidates={"local": 0.5, "fedavg": 0.5}, patients=9, gain=None, interval=None,
            error=None, needed=None,
        )  # fmt: skip
    history = History(
        job="j", site="s", model=model, choice="best", round=1, cases={"train": 9, "test": 9}, samples_by_class={},
        test={"accuracy": 0.5}, calibration=None, preparation={}, chosen=choice,
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
