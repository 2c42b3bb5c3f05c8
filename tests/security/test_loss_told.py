# SPDX-License-Identifier: Apache-2.0
"""What a round's training loss, and a refusal under noise, tell of single patients."""

from pathlib import Path

import pytest
import torch
import yaml

from answers import declare
from baselines import begin
from every_method import EVERY, with_images
from hospitals import change_yaml
from medpfl.core.errors import PolicyRefused
from medpfl.core.mixers import Mean
from medpfl.methods.fedavg import FedAvg
from medpfl.privacy import DPSGD
from medpfl.rounds.protocol.replies import TrainReply
from medpfl.rounds.protocol.requests import TrainRequest
from medpfl.tasks.multi_label import MultiLabel
from small_jobs import for_few, small_job, write_table_sites
from tools import exchange


@pytest.mark.parametrize(("batch", "least", "told"), [(1, 2, False), (2, 2, True), (2, 3, False), (1, 1, True)])
def test_a_loss_is_told_of_enough_cases(tmp_path: Path, batch: int, least: int, told: bool) -> None:
    """It is the last batch's: with batches of one sample, that of one patient, who follows from the job's seed."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    for file in sites.values():
        content = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**content, "policy": {"least_scored": least}}))
    job = small_job(1, {"fedavg": Mean()}, FedAvg(lr=0.05, batch_size=batch, steps=16))
    coordinator, runners = begin(job, sites, tmp_path / "run")
    replies = exchange(runners, coordinator.rounds.train_messages(1, list(sites)))
    for reply in replies.values():
        assert isinstance(reply.header, TrainReply)
        assert (reply.header.loss["fedavg"] is not None) == told
    assert coordinator.rounds.take_train(1, replies) == ["anna", "berta"]


@pytest.mark.parametrize(("patients", "told"), [(1, False), (2, False), (40, True)])
def test_a_loss_is_told_of_enough_patients(tmp_path: Path, patients: int, told: bool) -> None:
    """Several rows of one patient passed for several patients, whose loss was told every round."""
    sites = write_table_sites(tmp_path / "sites", ["anna"])
    content = yaml.safe_load(sites["anna"].read_text())
    lines = (tmp_path / "sites" / "anna.csv").read_text().splitlines()
    parts = ["validation"] * 4 + ["test"] * 4 + ["train"] * 32
    owners = [f"p{n}" for n in range(8)] + [f"t{n % patients}" for n in range(32)]
    rows = [f"{line},{part},{owner}" for line, part, owner in zip(lines[1:], parts, owners, strict=True)]
    (tmp_path / "sites" / "anna.csv").write_text("\n".join([f"{lines[0]},part,patient", *rows]) + "\n")
    content["datasets"]["blood"]["split"] = {"column": "part", "group": "patient"}
    content["policy"] = {"least_scored": 3, "least_hospitals": 1}
    sites["anna"].write_text(yaml.safe_dump(content))
    job = small_job(1, {"fedavg": Mean()}, FedAvg(lr=0.05, batch_size=8, steps=4), min_clients=1)
    coordinator, runners = begin(job, sites, tmp_path / "run")
    reply = exchange(runners, coordinator.rounds.train_messages(1, ["anna"]))["anna"]
    assert isinstance(reply.header, TrainReply)
    assert (reply.header.loss["fedavg"] is not None) == told


@pytest.mark.parametrize(("known", "told"), [(1, False), (2, True)])
def test_a_loss_is_told_of_enough_cases_of_which_something_is_known(tmp_path: Path, known: int, told: bool) -> None:
    files = {site: declare(tmp_path / "sites", site, "several") for site in ("anna", "berta")}
    for file in files.values():
        change_yaml(file, lambda content: content.update(policy={"least_update": 1}))
    job = small_job(1, {"fedavg": Mean()}, FedAvg(lr=0.05, epochs=1, batch_size=64), task=MultiLabel(dataset="ward"))
    coordinator, runners = begin(job, files, tmp_path / "run")
    targets = runners["anna"].data.splits["train"].targets
    assert isinstance(targets, torch.Tensor)
    targets[known:], targets[:known] = float("nan"), 1
    reply = exchange(runners, coordinator.rounds.train_messages(1, ["anna"]))["anna"]
    assert isinstance(reply.header, TrainReply)
    assert (reply.header.loss["fedavg"] is not None) == told


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("sites")
    images = {name: with_images(folder / name, 60) for name in ("anna", "berta")}
    sites = {False: write_table_sites(folder, ["anna", "berta"]), True: images}
    for file in (*sites[False].values(), *images.values()):
        for_few(file)
        change_yaml(file, lambda content: content["policy"].update(least_scored=3))
    return sites


@pytest.mark.parametrize("name", EVERY)
def test_no_method_tells_the_loss_of_too_few(name: str, both: dict[bool, dict[str, Path]], tmp_path: Path) -> None:
    """Whatever it does after the batch whose loss it reports."""
    coordinator, runners = begin(EVERY[name].job(batch_size=2), both[EVERY[name].images], tmp_path)
    for reply in exchange(runners, coordinator.rounds.train_messages(1, list(runners))).values():
        assert isinstance(reply.header, TrainReply)
        assert set(reply.header.loss.values()) == {None}


def test_a_refusal_does_not_count_a_secret_lot(tmp_path: Path) -> None:
    """How many cases a round's lots held is drawn in secret, and no noise is on that number."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    method = FedAvg(lr=0.05, batch_size=8, steps=1, privacy=DPSGD(noise_multiplier=1.5, max_grad_norm=0.5))
    coordinator, runners = begin(small_job(40, {"fedavg": Mean()}, method), sites, tmp_path / "run")
    message = coordinator.rounds.train_messages(1, ["anna"])["anna"]
    assert isinstance(message.header, TrainRequest)
    for _ in range(40):  # a lot of 8 in the mean has fewer than 8 in half of the rounds
        try:
            runners["anna"].handle(message)
        except PolicyRefused as error:
            assert str(error).endswith("behind an update, FedAvg; this round's lots held fewer")
            return
    pytest.fail("no lot was small")
