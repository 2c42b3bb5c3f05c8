# SPDX-License-Identifier: Apache-2.0
"""Tests of what runs on a GPU. Each runs on the processor too, where it takes the same way with another device string;
its turn on a GPU is skipped where there is none."""

from collections.abc import Iterator

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device on which this test trains, and which ``training_device`` gives while it runs."""
    name: str = request.param
    if name == "cuda":
        from tools import require_gpu

        require_gpu()
    monkeypatch.setenv("MEDPFL_DEVICE", name)
    monkeypatch.setenv("MEDPFL_DETERMINISTIC", "1")
    yield name
    if name == "cuda":
        import torch

        torch.use_deterministic_algorithms(False)
