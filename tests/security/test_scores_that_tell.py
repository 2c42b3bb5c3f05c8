# SPDX-License-Identifier: Apache-2.0
"""What a server that makes models of its own learns from their scores, which leave without noise and in the clear: a
patient's label, and an encrypted model's weights. Only to take no part stops it; docs/security.md says so."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from encrypted import share_key
from hospitals import change_yaml
from medpfl.core.mixers import Mean
from medpfl.data.samples import Samples
from medpfl.methods.fedavg import FedAvg
from medpfl.privacy import ckks
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import ValidateReply
from medpfl.rounds.protocol.requests import ValidateRequest
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.tasks import Survival
from medpfl.tasks.contract import Task
from small_jobs import small_job, write_table_sites
from tools import pieces, ready

KEYS = ("fedavg.0.weight", "fedavg.0.bias", "fedavg.2.weight", "fedavg.2.bias")
SPLIT = {"train": 0.6, "validation": 0.2, "test": 0.2}


def begun(
    folder: Path, split: dict[str, float] = SPLIT, encryption: str | None = None
) -> tuple[Coordinator, SiteRunner]:
    sites = write_table_sites(folder / "sites", ["anna", "berta"], rows=400)
    change_yaml(sites["anna"], lambda content: content["datasets"]["blood"].update(split={"fractions": split}))
    if encryption:
        share_key(sites)
    job = small_job(2, {"fedavg": Mean()}, FedAvg(lr=0.1, batch_size=16), encryption=encryption)  # type: ignore[arg-type]
    coordinator, runners = pieces(job, sites, folder)
    ready(coordinator, runners)
    return coordinator, runners["anna"]


def told(coordinator: Coordinator, anna: SiteRunner, model: dict[str, Tensor]) -> list[float | None]:
    """What the hospital tells of a model that the server sends it; the server may ask as often as it likes."""
    asked = ValidateRequest(run=coordinator.run, round=1, rounds=2, best={})
    reply = anna.handle(Message(asked, {"fedavg": model})).header
    assert isinstance(reply, ValidateReply)
    return [line.metrics["accuracy"] for line in reply.metrics]


def accuracy(coordinator: Coordinator, anna: SiteRunner, model: dict[str, Tensor]) -> float:
    value = told(coordinator, anna, model)[0]
    assert value is not None
    return value


def only_for(value: float, height: float) -> dict[str, Tensor]:
    """A network that says "no", but for whoever has this value in the first column, where it adds ``height``."""
    weight, near = torch.zeros(4, 3), 1e-4
    weight[:3, 0] = 1 / near
    bias = torch.tensor([near - value, -value, -near - value, 0.0], dtype=torch.float64) / near
    found = (weight, bias.float(), height * torch.tensor([[1.0, -2.0, 1.0, 0.0]]), torch.tensor([-1.0]))
    return dict(zip(KEYS, found, strict=True))


def test_a_server_reads_one_patient_s_label_off_the_scores_of_eighty(tmp_path: Path) -> None:
    coordinator, anna = begun(tmp_path)
    split = anna.data.splits["validation"]
    cases, there = len(split.names), accuracy(coordinator, anna, only_for(9.0, 9.0))
    assert cases == 80
    for patient in range(20):
        values, label = split.inputs[:][patient], int(split.targets[:][patient])
        changed = accuracy(coordinator, anna, only_for(float(values[0]), 9.0)) - there
        assert round(changed * cases) == (1 if label else -1)  # a patient who is not in the split changes nothing


def test_of_a_hospital_without_validation_cases_nothing_is_told_before_the_test(tmp_path: Path) -> None:
    coordinator, anna = begun(tmp_path, {"train": 0.8, "test": 0.2})
    assert told(coordinator, anna, only_for(0.0, 9.0)) == []


def test_a_server_without_the_key_reads_a_weight_of_an_encrypted_model_off_scores(tmp_path: Path) -> None:
    """A ciphertext can be weighed, and numbers can be added to it, by whoever has no key. All of the model that the
    hospital decrypts is the server's, but for one weight, and its score says whether that is above a threshold."""
    tenseal = pytest.importorskip("tenseal")
    coordinator, anna = begun(tmp_path, encryption="ckks")
    sent = anna.handle(coordinator.rounds.train_messages(1, ["anna"])["anna"]).slots["fedavg"]
    secret = anna.models.state_dict()["fedavg.2.weight"][0]
    ciphertext = tenseal.ckks_vector_from(ckks._without_key(), sent["ciphertext 0"].numpy().tobytes())

    def above(threshold: float) -> bool:
        own, kept = np.zeros(ckks.VALUES), np.zeros(ckks.VALUES)
        kept[16] = 1.0  # of 12 weights and 4 biases of the first layer none, of the second layer's weights the first
        own[12], own[20] = 1.0, -threshold  # its input is 1, and the threshold is its bias
        made = bytes((ciphertext * kept.tolist() + own.tolist()).serialize())
        return (
            accuracy(coordinator, anna, {"ciphertext 0": torch.frombuffer(bytearray(made), dtype=torch.uint8)}) == yes
        )

    labels = anna.data.splits["validation"].targets[:]
    yes = float(labels.double().mean())
    assert yes != 0.5
    low, high = -2.0, 2.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) else (low, middle)
    assert low - 1e-6 <= float(secret[0]) <= high + 1e-6 and high - low < 1e-4


def test_a_lead_reads_when_training_patients_had_the_event_off_the_brier_scores_of_others() -> None:
    """Of a network that says the same of everybody; the horizons are the job's. No test patient's time is among them,
    so that the score changes only where the baseline does, which is fitted on the training part."""
    horizons = tuple(float(day) for day in range(300, 400))
    names = tuple(f"brier_{number}" for number in range(1, len(horizons) + 1))
    task: Task = Survival(dataset="d", horizons=horizons, more_metrics=names)
    times = {
        "train": [[100.0, 1], [317.5, 1], [320.5, 0], [377.5, 1], [900, 0]] * 20,
        "test": [[90.0, 1], [800, 0]] * 9,
    }
    train, test = (
        Samples(torch.zeros(len(cases), 2), torch.tensor(cases), np.arange(len(cases)), [""] * len(cases), 2)
        for cases in times.values()
    )
    task = task.after_fit(task.fit_after(torch.zeros(len(train)), train))
    scores = task.evaluate(torch.zeros(len(test)), test).metrics
    found = [
        day
        for day, name, before in zip(horizons[1:], names[1:], names, strict=False)
        if abs(scores[name] - scores[before]) > 1e-6  # single precision's last digit depends on a number's place
    ]
    assert found == [318.0, 378.0]
