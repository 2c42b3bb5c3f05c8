# SPDX-License-Identifier: Apache-2.0
"""What a card says of the threshold that its metrics use."""

import pytest
from pydantic import JsonValue

from medpfl.deployed.card import card, evaluation_card
from medpfl.deployed.model_file import History, ModelMeta, Recipe
from medpfl.tasks import MultiLabel, Tabular
from medpfl.tasks.contract import Task


@pytest.mark.parametrize(("task", "metrics", "words", "others"), [
    (Tabular("d", more_metrics=("sensitivity",)), {"accuracy": 0.5, "sensitivity": 0.7},
     "Sensitivity and specificity are those of the rule \"at least 0.3000\" for the second class's probability",
     "acro F1"),
    (MultiLabel(dataset="d"), {"macro_auc": 0.8, "macro_f1": 0.5, "exact_match": 0.4},
     "Macro F1 and exact match are those of the rule \"at least 0.3000\" for each label's probability",
     "ensitivity"),
])  # fmt: skip
def test_it_is_of_the_tasks_own_metrics(task: Task, metrics: dict[str, float | None], words: str, others: str) -> None:
    spec: dict[str, JsonValue] = {"path": "x.Y", "args": {}}
    recipe = Recipe(method=spec, task=spec, deployed="m", classes=["a", "b"], input_shape=[2], hospitals=2)
    history = History(
        job="j", site="s", model="m", choice="best", round=1, cases={"train": 9, "test": 9}, samples_by_class={},
        test=metrics, calibration=None, threshold=0.3, score=task.score, preparation={},
    )  # fmt: skip
    mine = card(ModelMeta(recipe=recipe, history=history, parameters=1, versions={}), "m.safetensors", task.measures)
    given = evaluation_card(recipe, "0", "s", 9, metrics, None, task.measures, 0.3)
    for text in (mine, given):
        text = " ".join(text.split())
        assert words in text and others not in text
        assert "it is 1/2 where these cannot tell" in text
