# SPDX-License-Identifier: Apache-2.0
"""What a hospital announces of its method and of itself before anything is trained."""

import platform
from collections.abc import Sequence

import torch

import medpfl
from medpfl.data.samples import SiteData
from medpfl.methods.contract import Method
from medpfl.results.schema import Rebuild
from medpfl.rounds.protocol.bounded import Component, as_json
from medpfl.rounds.protocol.replies import Plan


def fine_tuned_name(model: str) -> str:
    """What a common model that was fine-tuned at a hospital is called."""
    return f"{model}_finetuned"


def plan_of(method: Method, methods: Sequence[Method], rounds: int) -> Plan:
    """What will be told and asked for.

    Args:
        method: the job's; it alone has exchanges within a round.
        methods: it and the references beside it.
    """
    models = [name for each in methods for name in each.deploys]
    return Plan(
        models=tuple(models),
        tested=(*models, *(fine_tuned_name(each.fine_tuned) for each in methods if each.fine_tuned is not None)),
        numbers=tuple(name for each in methods for name in each.diagnoses),
        refined=tuple(method.refined),
        shown=tuple(method.shown),
        steps=tuple(method.refinements(round_number, rounds) for round_number in range(1, rounds + 1)),
        anew=tuple(method.anew),
    )


def rebuild_of(method: Component, task: Component, data: SiteData) -> Rebuild:
    """What rebuilds the networks from the slots that the server keeps; nothing in it was fitted on the data."""
    known = data.preparation
    shared, meaning = (known.shared(), known.meaning()) if known else ({}, [])
    shape = list(data.input_shape)
    return Rebuild(
        method=as_json(method), task=as_json(task), input_shape=shape, preparation=as_json(shared), meaning=meaning
    )


def versions() -> dict[str, str]:
    """Package to version."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "medpfl": medpfl.__version__}
