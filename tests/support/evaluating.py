# SPDX-License-Identifier: Apache-2.0
"""A deployed model on what a site file declares."""

from medpfl.data.site_file import SiteFile
from medpfl.deployed.model_file import Deployed
from medpfl.deployed.predict import evaluate_on
from medpfl.tasks.contract import Evaluation


def evaluate_at(model: Deployed, site_file: SiteFile, split: str) -> Evaluation:
    """Under the name that the model's task asks for."""
    return evaluate_on(model, model.task.load(site_file), split)
