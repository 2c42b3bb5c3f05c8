# SPDX-License-Identifier: Apache-2.0
"""What each method says of differential privacy (``Method.cover``) is so, and stands in the table of docs/privacy.md.

The proof at record level: with gradients clipped to almost nothing, what a hospital sends must not depend on its data
at all. Whatever reached it by another way than clipped gradients would show.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from every_method import EVERY, PICTURES, Small, write_both
from medpfl.core.errors import ConfigError
from medpfl.methods.contract import Method
from medpfl.methods.fedbn import FedBN
from medpfl.models.resnet import ResNet
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.contract import UNKNOWN, Cover, Privacy
from medpfl.privacy.noise import FIXED
from medpfl.rounds.messages import Slots
from medpfl.tasks.contract import Task
from medpfl.tasks.tabular import Tabular
from tools import exchange, normed, pieces, ready

PAGE = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"
KINDS: dict[str, Privacy] = {
    "record": DPSGD(noise_multiplier=1.0, max_grad_norm=1e-9),
    "update": ClippedNoise(clip=1e-9, noise_multiplier=1.0),
}
TABLE_TASK = Tabular(dataset="blood", hidden=(4,))
IMAGE_TASK = replace(PICTURES, architecture=ResNet(width=2, depth=10, pool=False, norm="group"))
METHODS = sorted({small.kind for small in EVERY.values()}, key=lambda kind: kind.__name__)
UPDATES = [name for name, small in EVERY.items() if small.kind.cover.update is None and small.kind.__name__ != "Local"]
ALIKE = ("DSFL", "FedDF", "KTpFL", "LGFedAvg", "FineTuned", "Local")  # train as another one does, or send nothing
COVERED = [name for name, small in EVERY.items() if small.kind.cover.record is None and name not in ALIKE]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FIXED, "0")


SAYS = {"task", "round", "step", "seconds", "metrics"}
"""Of the header: what repeats the question, how long it took, and the scores, which have no noise and are said to."""


def sent_by_anna(
    small: Small, sites: dict[bool, dict[str, Path]], folder: Path, other_data: bool, **how: Any
) -> tuple[Slots, list[dict[str, Any]]]:
    """What she sends in the second round, and in its further exchanges: tensors, and headers but for ``SAYS``."""
    args = {**small.args, **({"split": "1"} if "split" in small.args else {})}
    task: Task = IMAGE_TASK if small.images else normed() if small.kind is FedBN else TABLE_TASK
    job = replace(replace(small, args=args).job(optimizer="sgd", steps=2, **how), task=task)
    coordinator, runners = pieces(job, sites[small.images], folder)
    ready(coordinator, runners)
    if other_data:
        samples = runners["anna"].data.splits["train"]
        assert isinstance(samples.inputs, torch.Tensor) and isinstance(samples.targets, torch.Tensor)
        samples.inputs.mul_(-3).add_(0.5)
        samples.targets.copy_(samples.targets.flip(0))
    found: Slots = {}
    said: list[dict[str, Any]] = []
    for number in (1, 2):
        replies = exchange(runners, coordinator.rounds.train_messages(number, coordinator.joined))
        found = copied(replies["anna"].slots)  # the server mixes in the place of what it was sent
        said = [replies["anna"].header.model_dump(mode="json", exclude=SAYS)]
        coordinator.rounds.take_train(number, replies)
        while messages := coordinator.rounds.refine_messages():
            replies = exchange(runners, messages)
            found = {**found, **copied(replies["anna"].slots)}
            said.append(replies["anna"].header.model_dump(mode="json", exclude=SAYS))
            coordinator.rounds.take_refined(replies)
    return found, said


def copied(slots: Slots) -> Slots:
    return {slot: {key: tensor.clone() for key, tensor in state.items()} for slot, state in slots.items()}


def farthest(one: Slots, other: Slots) -> float:
    distances = [float((t - other[s][key]).abs().max()) for s, state in one.items() for key, t in state.items()]
    return max(distances, default=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERED)
def test_what_is_sent_depends_on_the_data_by_clipped_gradients_alone(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    (one, said), (other, also) = both_ways(name, sites, tmp_path / "noised", privacy=KINDS["record"])
    assert farthest(one, other) < 1e-5 and said == also
    (one, said), (other, also) = both_ways(name, sites, tmp_path / "plain")
    assert farthest(one, other) > 1e-4 and said != also


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_what_is_sent_depends_on_the_data_by_the_clipped_update_alone(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    (one, said), (other, also) = both_ways(name, sites, tmp_path, privacy=KINDS["update"])
    assert farthest(one, other) < 1e-5 and said == also


def both_ways(
    name: str, sites: dict[bool, dict[str, Path]], folder: Path, **how: Any
) -> list[tuple[Slots, list[dict[str, Any]]]]:
    """With her data, and with others in their place."""
    return [sent_by_anna(EVERY[name], sites, folder / str(other), other, **how) for other in (False, True)]


@pytest.mark.parametrize("level", KINDS)
@pytest.mark.parametrize("name", EVERY)
def test_what_cannot_be_had_is_refused_by_a_sentence(name: str, level: str) -> None:
    cover, kind = EVERY[name].kind.cover, EVERY[name].kind.__name__
    reason = cover.record if level == "record" else cover.update
    assert reason != UNKNOWN
    if reason is None:
        assert EVERY[name].method(privacy=KINDS[level]).privacy == KINDS[level]
    else:
        with pytest.raises(ConfigError, match=f"^{kind} cannot be trained with .*{level} level.*: {reason[:20]}"):
            EVERY[name].method(privacy=KINDS[level])


def test_a_method_that_says_nothing_is_refused() -> None:
    assert Method.cover == Cover(record=UNKNOWN, update=UNKNOWN)


def row(kind: type[Method]) -> str:
    cover = kind.cover
    stays = (
        f"yes; without noise, because at home: {', '.join(f'`{n}`' for n in cover.at_home)}" if cover.at_home else "yes"
    )
    record = stays if cover.record is None else f"no: {cover.record}"
    return f"| {kind.__name__} | {record} | {'yes' if cover.update is None else f'no: {cover.update}'} |"


def test_the_table_of_the_page_is_what_the_methods_say() -> None:
    table = "\n".join(["| method | record level (`DPSGD`) | update level (`ClippedNoise`) |", "|---|---|---|",
                       *map(row, METHODS)])  # fmt: skip
    assert table in PAGE.read_text(encoding="utf-8"), table


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 15
    assert not [name for file, name in named if f"def {name}(" not in (PAGE.parents[1] / file).read_text("utf-8")]
