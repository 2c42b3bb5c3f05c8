# SPDX-License-Identifier: Apache-2.0
"""Every method with encrypted models: the same as in the clear, or refused by the name of the component that must see
them."""

import dataclasses
from pathlib import Path

import pytest
import torch

from encrypted import share_key
from every_method import EVERY, Small, write_both
from medpfl.core.errors import ConfigError
from medpfl.methods.fedsm import FedSM
from tools import pieces, ready, round_of

REFUSED = {
    "CusFL": "MeanOfLatest",
    "CusFL, both taught": "MeanOfLatest",
    "FedAMP": "AttentiveMessages",
    "FedSM": "ServerAdam",
    "FedSMEnsemble": "ServerAdam",
    "FedSMExtra": "ServerAdam",
    "FedSMPersonalised": "ServerAdam",
    "IFCA": "ClusterMean",
    "KTpFL": "KnowledgeTransfer",
    "PFedMe": "RelaxedMean",
    "PFedNet": "NetworkProx",
    "PFedNet, alternating": "NetworkProx",
    "Scaffold": "ControlVariates",
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return share_key(write_both(tmp_path_factory.mktemp("sites"))[False])


def trained(small: Small, sites: dict[str, Path], folder: Path, encryption: str | None) -> dict[str, torch.Tensor]:
    """All hospitals' tensors after two rounds and the last mixing."""
    job = small.job(optimizer="sgd")  # Adam makes steps of the noise in a gradient that is zero
    settings = dataclasses.replace(job.settings, encryption=encryption)
    coordinator, runners = pieces(dataclasses.replace(job, settings=settings), sites, folder)
    ready(coordinator, runners)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    for site, asked in coordinator.end.validate_messages(coordinator.joined).items():
        runners[site].handle(asked)
    coordinator.close()
    return {f"{site}: {k}": t for site, runner in runners.items() for k, t in runner.models.state_dict().items()}


@pytest.mark.parametrize("name", [name for name in EVERY if name in REFUSED or not EVERY[name].images])
@pytest.mark.slow
def test_equals_the_clear_or_is_refused(sites: dict[str, Path], tmp_path: Path, name: str) -> None:
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"{REFUSED[name]} needs the hospitals' tensors as they are"):
            trained(EVERY[name], sites, tmp_path, "ckks")
        return
    plain, encrypted = (trained(EVERY[name], sites, tmp_path / f"{kind}", kind) for kind in (None, "ckks"))
    assert plain.keys() == encrypted.keys()
    for entry, tensor in plain.items():
        torch.testing.assert_close(encrypted[entry], tensor, rtol=1e-5, atol=2e-6, msg=entry)


def test_moments_that_encryption_cannot_tell_from_zero_are_refused(sites: dict[str, Path], tmp_path: Path) -> None:
    """Adam's step divides by the root of such a number, which would be of either sign. FedSM without them encrypts."""
    averaged = Small(FedSM, {"selector_training": "averaged_moments"})
    with pytest.raises(ConfigError, match=r"multiples of 2\^-28, and FedSM sends the squares of gradients"):
        trained(averaged, sites, tmp_path, "ckks")
    local = Small(FedSM, {"selector_training": "local_steps", "selector_steps": 1})
    plain, encrypted = (trained(local, sites, tmp_path / f"{kind}", kind) for kind in (None, "ckks"))
    for entry, tensor in plain.items():
        torch.testing.assert_close(encrypted[entry], tensor, rtol=1e-5, atol=2e-6, msg=entry)


def test_what_is_refused_is_one_of_all() -> None:
    assert set(REFUSED) < set(EVERY)
