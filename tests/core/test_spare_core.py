# SPDX-License-Identifier: Apache-2.0
"""Whether a process has a core beside those that it trains on."""

import os

import pytest
import torch

from medpfl.core.devices import spare_core


@pytest.mark.parametrize(
    ("cores", "device", "spare"), [(1, "cpu", False), (2, "cpu", True), (1, "cuda", False), (2, "cuda", True)]
)
def test_a_core_is_spare_where_training_leaves_one(
    cores: int, device: str, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert spare_core(torch.device(device)) == spare


def test_several_threads_keep_their_number_while_they_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not spare_core(torch.device("cpu"))
