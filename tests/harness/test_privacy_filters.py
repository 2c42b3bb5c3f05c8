# SPDX-License-Identifier: Apache-2.0
"""FLARE's own privacy filters in a hospital's privacy.json: they act on differences, as published, and on nothing
else."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.fuel.utils import fobs
from nvflare.private.privacy_manager import Scope
from torch import nn

from exchanging import Asked, slots
from in_process import Harness, tensors_of
from medpfl.core.mixers import Mean
from medpfl.data.samples import SiteData
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.scaffold import Scaffold
from tools import NormedTabular, normed, outcome, run

pytestmark = pytest.mark.harness
Make = Callable[..., Job]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Scaled(NormedTabular):
    """Its outputs are multiplied by a number that the network holds fixed."""

    def network(self, data: SiteData) -> nn.Module:
        network = super().network(data)
        network.register_parameter("scale", nn.Parameter(torch.tensor(0.75), requires_grad=False))
        network.register_forward_hook(lambda module, given, found: found * module.scale)
        return network


def scope_of(*filters: DXOFilter) -> Scope:
    scope = Scope()
    scope.set_name("strict")
    for one in filters:
        scope.add_task_result_filter(one, "out")
    return scope


def job_of(make_job: Make) -> Job:
    method = FedAvg(lr=0.05, batch_size=8, optimizer="sgd")
    return make_job(rounds=2, method=method, mixers={"fedavg": Mean()}, task=normed(), min_clients=4)


def parts(payload: bytes) -> tuple[Arrays, Arrays]:
    """Differences, and what is apart from them."""
    dxo = from_shareable(fobs.loads(payload))
    assert dxo.data_kind == DataKind.COLLECTION
    one, other = dxo.data["differences"], dxo.data["whole"]
    assert (one.data_kind, other.data_kind) == (DataKind.WEIGHT_DIFF, DataKind.APP_DEFINED)
    return one.data, other.data


def filtered(job: Job, sites: dict[str, Path], folder: Path, *filters: DXOFilter) -> Harness:
    """A federation in which anna has the filters."""
    harness = Harness(job, sites, folder, scopes={"anna": scope_of(*filters)}).run()
    assert harness.engine.panic is None
    summary = json.loads((harness.results / "summary.json").read_text())
    assert [event for event in summary["events"] if "trained in" not in event["event"]] == []
    return harness


def of(seen: list[tuple[str, str, bytes]], site: str, task: str) -> list[bytes]:
    return [payload for who, what, payload in seen if (who, what) == (site, task)]


def test_the_filters_see_differences_and_the_server_whole_models(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Of a filter that lets everything pass, nothing is left at the server but the rounding of a difference."""
    job = job_of(make_job)
    harness = filtered(job, table_sites, tmp_path / "flare", PercentilePrivacy(percentile=0, gamma=1e9))
    for sent, answered in zip(of(harness.down, "anna", "train"), of(harness.wire, "anna", "train"), strict=True):
        (differences, whole), received = parts(answered), tensors_of(sent)
        assert {name.rpartition(".")[2] for name in whole} == {"running_mean", "running_var", "num_batches_tracked"}
        assert {*differences, *whole} == set(received) and not {*differences} & {*whole}
        assert all(array.dtype == np.float32 and np.abs(array).max() < 1 for array in differences.values())
        assert differences["fedavg::fedavg.0.weight"].any()
    plain = Harness(job_of(make_job), table_sites, tmp_path / "plain").run()
    one, other = outcome(harness.results), outcome(plain.results)
    for slot, tensors in one["slots"].items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, other["slots"][slot][key], rtol=0, atol=1e-5)
    # Who has no filter sends what was sent before there were any.
    for payload in (*of(harness.wire, "berta", "train"), *of(harness.wire, "anna", "finish")):
        assert from_shareable(fobs.loads(payload)).data_kind in (DataKind.WEIGHTS, DataKind.APP_DEFINED)


def test_percentile_privacy(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """What is smaller in magnitude than 60 % of all becomes 0, what is larger than gamma is cut off there (Shokri and
    Shmatikov, CCS 2015)."""
    gamma = 0.02
    harness = filtered(job_of(make_job), table_sites, tmp_path, PercentilePrivacy(percentile=60, gamma=gamma))
    for made, answered in zip(of(harness.made, "anna", "train"), of(harness.wire, "anna", "train"), strict=True):
        (before, kept), (after, left) = parts(made), parts(answered)
        values = np.concatenate([before[name].ravel() for name in sorted(before)])
        passed = np.concatenate([after[name].ravel() for name in sorted(before)])
        cutoff = np.percentile(np.abs(values), 60)
        expected = np.where(np.abs(values) < cutoff, 0, np.clip(values, -gamma, gamma))
        np.testing.assert_array_equal(passed, expected.astype(np.float32))
        assert np.mean(passed != 0) == pytest.approx(0.4, abs=1 / len(passed))
        assert np.abs(values).max() > gamma  # else nothing would have been cut off
        assert all(np.array_equal(kept[name], left[name]) for name in kept)


def test_svt_privacy(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """A fraction of the entries, clipped to gamma and with Laplace noise of 2 gamma / noise_var; all others are 0."""
    gamma, noise = 0.01, 1e6  # a noise of 2e-8
    one = SVTPrivacy(fraction=0.2, epsilon=1e6, noise_var=noise, gamma=gamma, tau=1e-6, replace=False)
    harness = filtered(job_of(make_job), table_sites, tmp_path, one)
    for made, answered in zip(of(harness.made, "anna", "train"), of(harness.wire, "anna", "train"), strict=True):
        (before, kept), (after, left) = parts(made), parts(answered)
        total = sum(array.size for array in before.values())
        moved = {name: after[name] != 0 for name in after}
        assert sum(int(where.sum()) for where in moved.values()) == np.ceil(0.2 * total)
        for name, where in moved.items():
            clipped = np.clip(before[name], -gamma, gamma)
            np.testing.assert_allclose(after[name][where], clipped[where], atol=40 * 2 * gamma / noise)
        assert all(np.array_equal(kept[name], left[name]) for name in kept)
        assert all((left[name] > 0).all() for name in left if name.endswith("running_var"))
    assert one.get_privacy_ledger()[0]["n_upload"] == np.ceil(0.2 * total)
    assert len(one.get_privacy_ledger()) == 2  # once a round; the trial before the first counts nothing


def test_svt_privacy_costs_what_the_page_says() -> None:
    """With its default arguments, of a network of 20,000 weights."""
    one, fl_ctx = SVTPrivacy(), FLContext()
    for spent in ("200.1", "400.2"):
        weights = {"weight": np.zeros((100, 200), dtype=np.float32)}
        one.process_dxo(DXO(DataKind.WEIGHT_DIFF, data=weights), Shareable(), fl_ctx)
        assert f"{one.get_privacy_spent():.1f}" == spent
    one.handle_event(EventType.START_RUN, fl_ctx)
    assert one.get_privacy_spent() == 0
    page = (Path(__file__).resolve().parents[2] / "docs/roles/hospital-it.md").read_text(encoding="utf-8")
    assert "a network of 20,000 weights a message costs 200.1" in page


def test_svt_privacy_as_it_comes_no_longer_destroys_a_run(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """At all hospitals, with its default arguments: Dice was 0.000 and variances were negative."""
    scopes = {site: scope_of(SVTPrivacy()) for site in table_sites}
    harness = Harness(job_of(make_job), table_sites, tmp_path, scopes=scopes).run()
    assert harness.engine.panic is None
    left = outcome(harness.results)
    start = tensors_of(of(harness.down, "anna", "train")[0])
    for name, tensor in left["slots"]["fedavg"].items():
        key = name.rpartition("::")[2]
        assert not key.endswith("running_var") or (tensor > 0).all()
        if tensor.is_floating_point() and "running" not in key:
            moved = np.abs(tensor.numpy() - start[f"fedavg::{key}"]).max()
            assert moved < 0.05  # two rounds of clipped updates and their noise


def test_what_a_network_holds_fixed_is_as_it_was(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """The filters' noise moved it at all hospitals: a fixed number 0.75 was another one after two rounds."""
    scopes = {site: scope_of(SVTPrivacy(fraction=1.0, gamma=0.1, noise_var=1.0, replace=False)) for site in table_sites}
    method = FedAvg(lr=0.05, batch_size=8)
    task = Scaled(dataset=normed().dataset, hidden=normed().hidden)
    job = make_job(rounds=2, method=method, mixers={"fedavg": Mean()}, task=task, min_clients=4)
    harness = Harness(job, table_sites, tmp_path, scopes=scopes).run()
    assert harness.engine.panic is None
    left = outcome(harness.results)["slots"]["fedavg"]
    fixed = {key: float(left[key]) for key in left if key.endswith("scale")}
    assert fixed and fixed == pytest.approx(dict.fromkeys(fixed, 0.75), abs=1e-6)  # means are rounded


def test_what_is_excluded_does_not_leave_buffers_too(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    harness = filtered(job_of(make_job), table_sites, tmp_path, ExcludeVars(r"fedavg\.(0\.weight|1\.)"))
    names = {name for payload in of(harness.wire, "anna", "train") for part in parts(payload) for name in part}
    assert names == {"fedavg::fedavg.0.bias", "fedavg::fedavg.3.weight", "fedavg::fedavg.3.bias"}
    first, second = (tensors_of(payload) for payload in of(harness.down, "berta", "train"))
    moved, _ = parts(of(harness.made, "anna", "train")[0])
    assert moved["fedavg::fedavg.0.weight"].any() and not np.array_equal(
        first["fedavg::fedavg.0.weight"], second["fedavg::fedavg.0.weight"]
    )  # the others' updates; anna's is as if nothing had changed


def test_control_variates_travel_as_differences_too(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def job() -> Job:
        method = Scaffold(lr=0.05, steps=2)
        return make_job(rounds=2, method=method, mixers=dict(method.components()))

    harness = filtered(job(), table_sites, tmp_path / "flare", PercentilePrivacy(percentile=0, gamma=1e9))
    assert any(name.startswith("control::") for name in parts(of(harness.wire, "anna", "train")[0])[0])
    other = run(job(), table_sites, tmp_path / "simulated")
    for slot, tensors in outcome(harness.results)["slots"].items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, other["slots"][slot][key], rtol=0, atol=1e-4)


def test_statistics_of_the_data_do_not_pass_them_by(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(rounds=1, method=Asked(lr=0.05), mixers=slots())
    harness = Harness(job, table_sites, tmp_path, scopes={"anna": scope_of(PercentilePrivacy())}).run()
    told = (harness.results / "summary.json").read_text()
    assert "PercentilePrivacy' acts on differences of weights, and this job asks for statistics of the data" in told
    assert not [payload for payload in of(harness.wire, "anna", "statistics") if tensors_of(payload)]
