# SPDX-License-Identifier: Apache-2.0
"""State that one process of all hospitals keeps in memory between the rounds that it writes down."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medpfl import store
from medpfl.core.errors import OutOfMemory
from medpfl.core.mixers import Mean, Mixer
from medpfl.methods.fedavg import FedAvg
from medpfl.rounds.hospital.local_rounds import LocalRounds
from medpfl.rounds.hospital.mixed import MIXED, drop_mixed, keep_mixed, load_mixed, small_mixed
from medpfl.rounds.hospital.private import PRIVATE, Basis, save_private
from medpfl.rounds.hospital.run_files import HeldFiles, Later, RunFiles
from medpfl.rounds.messages import Message, Slots
from medpfl.rounds.protocol.replies import TrainReply
from medpfl.rounds.protocol.requests import TrainRequest
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from small_jobs import small_job, write_table_sites
from tools import assert_same, outcome

ROUNDS = 6


class Killed(Exception):
    """As if the process had ended."""


def network(value: float) -> nn.ModuleDict:
    found = nn.ModuleDict({"model": nn.Linear(1, 1)})
    for parameter in found.parameters():
        nn.init.constant_(parameter, value)
    return found


def play(files: RunFiles, first: int, last: int, best: int) -> None:
    """Rounds as a hospital keeps them."""
    for number in range(first, last + 1):
        keep_mixed(files, number - 1, network(number - 1).state_dict(), {best} if number > best + 1 else ())
        small = small_mixed(files, number - 1)
        save_private(files, number, Basis("", "", ""), network(-number).state_dict(), {}, {}, small, {best})
        drop_mixed(files, number - 1)


def test_what_is_written_in_the_end_is_what_a_federation_has_on_the_disk(tmp_path: Path) -> None:
    """The best round's models, and of the newest rounds what was there when they were written."""
    play(RunFiles(tmp_path / "at once"), 2, 9, best=3)
    held = HeldFiles(tmp_path / "later")
    play(held, 2, 9, best=3)
    assert not (tmp_path / "later").exists()
    held.write()
    names = {path.name for path in (tmp_path / "at once").iterdir()}
    assert {path.name for path in (tmp_path / "later").iterdir()} == names - {
        f"private-0000{number}.safetensors" for number in (7, 8)
    }
    for number in (4, 9):
        (one, said), (other, told) = (
            store.read(store.path_of(tmp_path / where, PRIVATE, number)) for where in ("at once", "later")
        )
        assert said == told and one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_what_a_process_that_begins_anew_needs_stays_until_the_next_writing(tmp_path: Path) -> None:
    """A checkpoint of the server fits to the rounds on the disk: those are not removed while newer ones are held."""
    files = HeldFiles(tmp_path)
    play(files, 2, 5, best=3)
    files.write()
    play(files, 6, 20, best=12)
    anew = RunFiles(tmp_path)
    kept, damaged = anew.newest(PRIVATE, 5)
    assert kept is not None and kept.number == 5 and not damaged
    models = network(0.0)
    assert load_mixed(anew, 3, models) is None and models["model"].weight.item() == 3.0
    files.write()
    assert sorted(store.numbered(tmp_path, PRIVATE)) == [5, 13, 20]  # of each of the last two writings, and the best


def test_who_goes_on_from_it_does_not_change_it(tmp_path: Path) -> None:
    """Optimisers go on with the tensors that they are given."""
    files, given = HeldFiles(tmp_path), torch.ones(3)
    files.save(PRIVATE, 1, {"a": given}, {"optimizers": []})
    given.zero_()
    for _ in range(2):
        kept, _damaged = files.newest(PRIVATE, 1)
        assert kept is not None and kept.tensors["a"].tolist() == [1.0, 1.0, 1.0]
        kept.tensors["a"].zero_()


def test_what_the_server_sent_is_kept_without_a_copy(tmp_path: Path) -> None:
    """Nobody writes to it; the others are copied, for training does."""
    state, sent = network(1.0).state_dict(), {"model.weight": torch.ones(1, 1)}
    files, disk = HeldFiles(tmp_path / "later"), RunFiles(tmp_path / "at once")
    for kept in (files, disk):
        keep_mixed(kept, 1, state, (), sent)
    state["model.bias"].zero_()
    held = files.read(MIXED, 1)
    assert held["model.weight"] is sent["model.weight"] and held["model.bias"].item() == 1.0
    save_private(files, 2, Basis("", "", ""), state, {}, {}, small_mixed(files, 1), ())
    assert files.read(PRIVATE, 2)["mixed/model.weight"] is sent["model.weight"]
    files.write()
    assert disk.read(MIXED, 1).keys() == held.keys()
    assert all(torch.equal(tensor, held[key]) for key, tensor in disk.read(MIXED, 1).items())


def test_what_does_not_fit_is_written_at_once(tmp_path: Path) -> None:
    later = Later(every=1e9, room=10_000)
    later.want(2000, 2000)
    assert isinstance(later.of(tmp_path), HeldFiles) and not later.due
    later.want(1, 0)
    assert not isinstance(later.of(tmp_path), HeldFiles) and later.due


def ran(folder: Path, every: float, kill: int | None = None) -> Coordinator | None:
    """A job in ``folder``; ``kill``: it ends after this round, as a process does."""
    sites = {path.stem: path for path in (folder / "sites").glob("*.yaml")}
    sites = sites or write_table_sites(folder / "sites", ["anna", "berta"])

    def progress(coordinator: Coordinator) -> None:
        if coordinator.done == kill:
            raise Killed

    try:
        return simulate(
            small_job(rounds=ROUNDS, min_clients=1), sites, folder / "results", folder / "home", progress, every=every
        )
    except Killed:
        return None


def test_gradients_are_gone_when_a_hospital_has_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred hospitals they would be a hundred networks."""
    found: list[bool] = []
    train = LocalRounds.train

    def look(rounds: LocalRounds, header: TrainRequest, slots: Slots, own: bool) -> Message[TrainReply]:
        reply = train(rounds, header, slots, own)
        found.append(any(weight.grad is not None for weight in rounds.ready.models.parameters()))
        return reply

    monkeypatch.setattr(LocalRounds, "train", look)
    ran(tmp_path, 1e9)
    assert len(found) == 2 * ROUNDS and not any(found)


@pytest.mark.slow
def test_a_killed_run_repeats_the_rounds_that_were_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its results are those of a run that was not killed."""
    ran(tmp_path / "whole", 1e9)
    written = [False, True, False, False, False, False]  # rounds at whose end it is time

    class Sometimes(Later):
        @property
        def due(self) -> bool:
            return written.pop(0)

    with monkeypatch.context() as patched:
        patched.setattr("medpfl.rounds.simulate.Later", Sometimes)
        assert ran(tmp_path / "killed", 1e9, kill=4) is None
    again = ran(tmp_path / "killed", 1e9)
    assert again is not None
    assert "resumed after round 2 of an unfinished run" in [event.event for event in again.record.events]
    assert_same(outcome(tmp_path / "whole" / "results"), outcome(tmp_path / "killed" / "results"))


@pytest.mark.slow
def test_a_hospital_that_fails_goes_on_from_its_last_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state of that round is in memory or on the disk: the same."""
    trained = LocalRounds.train

    def train(self: LocalRounds, header: TrainRequest, slots: Slots, own: bool) -> Message[TrainReply]:
        found = trained(self, header, slots, own)
        if (self.ready.name, header.round) == ("anna", 4):
            raise OutOfMemory("memory does not suffice")
        return found

    monkeypatch.setattr(LocalRounds, "train", train)
    for name, every in (("held", 1e9), ("written", 0.0)):
        ran(tmp_path / name, every)
    assert_same(outcome(tmp_path / "held" / "results"), outcome(tmp_path / "written" / "results"))


def test_much_is_written_rarely(tmp_path: Path) -> None:
    """Before anything is known of the disk, too: 10 MB take a tenth of a second, which is to be one part in twenty."""
    later = Later(every=1.0, room=10**9)
    files = later.of(tmp_path)
    later.worked(1.0)
    assert later.due
    files.save(PRIVATE, 1, {"a": torch.zeros(2_500_000)}, {"optimizers": []})
    assert not later.due
    later.worked(1.0)
    assert later.due


@pytest.mark.slow
@pytest.mark.parametrize("mixers", [{"fedavg": Mean()}, None], ids=["one mean", "SoftPull"])
@pytest.mark.parametrize("asked", [2, None])
def test_nobody_writes_to_what_the_server_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixers: dict[str, Mixer] | None, asked: int | None
) -> None:
    """Hospitals keep these tensors themselves, and all of them one mean; also where others are asked in each round."""
    kept: list[tuple[Tensor, Tensor]] = []
    original = HeldFiles.save

    def save(self: HeldFiles, *args: Any, given: Mapping[str, Tensor] | None = None, **named: Any) -> None:
        kept.extend((tensor, tensor.clone()) for tensor in (given or {}).values())
        original(self, *args, given=given, **named)

    monkeypatch.setattr(HeldFiles, "save", save)
    job = small_job(6, mixers, FedAvg(lr=0.3, batch_size=8) if mixers else None)
    job = replace(job, settings=replace(job.settings, hospitals_per_round=asked))
    simulate(job, write_table_sites(tmp_path / "sites"), tmp_path / "results", tmp_path / "home", every=1e9)
    assert kept and all(torch.equal(now, then) for now, then in kept)


def test_what_is_private_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixing does not touch it, so the models of a round share it with the state after that round's training."""
    copied: list[int] = []
    original = HeldFiles.save

    def save(self: HeldFiles, kind: str, number: int, tensors: Mapping[str, Tensor], *args: Any, **named: Any) -> None:
        if kind == MIXED:
            copied.append(len(tensors))
        original(self, kind, number, tensors, *args, **named)

    monkeypatch.setattr(HeldFiles, "save", save)
    ran(tmp_path, 1e9)
    assert len(copied) == 2 * ROUNDS and not any(copied[:-2])  # after the last round all is on the disk
    held = outcome(tmp_path / "results")
    ran(tmp_path / "written", 0.0)
    assert_same(held, outcome(tmp_path / "written" / "results"))


@pytest.mark.parametrize("again", [False, True], ids=["the same process", "one that goes on"])
def test_best_rounds_do_not_push_out_the_state_of_the_last_checkpoint(tmp_path: Path, again: bool) -> None:
    """A process that is killed before the server's next checkpoint is there goes on from the one before."""
    files = HeldFiles(tmp_path)
    written, best = [], {6, 7, 8}
    for number in range(1, 15):
        files.save("private", number, {"a": torch.ones(1)}, {})
        files.prune("private", number, 3, {one for one in best if one <= number})
        if number in (4, 9, 14):
            files.write()
            written.append(number)
            assert all(files.has("private", one) for one in written[-2:])
            if again:
                files = HeldFiles(tmp_path)
                kept, _ = files.newest("private", number)
                assert kept is not None and kept.number == number
