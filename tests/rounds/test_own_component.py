# SPDX-License-Identifier: Apache-2.0
"""A server component of one's own that gives something else than it should ends the job with a sentence that names it;
it ended with Python's words of a place in our code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mixer, RoundInfo
from medpfl.core.mixing import State
from medpfl.methods.softpull import SoftPull
from medpfl.rounds.server.copies import Copies
from medpfl.rounds.server.shelf import Shelf
from one_slot import OneSlot
from small_jobs import small_job
from tools import run

SIZES = {"anna": 3.0, "berta": 1.0, "clara": 2.0}
WANTED = "must be a 3 x 3 NumPy array of numbers, got"
WRONG = [
    (np.full((2, 3), 1 / 3), f"{WANTED} one of shape (2, 3) and type float64"),
    (np.full((2, 2), 1 / 2), f"{WANTED} one of shape (2, 2) and type float64"),
    (np.full(3, 1 / 3), f"{WANTED} one of shape (3,) and type float64"),
    (np.eye(3).astype(str), f"{WANTED} one of shape (3, 3) and type <U32"),
    ([[1 / 3] * 3] * 3, f"{WANTED} a list"),
    (torch.eye(3), f"{WANTED} a Tensor"),
]


@dataclass(frozen=True)
class Own(Mixer):
    """Gives what it is told to give."""

    gives: Any = None

    def matrix(self, info: RoundInfo) -> Any:
        return self.gives


@dataclass(frozen=True)
class OwnMix(Own):
    """Mixes by itself."""

    def mix(self, states: Sequence[State], info: RoundInfo) -> Any:
        return self.gives(states) if callable(self.gives) else ([dict(state) for state in states], self.gives)


@dataclass(frozen=True)
class Alike(Mixer):
    """Weighs hospitals by how alike their models are, as far as it knows them."""

    @property
    def remembers(self) -> Literal["answers"]:
        return "answers"

    def matrix(self, info: RoundInfo) -> Any:
        count = len(info.roster)
        if not info.known:
            return np.full((count, count), 1 / count)
        models = torch.stack([torch.cat([one.flatten() for one in model.values()]) for model in info.known])
        return (-torch.cdist(models, models)).softmax(dim=1).double().numpy()


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 2), value)}


def mixed(mixer: Mixer, present: Sequence[bool] | None = None) -> Any:
    return OneSlot(mixer, state(0), SIZES).mix([state(1), state(2), state(3)], present)


@pytest.mark.parametrize("present", [None, (True, False, True)], ids=["all", "one is absent"])
@pytest.mark.parametrize(("gives", "words"), [*WRONG, (None, f"{WANTED} None")])
def test_a_matrix_that_is_none(gives: Any, words: str, present: Sequence[bool] | None) -> None:
    with pytest.raises(ConfigError) as caught:
        mixed(Own(gives), present)
    assert str(caught.value) == f"component 'slot' (Own): its mixing matrix {words}"


@pytest.mark.parametrize(("gives", "words"), WRONG)
def test_a_matrix_that_is_none_for_encrypted_models(gives: Any, words: str) -> None:
    copies = Copies({"slot": Own(gives)}, list(SIZES), Shelf(3, Path("unused")), sealed=True)
    copies.start({"slot": state(0)})
    with pytest.raises(ConfigError, match=r"^component 'slot' \(Own\): its mixing matrix must be a 3 x 3"):
        copies.mix(["slot"], {}, RoundInfo(tuple(SIZES), np.ones(3), (True, True, True)))


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (2 * np.eye(3), "row 0 of the mixing matrix sums to 2; every row must sum to 1"),
        (np.full((3, 3), np.nan), "the mixing matrix holds values that are not finite"),
    ],
)
def test_a_matrix_that_does_not_mix(gives: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mixed(Own(gives))
    assert str(caught.value) == f"component 'slot' (Own): {words}"


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        *[(matrix, f"its mixing matrix {words}") for matrix, words in WRONG],
        (lambda states: (list(states)[:2], None), "its 'mix' must give the 3 hospitals' new states, got 2"),
        (lambda states: (None, None), "its 'mix' must give a list of the 3 hospitals' new states, got None"),
        (lambda states: list(states), "its 'mix' must give the new states and the matrix or None, got a list"),
        (
            lambda states: ([{}, *states[1:]], None),
            "its 'mix' must give every hospital the entries that it was given, tensors of the same shapes and types; "
            "anna's new state has others",
        ),
    ],
)
def test_a_mix_that_gives_something_else(gives: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mixed(OwnMix(gives))
    assert str(caught.value) == f"component 'slot' (OwnMix): {words}"


def test_what_is_right_is_taken() -> None:
    for mixer in (Own(np.eye(3)), Own(np.eye(3, dtype=np.int64)), OwnMix(np.eye(3)), OwnMix(None)):
        states, _ = mixed(mixer)
        assert [float(one["a"][0, 0]) for one in states] == [1, 2, 3]


def test_a_job_ends_with_the_sentence(table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = small_job(1, {"model": Own(np.full((1, 1), 1.0))}, SoftPull(lr=0.05, batch_size=8, steps=2))
    with pytest.raises(ConfigError, match=r"^component 'model' \(Own\): its mixing matrix must be a 4 x 4"):
        run(job, table_sites, tmp_path)


def test_one_whose_matrix_goes_by_the_models_is_refused_where_they_are_encrypted() -> None:
    """It was given none there, in silence, and mixed by another matrix than in the clear."""
    method = SoftPull(lr=0.05, batch_size=8)
    mixers: dict[str, Mixer] = {"model": Alike()}
    small_job(1, mixers, method)
    with pytest.raises(ConfigError, match="component 'model': Alike needs the hospitals' tensors as they are"):
        small_job(1, mixers, method, encryption="ckks")  # type: ignore[arg-type]
