# SPDX-License-Identifier: Apache-2.0
"""The model that a job brings to be evaluated: what its file may say."""

import json

from medpfl.component import spec_of
from medpfl.core.errors import ConfigError
from medpfl.deployed.model_file import ModelMeta, Recipe
from medpfl.job.names import MODEL_FILE
from medpfl.methods.contract import Method
from medpfl.tasks.contract import Task


def check_no_history(meta: ModelMeta) -> None:
    """A model that goes to other hospitals must not tell of the one that made it.

    Raises:
        ConfigError: it does.
    """
    if meta.history is not None:
        raise ConfigError(
            f"the job's {MODEL_FILE} says which hospital made it, from how many cases and with which results; "
            "'medpfl evaluation-job' writes a job without that"
        )


def check_recipe(recipe: Recipe, method: Method, task: Task) -> None:
    """The model's file and the job's configuration must name the same method and task.

    Raises:
        ConfigError: naming which of them differs.
    """
    for what, own, given in (("method", method, recipe.method), ("task", task, recipe.task)):
        if json.dumps(spec_of(own), sort_keys=True) != json.dumps(given, sort_keys=True):
            raise ConfigError(
                f"the job's configuration and its {MODEL_FILE} name different {what}s: {json.dumps(spec_of(own))} and "
                f"{json.dumps(given)}"
            )
