# SPDX-License-Identifier: Apache-2.0
"""State files that a disk, a copy or a full file system changed: found, not read, and the one before is used."""

import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exchanging import Asked, slots
from medpfl import store
from medpfl.core.codecs import CER, STC, Chain
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Identity, SoftPull
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.rounds.server import checkpoint
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.server.history import Kept
from medpfl.rounds.server.shelf import Shelf
from medpfl.rounds.simulate import simulate
from small_jobs import small_job, write_table_sites
from tools import assert_same, outcome, run

Make = Callable[..., Job]


def flip(path: Path, at: float) -> None:
    """Change one byte, ``at`` of the way from the file's begin (0) to its end (1)."""
    content = bytearray(path.read_bytes())
    content[min(int(at * len(content)), len(content) - 1)] ^= 0x40
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a tensor's byte": lambda path: flip(path, 1),
    "a byte of the header": lambda path: flip(path, 0.1),
    "truncated": cut,
    "empty": lambda path: path.write_bytes(b""),
}


def newest(folder: Path, kind: str) -> Path:
    files = [found for found in folder.rglob(f"{kind}-*.safetensors") if found.parents[1].name == "state"]
    return max(files, key=lambda file: file.name)


def told(coordinator: Coordinator, site: str) -> list[str]:
    return [event.event for event in coordinator.record.events if event.site == site]


@pytest.fixture(scope="module")
def state_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "x-00001.safetensors"
    tensors = {"a": torch.linspace(0, 1, 12).view(3, 4), "count": torch.tensor(3), "half": torch.ones(2).half()}
    store.save(path, tensors, {"finished": False, "roster": ["anna", "dörte"], "best": {"m": None}})
    return path


@pytest.mark.slow
@given(st.data())
def test_a_changed_byte_is_found_wherever_it_is(state_file: Path, data: st.DataObject) -> None:
    content = bytearray(state_file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    changed = state_file.with_name("changed.safetensors")
    changed.write_bytes(content)
    with pytest.raises(store.DamagedFile):
        store.read(changed)


def test_every_shorter_file_is_found(state_file: Path) -> None:
    content = state_file.read_bytes()
    cut_short = state_file.with_name("short.safetensors")
    for length in range(0, len(content), 7):
        cut_short.write_bytes(content[:length])
        with pytest.raises(store.DamagedFile, match="is damaged"):
            store.read(cut_short)


def test_a_full_disk_is_told_without_the_place(tmp_path: Path) -> None:
    """A limit on the size of files stands for it here."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(MedPFLError) as caught:
            store.save(tmp_path / "x.safetensors", {"a": torch.ones(1000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.public == "a file could not be written: File too large"
    assert str(tmp_path) in str(caught.value) and not list(tmp_path.iterdir())
    with pytest.raises(MedPFLError) as caught:
        store.save(Path("/dev/null/x.safetensors"), {"a": torch.ones(1)}, {})
    assert caught.value.public == "a file could not be written: File exists"


def test_files_of_earlier_versions_are_refused_with_a_sentence(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "old.safetensors", metadata={"medpfl": '{"format": 1}'})
    with pytest.raises(MedPFLError, match="expected format 2, got 1: made by another version of MedPFL"):
        store.read(tmp_path / "old.safetensors")


def test_what_a_killed_process_was_writing_does_not_stay(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Whole models at the server, and private parts at the hospitals."""
    home = tmp_path / "home"
    simulate(make_job(), table_sites, tmp_path / "results", home, stop_after=1)
    (server,), (anna,) = home.glob("server/small/state/*"), home.glob("anna/small/state/*")
    codec = server / "codec" / "anna"
    codec.mkdir(parents=True)
    begun = [server / ".server-00002.safetensors.4711", anna / ".mixed-00001.safetensors.4712"]
    begun.append(codec / ".sent-00002.safetensors.4713")
    for path in begun:
        path.write_bytes(b"half of it")
    simulate(make_job(), table_sites, tmp_path / "results", home)
    assert not [path for path in begun if path.exists()]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_newest_intact_file_is_taken(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    for number in (1, 2, 3):
        store.save(store.path_of(tmp_path, "x", number), {"a": torch.full((30,), float(number))}, {})
    damage(store.path_of(tmp_path, "x", 3))
    kept, damaged = store.newest(tmp_path, "x")
    assert kept and kept.number == 2 and torch.equal(kept.tensors["a"], torch.full((30,), 2.0)) and damaged == [3]
    kept, damaged = store.newest(tmp_path, "x", last=1)
    assert kept and kept.number == 1 and not damaged


def killed_within_round(job: Job, last: int, sites: dict[str, Path], folder: Path) -> None:
    """The hospitals have trained round ``last``; the server has not saved it."""
    simulate(job, sites, folder / "a", folder / "home", stop_after=last - 1)
    shutil.copytree(folder / "home" / "server", folder / "older")
    simulate(job, sites, folder / "a2", folder / "home", stop_after=last)
    shutil.rmtree(folder / "home" / "server")
    shutil.copytree(folder / "older", folder / "home" / "server")


@dataclass(frozen=True)
class Stopped:
    """A run of four rounds: what it leaves, and folders of the same run killed before its end."""

    whole: dict[str, Any]
    after_three: Path
    within_four: Path
    sites: dict[str, Path]

    def resume(self, home: Path, folder: Path) -> Coordinator:
        return simulate(two_models(), self.sites, folder / "b", home)


def two_models() -> Job:
    return small_job(rounds=4, mixers={"local": Identity(), "model": SoftPull(lam=0.5)}, method=Asked(batch_size=8))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    folder = tmp_path_factory.mktemp("stopped")
    sites = write_table_sites(folder / "sites", ["anna", "berta"])
    whole = run(two_models(), sites, folder / "whole")
    simulate(two_models(), sites, folder / "a", folder / "home", stop_after=3)
    shutil.copytree(folder / "home", folder / "after-three")
    simulate(two_models(), sites, folder / "a2", folder / "home", stop_after=4)
    shutil.rmtree(folder / "home" / "server")
    shutil.copytree(folder / "after-three" / "server", folder / "home" / "server")
    return Stopped(whole, folder / "after-three", folder / "home", sites)


def copy(home: Path, folder: Path) -> Path:
    shutil.copytree(home, folder / "home")
    return folder / "home"


@pytest.mark.parametrize("damage", [cut, DAMAGES["a tensor's byte"]], ids=["truncated", "flipped"])
@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    stopped: Stopped, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Killed within the fourth round, so that the hospitals are two rounds ahead of the checkpoint that is left."""
    home = copy(stopped.within_four, tmp_path)
    damage(newest(home / "server", "server"))
    coordinator = stopped.resume(home, tmp_path)
    assert told(coordinator, "server") == [
        "the checkpoint after round 3 is damaged and not used",
        "resumed after round 2 of an unfinished run",
    ]
    assert told(coordinator, "anna") == ["resumed from the state after round 2"]
    assert_same(stopped.whole, outcome(tmp_path / "b"))


def test_a_checkpoint_with_other_entries_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """As a version that listed a tensor under each of its names has left it."""
    tensors = {"first.weight": torch.ones(2), "second.weight": torch.ones(2)}
    about = checkpoint.About(done=1, finished=False, roster=["anna"], best={}, scores={}, history=Kept(), saved=0.0)
    checkpoint.save(tmp_path, {"model": {checkpoint.SHARED: tensors}}, {}, about)
    assert checkpoint.load(tmp_path, {"model": tensors}, ["anna"], Shelf(1, tmp_path))[0] is not None
    with pytest.raises(MedPFLError, match=r"of another version of MedPFL \(the entry 'second\.weight' of slot 'model'"):
        checkpoint.load(tmp_path, {"model": ["first.weight"]}, ["anna"], Shelf(1, tmp_path))


@pytest.mark.slow
def test_so_it_is_with_codecs(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    codecs = Codecs(STC(0.2), Chain(CER(0.1), STC(0.1)))

    def job() -> Job:
        return replace(make_job(rounds=5, mixers=slots(), method=Asked(lr=0.05, batch_size=8)), codecs=codecs)

    whole = run(job(), table_sites, tmp_path / "whole")
    killed_within_round(job(), 4, table_sites, tmp_path)
    cut(newest(tmp_path / "home" / "server", "server"))
    coordinator = simulate(job(), table_sites, tmp_path / "b", tmp_path / "home")
    assert told(coordinator, "anna") == ["resumed from the state after round 2"]
    assert_same(whole, outcome(tmp_path / "b"))


@pytest.mark.parametrize(("kind", "says"), [("sent", "the server's copy of what"), ("held", "anna: what is kept here")])
@pytest.mark.slow
def test_a_damaged_copy_of_a_codec_costs_a_round_and_says_so(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: str, says: str
) -> None:
    job = replace(make_job(rounds=4), codecs=Codecs(STC(0.2), CER(0.1)))
    simulate(job, table_sites, tmp_path / "a", tmp_path / "home", stop_after=2)
    owner = tmp_path / "home" / ("server" if kind == "sent" else "anna")
    cut(max(path for path in owner.rglob(f"codec/**/{kind}-*") if kind == "held" or "anna" in str(path)))
    coordinator = simulate(job, table_sites, tmp_path / "b", tmp_path / "home")
    assert [text for text in told(coordinator, "anna") if says in text and "is damaged" in text]
    assert {line["site"] for line in outcome(tmp_path / "b")["test"]} == set(table_sites)


@pytest.mark.slow
def test_where_both_checkpoints_are_damaged_the_run_starts_anew(stopped: Stopped, tmp_path: Path) -> None:
    home = copy(stopped.after_three, tmp_path)
    for path in (home / "server").rglob("server-*.safetensors"):
        flip(path, 0.9)
    coordinator = stopped.resume(home, tmp_path)
    assert told(coordinator, "server") == [
        "the checkpoint after round 3 is damaged and not used",
        "the checkpoint after round 2 is damaged and not used",
        "the run starts anew",
    ]
    assert_same(stopped.whole, outcome(tmp_path / "b"))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, DAMAGES["a tensor's byte"]], ids=["truncated", "flipped"])
def test_a_hospitals_damaged_state_falls_back_and_says_so(
    stopped: Stopped, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    home = copy(stopped.after_three, tmp_path)
    damage(newest(home / "anna", "private"))
    coordinator = stopped.resume(home, tmp_path)
    assert told(coordinator, "anna") == [
        "the state kept here after round 3 is damaged and not used",
        "resumed from the state after round 2",
    ]
    assert told(coordinator, "berta") == ["resumed from the state after round 3"]
    assert {line["site"] for line in outcome(tmp_path / "b")["test"]} == {"anna", "berta"}


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, Path.unlink], ids=["truncated", "lost"])
def test_without_the_mark_of_the_run_the_private_part_goes_on(
    stopped: Stopped, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """One small file of a hospital's says of which run its others are; these say it, too."""
    home = copy(stopped.after_three, tmp_path)
    (mark,) = (home / "anna").rglob("begun-*.safetensors")
    damage(mark)
    coordinator = stopped.resume(home, tmp_path)
    assert told(coordinator, "anna") == ["resumed from the state after round 3"]
    assert_same(stopped.whole, outcome(tmp_path / "b"))


@pytest.mark.slow
def test_damage_to_a_state_that_is_not_needed_changes_nothing(stopped: Stopped, tmp_path: Path) -> None:
    home = copy(stopped.within_four, tmp_path)
    cut(newest(home / "anna", "private"))  # of round 4, which the server does not know of
    coordinator = stopped.resume(home, tmp_path)
    assert told(coordinator, "anna") == ["resumed from the state after round 3"]
    assert_same(stopped.whole, outcome(tmp_path / "b"))


def test_a_damaged_model_is_not_tested_and_the_others_are(stopped: Stopped, tmp_path: Path) -> None:
    home = copy(stopped.within_four, tmp_path)
    best = {found["round"] for found in stopped.whole["best"].values()}
    assert best & {1, 2}
    for number in best & {1, 2}:  # those of round 3 are made again
        flip(next((home / "anna").rglob(f"private-0000{number + 1}.safetensors")), 1)
    coordinator = stopped.resume(home, tmp_path)
    notes = [text for text in told(coordinator, "anna") if text.endswith("this hospital kept of it is damaged")]
    assert len(notes) == sum(found["round"] in (1, 2) for found in stopped.whole["best"].values())
    assert {line["site"] for line in outcome(tmp_path / "b")["test"]} == {"anna", "berta"}


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    """The SHA-256 of a slot's file stands in summary.json, and two runs that are equal leave equal files."""
    written = set()
    for _ in range(12):
        store.save(tmp_path / "same.safetensors", {"a": torch.ones(3)}, {"round": 1, "site": "anna"})
        written.add((tmp_path / "same.safetensors").read_bytes())
    assert len(written) == 1
