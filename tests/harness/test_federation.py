# SPDX-License-Identifier: Apache-2.0
"""The FLARE shell: equality with ``simulate``, and every way in which hospitals can fail."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.shareable import Shareable
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector
from torch import nn

from exchanging import Asked, slots
from in_process import Harness, tensors_of
from ledger import Ledger
from medpfl.core.groups import BATCH_NORM, of_type
from medpfl.core.mixers import Mean, SoftPull
from medpfl.flare.allow import component_classes
from medpfl.flare.kits import write_hospitals
from medpfl.job import Job
from medpfl.methods.contract import Site
from medpfl.methods.softpull import SoftPull as SoftPullMethod
from medpfl.results.files import read_summary
from medpfl.results.tables import result_table
from medpfl.rounds.server.coordinator import Coordinator
from tools import assert_same, outcome, run

pytestmark = pytest.mark.harness
Make = Callable[..., Job]
PATIENT = 8.0
"""Seconds for an answer: more than a hospital that does answer needs on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Failing(SoftPullMethod):
    """Raises at one hospital in one round, after it has trained."""

    site: str = "berta"
    fails_in: int = 2
    kind: ClassVar[type[Exception]] = RuntimeError

    def local_round(self, site: Site) -> None:
        super().local_round(site)
        if (site.name, site.round) == (self.site, self.fails_in):
            raise self.kind("CUDA out of memory at /home/berta/secret.csv")


def events(harness: Harness) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((harness.results / "summary.json").read_text())["events"]
    return found


def test_equals_simulate_bit_for_bit(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    def job() -> Job:
        return replace(make_job(), trackers=(Ledger(title="ours"),))

    simulated = job()
    harness = Harness(job(), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(simulated, table_sites, tmp_path / "simulated"))
    assert isinstance(harness.controller.coordinator, Coordinator)
    built = harness.controller.coordinator.job.trackers
    assert built == simulated.trackers and simulated.trackers[0].ended  # type: ignore[attr-defined]


def test_statistics_and_exchanges_within_a_round_equal_simulate(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def job() -> Job:
        return make_job(mixers=slots(), method=Asked(lr=0.05, batch_size=8))

    harness = Harness(job(), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(job(), table_sites, tmp_path / "simulated"))
    names = [name for _, name, _ in harness.wire]
    assert names.count("statistics") and names.count("refine")


def test_only_the_travelling_slots_are_on_the_wire(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    harness = Harness(make_job(), table_sites, tmp_path).run()
    slots = set()
    for _, _, payload in harness.wire:
        slots |= {name.split("::")[0] for name in tensors_of(payload)}
        assert b".csv" not in payload and str(tmp_path).encode() not in payload
    assert slots == {"fedavg", "model"}
    local = Path(harness.folder, "anna", "medpfl", "small", "models", "local-last.safetensors")
    assert local.exists()  # it was trained, and it stayed
    from medpfl import store

    weights = store.read(local)[0]["local.0.weight"].numpy().tobytes()
    assert all(weights not in payload for _, _, payload in harness.wire)


def test_a_failing_hospital_misses_a_round_and_comes_back(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    harness = Harness(make_job(rounds=4, method=Failing(lr=0.05)), table_sites, tmp_path).run()
    assert harness.engine.panic is None
    told = [event for event in events(harness) if event["site"] == "berta"]
    assert told[0] == {"round": 2, "site": "berta", "event": "failed: RuntimeError (see this hospital's log)"}
    assert "resumed from the state after round 1" in str(told[1]["event"])
    assert "secret" not in (harness.results / "summary.json").read_text()
    with np.load(harness.results / "mixing.npz") as stored:
        np.testing.assert_allclose(stored["model/00002"][1], [0, 1, 0, 0])  # berta keeps her own
        np.testing.assert_allclose(stored["model/00003"].diagonal(), 0.5)


class OutOfMemory(Failing):
    """A GPU that is too small in round 2."""

    kind = torch.OutOfMemoryError


def test_out_of_memory_is_a_failed_round(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    harness = Harness(make_job(method=OutOfMemory(lr=0.05)), table_sites, tmp_path).run()
    assert harness.engine.panic is None
    told = [event for event in events(harness) if event["site"] == "berta"]
    assert told[0]["round"] == 2 and "memory of this hospital's GPU does not suffice: take a" in str(told[0]["event"])
    assert "smaller batch_size (now " in str(told[0]["event"]) and "resumed from" in str(told[1]["event"])


def test_a_silent_hospital_is_left_out_after_the_timeout(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return "silent" if (site, task, round_number) == ("clara", "train", 2) else None

    harness = Harness(make_job(train_timeout=PATIENT), table_sites, tmp_path, script).run()
    assert {"round": 2, "site": "clara", "event": "did not answer in time"} in events(harness)
    lines = [json.loads(line) for line in (harness.results / "metrics.jsonl").read_text().splitlines()]
    assert {line["site"] for line in lines if line["split"] == "train" and line["round"] == 3} == set(table_sites)


def test_grace_starts_with_the_quorum(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return "silent" if site == "dora" and task == "train" and round_number == 1 else None

    started = time.monotonic()
    job = make_job(rounds=2, grace=0.5, train_timeout=50.0)
    harness = Harness(job, table_sites, tmp_path, script).run()
    assert time.monotonic() - started < 50
    assert {"round": 1, "site": "dora", "event": "did not answer in time"} in events(harness)


def test_a_late_answer_is_dropped_and_the_hospital_goes_on(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return "late" if (site, task, round_number) == ("anna", "train", 1) else None

    harness = Harness(make_job(grace=2.0), table_sites, tmp_path, script).run()
    assert harness.late == ["anna"] and harness.engine.panic is None
    with np.load(harness.results / "mixing.npz") as stored:
        assert stored["model/00001"][0, 0] == 1.0
        np.testing.assert_allclose(stored["model/00002"].diagonal(), 0.5)


@dataclass(frozen=True, kw_only=True)
class Slow(SoftPullMethod):
    """Probes are answered at once or not at all; the rounds take a moment so that the third can be seen."""

    def local_round(self, site: Site) -> None:
        super().local_round(site)
        time.sleep(0.3)


def test_a_hospital_that_keeps_missing_is_probed_and_not_waited_for(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    asked: list[tuple[str, int]] = []

    def script(site: str, task: str, round_number: int) -> str | None:
        if site != "berta" or task not in ("train", "probe"):
            return None
        asked.append((task, round_number))
        if task == "probe":
            return None if len([t for t, _ in asked if t == "probe"]) >= 3 else "silent"
        return "silent" if round_number <= 2 else None

    job = make_job(rounds=8, train_timeout=PATIENT, patience=2, method=Slow(lr=0.05))
    harness = Harness(job, table_sites, tmp_path, script).run()
    assert harness.engine.panic is None
    trains = [r for task, r in asked if task == "train"]
    assert trains[:2] == [1, 2] and 3 not in trains  # not addressed while it only is probed
    assert max(trains) == 8  # and back after it gave a sign of life
    lines = [json.loads(line) for line in (harness.results / "metrics.jsonl").read_text().splitlines()]
    seconds = {line["round"]: line["seconds"] for line in lines if line["split"] == "round"}
    assert seconds[1] >= PATIENT > seconds[3]


def test_a_hospital_that_was_frozen_is_asked_for_its_test_in_the_end(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return "silent" if site == "berta" and (task == "probe" or (task == "train" and round_number > 1)) else None

    job = make_job(rounds=3, mixers={"model": Mean()}, grace=4.0, patience=1, min_clients=3)
    harness = Harness(job, table_sites, tmp_path, script).run()
    assert harness.engine.panic is None
    tested = {line["site"] for line in outcome(harness.results)["test"] if line["choice"] == "last"}
    assert tested == set(table_sites)
    assert {"round": 3, "site": "berta", "event": "trained in rounds 1 of 3"} in events(harness)
    others = dict.fromkeys(set(table_sites) - {"berta"}, "1-3 of 3")
    assert result_table(read_summary(harness.results)).presence == {**others, "berta": "1 of 3"}
    assert not [event for event in events(harness) if event["site"] == "anna"]


def test_a_hospital_that_is_gone_costs_the_end_no_more_than_the_grace(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return "gone" if site == "berta" and task == "train" and round_number == 2 else None

    started = time.monotonic()
    job = make_job(rounds=3, mixers={"model": Mean()}, grace=1.0, patience=1, train_timeout=500.0, min_clients=3)
    harness = Harness(job, table_sites, tmp_path, script).run(120)
    assert harness.engine.panic is None and time.monotonic() - started < 100
    assert {line["site"] for line in outcome(harness.results)["test"]} == {"anna", "clara", "dora"}


def test_a_hospital_that_was_provisioned_and_is_not_there_is_told_of(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    local = tmp_path / "server" / "local"
    local.mkdir(parents=True)
    write_hospitals(local.parent, ["emil", *table_sites])
    harness = Harness(make_job(rounds=1), table_sites, tmp_path).run()
    said = "takes no part: it is not connected, or it refused the job"
    assert events(harness) == [{"round": 0, "site": "emil", "event": said}]


def test_losing_the_quorum_ends_the_job_with_a_sentence(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return "gone" if task == "train" and round_number == 2 and site != "anna" else None

    harness = Harness(make_job(train_timeout=PATIENT), table_sites, tmp_path, script).run()
    assert harness.engine.panic is not None
    assert harness.engine.panic.startswith("round 2: 1 of 4 hospitals sent a usable update (anna); the job needs 2")
    assert "; berta did not answer in time" in harness.engine.panic
    assert json.loads((harness.results / "failure.json").read_text())["reason"] == harness.engine.panic


def test_a_lost_job_resumes_when_it_is_submitted_again(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return "gone" if task == "train" and round_number == 3 else None

    job = make_job(rounds=4, train_timeout=PATIENT)
    assert Harness(job, table_sites, tmp_path / "flare", script).run().engine.panic
    again = Harness(job, table_sites, tmp_path / "flare").run()
    assert again.engine.panic is None
    assert "resumed after round 2" in str(events(again))
    assert_same(outcome(again.results), run(job, table_sites, tmp_path / "simulated"))


def poison(shareable: Shareable) -> Shareable:
    dxo = from_shareable(shareable)
    name = next(key for key in dxo.data if key.startswith("model::"))
    dxo.data[name] = np.full_like(dxo.data[name], np.nan)
    return dxo.update_shareable(shareable)


def test_nan_on_the_wire_is_refused_by_name(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    def script(site: str, task: str, round_number: int) -> Callable[[Shareable], Shareable] | None:
        return poison if (site, task, round_number) == ("dora", "train", 2) else None

    harness = Harness(make_job(), table_sites, tmp_path, script).run()
    assert harness.engine.panic is None
    assert "update refused: dora: entry 'model::model.0.weight' holds NaN" in str(events(harness))


def saying(text: str) -> Callable[[Shareable], Shareable]:
    def change(shareable: Shareable) -> Shareable:
        dxo = from_shareable(shareable)
        dxo.meta["medpfl"] = text
        return dxo.update_shareable(shareable)

    return change


def test_malformed_answers_are_refused_and_the_job_goes_on(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    spoilt: dict[tuple[str, str, int], Callable[[Shareable], Shareable]] = {
        ("anna", "train", 1): saying("[" * 100_000),
        ("berta", "train", 2): lambda shareable: Shareable(),
        ("clara", "train", 3): saying('{"content": {"task": "validate", "metrics": [], "notes": []}}'),
        ("dora", "finish", 3): saying('{"content": {"task": "finish", "metrics": [], "notes": 5}}'),
    }
    harness = Harness(make_job(), table_sites, tmp_path, lambda *place: spoilt.get(place)).run()
    assert harness.engine.panic is None
    told: dict[tuple[object, object], str] = {}
    for event in events(harness):  # the first of a round: the end adds who trained when
        told.setdefault((event["site"], event["round"]), str(event["event"]))
    assert told["anna", 1].startswith("failed: the message is malformed")
    assert told["berta", 2].startswith("failed:")
    assert told["clara", 3] == "update refused: it was asked to 'train' and answered to 'validate'"
    assert told["dora", 3].startswith("failed: the message is malformed: 'content.finish.notes'")
    assert {line["site"] for line in outcome(harness.results)["test"]} == {"anna", "berta", "clara"}


def test_unreadable_data_at_one_hospital(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    table_sites["berta"].with_suffix(".csv").write_text("a,b,sick\n1,2,1\n")
    harness = Harness(make_job(), table_sites, tmp_path).run()
    assert harness.engine.panic is None
    assert {
        "round": 0, "site": "berta", "event": "failed: DataError (see this hospital's log)"
    } in events(harness)  # fmt: skip
    assert {line["site"] for line in outcome(harness.results)["test"]} == {"anna", "clara", "dora"}


def test_the_leads_console_does_not_show_what_a_hospitals_error_says(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FLARE's show_errors brings every error that an event tells of from the hospital, names of files and all."""
    table_sites["berta"].with_suffix(".csv").unlink()
    harness = Harness(make_job(), table_sites, tmp_path).run()
    assert f"{table_sites['berta'].with_suffix('.csv')}: no such file" in caplog.text
    assert {site: shown.get_errors() for site, shown in harness.console.items()} == dict.fromkeys(table_sites)


def test_every_hospital_failing_names_the_reason(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={"model": Mean()}, method=NeedsBatchNorm())
    harness = Harness(job, table_sites, tmp_path).run()
    assert harness.engine.panic is not None and "only 0 of 4 hospitals are ready" in harness.engine.panic
    assert "anna failed: found no BatchNorm layer" in harness.engine.panic


def test_a_job_that_gives_the_server_no_client_configuration(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """As when 'deploy_map' gives the server an app of its own."""
    harness = Harness(make_job(), table_sites, tmp_path, leave_out="config_fed_client.json").run()
    assert harness.engine.panic is not None and "config_fed_client.json: No such file" in harness.engine.panic


def test_the_servers_allow_list_counts_for_the_method_too(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    allowed = tuple(name for name in component_classes() if not name.startswith("medpfl.methods."))
    harness = Harness(make_job(), table_sites, tmp_path, allowed=allowed).run()
    assert harness.engine.panic is not None
    assert "'medpfl.methods.softpull.SoftPull' at config path '' is not in allow_list" in harness.engine.panic


@dataclass(frozen=True, kw_only=True)
class NeedsBatchNorm(SoftPullMethod):
    """Cannot even be set up on a network without BatchNorm."""

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": of_type(models, BATCH_NORM)}


def test_lam_outside_the_roster_ends_the_job(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    harness = Harness(make_job(mixers={"model": SoftPull(lam=0.1)}), table_sites, tmp_path).run()
    assert harness.engine.panic is not None and "with 4 hospitals at least 0.25, got 0.1" in harness.engine.panic


def test_progress_is_visible_to_job_monitor(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    harness = Harness(make_job(), table_sites, tmp_path).run()
    fl_ctx, collector = harness.engine.new_context(), GroupInfoCollector()
    fl_ctx.set_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR, collector)
    harness.controller.handle_event(InfoCollector.EVENT_TYPE_GET_STATS, fl_ctx)
    stats = collector.info["medpfl"]
    assert stats["round"] == stats["rounds"] == 3 and 0 < stats["best_accuracy_personal"] <= 1
