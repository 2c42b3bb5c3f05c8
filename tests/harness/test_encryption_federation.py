# SPDX-License-Identifier: Apache-2.0
"""Encrypted models over FLARE: FedAP beside FedAvg, equal to the job in the clear; and what is in the messages."""

from pathlib import Path

import numpy as np
import pytest
import torch
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.private.privacy_manager import Scope

from encrypted import share_key
from in_process import Harness, tensors_of
from medpfl import store
from medpfl.core.mixers import Mean, Mixer, StatisticsDistance
from medpfl.methods.fedap import FedAP
from tools import Make, outcome

pytestmark = [pytest.mark.harness, pytest.mark.slow]
FEDAP = FedAP(lr=0.05, batch_size=8, batch_norm="shared")


def mixers() -> dict[str, Mixer]:
    return {"fedavg": Mean(), "model": StatisticsDistance(lam=0.4, statistics="head_inputs")}


def failing(site: str, task: str, round_number: int) -> object:
    """Berta trains in round 1, and her answer is lost."""
    lost = (site, task, round_number) == ("berta", "train", 1)
    return (lambda answer: make_reply(ReturnCode.EXECUTION_EXCEPTION)) if lost else None


def spoiling(site: str, task: str, round_number: int) -> object:
    """Clara's ciphertexts of round 2 are not what she made."""

    def spoil(answer: Shareable) -> Shareable:
        name = "model::ciphertext 0"
        answer["DXO"]["data"][name] = answer["DXO"]["data"][name][::-1].copy()
        return answer

    return spoil if (site, task, round_number) == ("clara", "train", 2) else failing(site, task, round_number)


def last_models(harness: Harness, sites: dict[str, Path]) -> dict[str, torch.Tensor]:
    home = {site: harness.folder / site / "medpfl" / "small" / "models" for site in sites}
    kept = {
        f"{site} {name}": home[site] / f"{name}-last.safetensors" for site in sites for name in ("fedavg", "personal")
    }
    return {f"{who} {key}": tensor for who, path in kept.items() for key, tensor in store.read(path)[0].items()}


def test_fedap_and_the_mean_as_in_the_clear(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    sites, found = share_key(table_sites), {}
    for kind, encryption in (("plain", None), ("encrypted", "ckks")):
        job = make_job(mixers=mixers(), method=FEDAP, encryption=encryption)
        harness = Harness(job, sites, tmp_path / kind, failing).run()
        assert harness.engine.panic is None
        found[kind] = last_models(harness, sites)
        with np.load(harness.results / "mixing.npz") as stored:
            assert stored["model/00001"][1].tolist() == [0, 1, 0, 0] and stored["fedavg/00001"][1, 1] == 0
    assert found["plain"].keys() == found["encrypted"].keys()
    for name, tensor in found["plain"].items():
        torch.testing.assert_close(found["encrypted"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    seen = set()
    for way in (harness.wire, harness.down):  # of the encrypted job, which ran last
        for _, task, payload in way:
            for name, array in tensors_of(payload).items():
                seen.add((task, name.partition(" ")[0], array.dtype))
    real = {(task, name) for task, name, dtype in seen if np.issubdtype(dtype, np.floating)}
    assert {task for task, _ in real} == {"init", "statistics"}  # the weights that all begin with; statistics
    assert {(name, str(dtype)) for task, name, dtype in seen if task == "train"} == {
        ("fedavg::ciphertext", "uint8"), ("model::ciphertext", "uint8"),
    }  # fmt: skip
    assert not outcome(harness.results)["slots"]


def test_spoiled_ciphertexts_are_one_refused_round(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(mixers=mixers(), method=FEDAP, encryption="ckks")
    harness = Harness(job, share_key(table_sites), tmp_path, spoiling).run()
    assert harness.engine.panic is None
    told = [event.event for event in harness.controller.coordinator.record.events if event.site == "clara"]
    assert any("update refused: clara: entry 'model::ciphertext 0': a ciphertext is malformed" in one for one in told)


def test_a_privacy_filter_that_would_be_passed_by_is_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """FLARE's filters act on floating-point differences: past ciphertexts they would let everything through."""
    scope = Scope()
    scope.set_name("strict")
    scope.add_task_result_filter(PercentilePrivacy(), "out")
    job = make_job(mixers=mixers(), method=FEDAP, encryption="ckks", rounds=1)
    harness = Harness(job, share_key(table_sites), tmp_path, scopes={"anna": scope}).run()
    assert harness.engine.panic is None
    told, *_ = [event.event for event in harness.controller.coordinator.record.events if event.site == "anna"]
    assert "PercentilePrivacy' acts on differences of weights, and this job's hospitals send ciphertexts" in told
