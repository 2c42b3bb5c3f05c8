# SPDX-License-Identifier: Apache-2.0
"""A job of FedSM keeps so few training samples for its selector that the gradient that it asks for is one patient's."""

from pathlib import Path
from typing import Any

import pytest

from baselines import begin
from medpfl.core.errors import PolicyRefused
from medpfl.methods.contract import Method
from medpfl.methods.fedsm import FedSM, FedSMEnsemble, FedSMExtra, FedSMPersonalised
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import Slots
from medpfl.tasks.losses import CrossEntropy
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job, write_table_sites
from tools import exchange

MANY: dict[str, Any] = {"batch_size": 8, "lr": 0.01, "optimizer": "sgd"}


def started(folder: Path, method: Method, least: int | None = None, **task: Any) -> tuple[Any, dict[str, SiteRunner]]:
    sites = write_table_sites(folder / "sites", ["anna", "berta"])
    for file in sites.values() if least else ():
        file.write_text(file.read_text(encoding="utf-8") + f"policy: {{least_update: {least}}}\n", encoding="utf-8")
    mixers: Any = dict(method.components())
    job = small_job(1, mixers, method, Tabular("blood", hidden=(4,), **task), min_clients=1)
    return begin(job, sites, folder / "run")


def sent(coordinator: Any, runners: dict[str, SiteRunner]) -> Slots:
    """What anna sends in the first round; where she is asked for the selector again, what she answered last."""
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    found = copied(replies["anna"].slots)
    coordinator.rounds.take_train(1, replies)
    while messages := coordinator.rounds.refine_messages():
        replies = exchange(runners, messages)
        found |= copied(replies["anna"].slots)
        coordinator.rounds.take_refined(replies)
    return found


def copied(slots: Slots) -> Slots:
    return {slot: {key: tensor.clone() for key, tensor in state.items()} for slot, state in slots.items()}


def test_what_the_attack_gets_where_a_hospital_allows_it(tmp_path: Path) -> None:
    """The gradient of the selector's first layer is one patient's row times a number for each hidden unit."""
    coordinator, runners = started(tmp_path, FedSM(selector_samples=1, **MANY), least=1)
    gradient = sent(coordinator, runners)["selector"]
    bias, weight = (gradient[f"selector.layers.0.{kind}"] for kind in ("bias", "weight"))
    unit = int(bias.abs().argmax())
    row = weight[unit] / bias[unit]
    rows = runners["anna"].data.splits["train"].inputs[:]
    assert float((rows - row).abs().max(dim=1).values.min()) < 1e-4


@pytest.mark.parametrize("training", ["server_adam", "averaged_moments"])
@pytest.mark.parametrize("kind", [FedSM, FedSMPersonalised, FedSMExtra, FedSMEnsemble])
def test_it_does_not_leave_where_the_policy_asks_for_more(tmp_path: Path, kind: Any, training: str) -> None:
    method = kind(selector_samples=7, selector_training=training, selector_steps=2, **MANY)
    coordinator, runners = started(tmp_path, method)
    with pytest.raises(PolicyRefused, match=rf"\('least_update'\).*at least 8.*{kind.__name__}; this job takes 7"):
        sent(coordinator, runners)


def test_weights_of_classes_do_not_single_one_of_many_out(tmp_path: Path) -> None:
    loss = CrossEntropy(weights=(1e-9, 1.0))
    coordinator, runners = started(tmp_path, FedSMEnsemble(selector_samples=8, selector_steps=1, **MANY), loss=loss)
    with pytest.raises(PolicyRefused, match=r"\('least_update'\).*in this job few of them have nearly all the weight"):
        sent(coordinator, runners)
