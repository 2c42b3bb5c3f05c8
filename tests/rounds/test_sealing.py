# SPDX-License-Identifier: Apache-2.0
"""What a hospital encrypts, what the server does with it, and what both refuse."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encrypted import share_key
from hospitals import change_yaml
from medpfl import store
from medpfl.core.codecs import CER
from medpfl.core.errors import CodecError, ConfigError, MedPFLError, PolicyRefused, RefusedUpdate
from medpfl.core.mixers import (
    AttentiveMessages,
    CoordinateMedian,
    Mean,
    Mixer,
    NetworkProx,
    RoundInfo,
    SoftPull,
    TrimmedMean,
)
from medpfl.core.mixing import mix, restrict
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.ifca import IFCA
from medpfl.methods.pfednet import PFedNet
from medpfl.methods.softpull import SoftPull as SoftPullMethod
from medpfl.privacy import DPSGD, ClippedNoise, ckks
from medpfl.privacy.contract import Privacy
from medpfl.privacy.keys import make_key
from medpfl.privacy.noise import FIXED
from medpfl.rounds.leaves import leaves_of
from medpfl.rounds.messages import Message, Slots, table
from medpfl.rounds.protocol.replies import TrainReply
from medpfl.rounds.protocol.requests import RefineRequest, Request, TrainRequest
from medpfl.rounds.sealing import Seal, check_sealed, mix_sealed
from medpfl.rounds.server.quorum import QuorumLost
from tools import Make, pieces, ready, round_of, run

ROSTER = ["anna", "berta", "clara"]
BUFFERS = ["net.1.running_var", "net.1.num_batches_tracked"]
TRAINED = TrainReply(round=1, metrics=(), loss={}, notes=(), seconds=0.0)
TRAIN = TrainRequest(run="r", round=2, rounds=3, best={})


def state(seed: int) -> dict[str, torch.Tensor]:
    """A network's tensors, of two blocks together, with BatchNorm's and a scalar."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "net.0.weight": 0.05 * torch.randn(70, 60, generator=generator),
        "net.1.running_var": torch.rand(7, generator=generator, dtype=torch.float64),
        "net.1.num_batches_tracked": torch.tensor(seed),
        "net.2.scale": torch.randn((), generator=generator),
        "net.2.none": torch.empty(0),
    }


START: Slots = {"model": state(0)}
EXPECTED = table(START)


@pytest.fixture(scope="module")
def key() -> ckks.Key:
    return ckks.Key.new()


@pytest.fixture(scope="module")
def seal(key: ckks.Key) -> Seal:
    return Seal("anna", key, START, BUFFERS, ROSTER)


@pytest.fixture(scope="module")
def sent(seal: Seal) -> list[dict[str, torch.Tensor]]:
    """What three hospitals send."""
    return [seal.close(Message(TRAINED, {"model": state(k)})).slots["model"] for k in (1, 2, 3)]


def opened(seal: Seal, slots: Slots, header: Request = TRAIN) -> Slots:
    return seal.open(Message(header, slots)).slots


@pytest.mark.parametrize("present", [(True, True, True), (True, False, True)], ids=["all", "without berta"])
@pytest.mark.parametrize("mixer", [Mean(), SoftPull(0.6)], ids=["mean", "SoftPull"])
def test_mixed_under_encryption_as_in_the_clear(
    seal: Seal, sent: list[dict[str, torch.Tensor]], mixer: Mixer, present: tuple[bool, ...]
) -> None:
    matrix = restrict(mixer.matrix(RoundInfo(tuple(ROSTER), np.array([5.0, 10.0, 7.0]), present)), present)
    held = {"net.1.num_batches_tracked": torch.tensor(0)}  # berta was never there: she has the initial weights
    mixed = mix_sealed(matrix, [one if here else held for one, here in zip(sent, present, strict=True)])
    plain = mix(matrix, [state(k) if here else state(0) for k, here in zip((1, 2, 3), present, strict=True)])
    for row, expected in zip(mixed, plain, strict=True):
        found = opened(seal, {"model": row})["model"]
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=5e-8)
        assert torch.equal(found["net.1.num_batches_tracked"], expected["net.1.num_batches_tracked"])


def test_nothing_real_is_in_the_clear_and_no_message_twice_the_same(
    seal: Seal, sent: list[dict[str, torch.Tensor]]
) -> None:
    assert {name: t.dtype for name, t in sent[0].items()} == {
        "net.1.num_batches_tracked": torch.int64, "ciphertext 0": torch.uint8, "ciphertext 1": torch.uint8
    }  # fmt: skip
    again = seal.close(Message(TRAINED, {"model": state(1)})).slots["model"]
    assert again["ciphertext 1"].tolist() != sent[0]["ciphertext 1"].tolist()
    values = state(1)["net.0.weight"].numpy()
    for part in (values, values.astype(np.float64)):
        assert part.tobytes()[:32] not in sent[0]["ciphertext 0"].numpy().tobytes()
    check_sealed("anna", {"model": sent[0]}, EXPECTED, BUFFERS)


def test_complex_numbers_do_not_leave_in_the_clear(key: ckks.Key) -> None:
    """They are no floating-point numbers to torch, and passed for whole numbers, which are not encrypted."""
    with pytest.raises(CodecError, match="'model::filter' holds complex numbers, which cannot be encrypted"):
        Seal("anna", key, {"model": {"filter": torch.ones(3, dtype=torch.complex64)}}, [], ROSTER)


def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda one: one.pop(name)


def instead(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda one: one.update({name: value})


SPOILED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "one is missing": (without("ciphertext 1"), "'model::ciphertext 1' is missing"),
    "one too many": (instead("ciphertext 2", torch.zeros(9, dtype=torch.uint8)), "ciphertext 2' was not asked for"),
    "one without end": (instead("ciphertext 1", torch.zeros(10**6, dtype=torch.uint8)), "no row of at most"),
    "one of a shape": (instead("ciphertext 1", torch.zeros(9, 9, dtype=torch.uint8)), "no row of at most"),
    "of numbers": (instead("ciphertext 1", torch.zeros(9)), "no row of at most"),
    "zeros": (instead("ciphertext 1", torch.zeros(999, dtype=torch.uint8)), "ciphertext 1': a ciphertext is malformed"),
    "empty": (instead("ciphertext 1", torch.empty(0, dtype=torch.uint8)), "a ciphertext is malformed"),
    "in the clear": (instead("net.0.weight", torch.zeros(70, 60)), "net.0.weight' is not encrypted"),
    "no counter": (without("net.1.num_batches_tracked"), "num_batches_tracked' is missing"),
    "another counter": (instead("net.9.odd", torch.tensor(1)), "net.9.odd' was not asked for"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_the_server_refuses(sent: list[dict[str, torch.Tensor]], case: str) -> None:
    change, words = SPOILED[case]
    spoiled = dict(sent[0])
    change(spoiled)
    with pytest.raises(RefusedUpdate, match=rf"^berta: entry 'model::.*{words.removeprefix(chr(39) + 'model::')}"):
        check_sealed("berta", {"model": spoiled}, EXPECTED, BUFFERS)


def test_the_server_refuses_slots(sent: list[dict[str, torch.Tensor]]) -> None:
    with pytest.raises(RefusedUpdate, match="'other::ciphertext 0' was not asked for"):
        check_sealed("berta", {"model": sent[0], "other": sent[0]}, EXPECTED, BUFFERS)
    with pytest.raises(RefusedUpdate, match="'model::ciphertext 0' is missing"):
        check_sealed("berta", {}, EXPECTED, BUFFERS)


def sealed_values(key: ckks.Key, change: Callable[[dict[str, torch.Tensor]], object]) -> Slots:
    """What a server sends that has a hospital's key, or of a hospital that sends nonsense."""
    given = state(1)
    change(given)
    row = np.concatenate([t.double().reshape(-1).numpy() for t in given.values() if t.is_floating_point()])
    blocks = [torch.frombuffer(bytearray(block), dtype=torch.uint8) for block in key.encrypt(row)]
    return {"model": {f"ciphertext {number}": block for number, block in enumerate(blocks)}}


def test_a_hospital_checks_what_the_server_no_longer_can(seal: Seal, key: ckks.Key) -> None:
    fine = opened(seal, sealed_values(key, lambda one: one["net.1.running_var"].fill_(-1e-9)))["model"]
    assert (fine["net.1.running_var"] == 0).all()  # what CKKS makes of a variance of zero
    with pytest.raises(CodecError, match=r"anna: entry 'model::net.1.running_var' holds a negative variance"):
        opened(seal, sealed_values(key, lambda one: one["net.1.running_var"].fill_(-0.5)))
    with pytest.raises(CodecError, match=r"anna: slot 'model' as the server sent it: .*another key"):
        opened(seal, sealed_values(ckks.Key.new(), lambda one: None))
    with pytest.raises(CodecError, match=r"'model::net.0.weight' in the clear"):
        opened(seal, {"model": {"net.0.weight": torch.zeros(70, 60)}})
    with pytest.raises(CodecError, match="slot 'other', which its networks do not have"):
        opened(seal, {"other": sealed_values(key, lambda one: None)["model"]})
    with pytest.raises(CodecError, match="expected 2 ciphertexts for 4208 numbers, got 1"):
        opened(seal, {"model": {"ciphertext 0": sealed_values(key, lambda one: None)["model"]["ciphertext 0"]}})
    for bad in (float("nan"), 1e9):
        spoiled = {"model": {**state(1), "net.2.scale": torch.tensor(bad)}}
        with pytest.raises(CodecError, match=r"anna: entry 'model::net.2.scale' holds NaN or values beyond"):
            seal.close(Message(TRAINED, spoiled))


def test_what_is_not_sent_is_the_initial_one(seal: Seal, sent: list[dict[str, torch.Tensor]]) -> None:
    assert all(torch.equal(t, START["model"][name]) for name, t in opened(seal, {})["model"].items())
    refine = RefineRequest(run="r", round=2, rounds=3, best={}, step=1)
    shown = opened(seal, {"model": sent[0], "model@berta": sent[1]}, refine)
    assert set(shown) == {"model", "model@anna", "model@berta", "model@clara"}
    torch.testing.assert_close(shown["model@berta"]["net.0.weight"], state(2)["net.0.weight"], rtol=0, atol=1e-8)
    assert torch.equal(shown["model@clara"]["net.0.weight"], START["model"]["net.0.weight"])
    assert set(opened(seal, {"model@*": sent[0]}, refine)) == {"model@*"}


MIXERS: dict[str, tuple[Mixer, Any]] = {
    "NetworkProx": (NetworkProx(tau=0.1, neighbours=1), PFedNet()),
    "AttentiveMessages": (AttentiveMessages(alpha=0.1, sigma=1.0), None),
    "CoordinateMedian": (CoordinateMedian(), None),
    "TrimmedMean": (TrimmedMean(), None),
}


@pytest.mark.parametrize("name", MIXERS)
def test_components_that_must_see_tensors_are_refused_by_name(make_job: Make, name: str) -> None:
    mixer, method = MIXERS[name]
    slot = "personal" if method else "model"
    mixers = {slot: mixer, **({"shared": Mean()} if method else {})}
    with pytest.raises(ConfigError, match=rf"component '{slot}': {name} needs the hospitals' tensors as they are"):
        make_job(mixers=mixers, method=method, encryption="ckks")
    make_job(mixers=mixers, method=method)


def test_what_else_does_not_go_with_encryption(make_job: Make) -> None:
    with pytest.raises(ConfigError, match="clip_updates needs the lengths"):
        make_job(encryption="ckks", clip_updates=2.0)
    with pytest.raises(ConfigError, match="codecs work on tensors as they are"):
        dataclasses.replace(make_job(encryption="ckks"), codecs=Codecs(None, CER(0.1)))
    with pytest.raises(ConfigError, match="ClusterMean needs"):
        make_job(encryption="ckks", method=IFCA(), mixers=dict(IFCA().components()))
    with pytest.raises(ConfigError, match="'encryption' of Settings must be 'ckks' or null, got 'rot13'"):
        make_job(encryption="rot13")


def test_a_hospital_with_another_key_or_none_takes_no_part(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    share_key(table_sites)
    other, _ = make_key(tmp_path / "other")
    change_yaml(table_sites["berta"], lambda content: content.update(keys=str(other)))
    job = make_job(encryption="ckks")
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    assert coordinator.joined == ["anna", "clara", "dora"]
    (event,) = [one.event for one in coordinator.record.events if one.site == "berta"]
    assert event.startswith("takes no part: berta has another encryption key (fingerprint ")
    change_yaml(table_sites["clara"], lambda content: content.pop("keys"))
    messages = pieces(job, table_sites, tmp_path / "again")[0].init_messages()
    with pytest.raises(MedPFLError, match="'keys' names no file") as error:
        pieces(job, table_sites, tmp_path / "again")[1]["clara"].handle(messages["clara"])
    assert "names no key" in error.value.public and str(tmp_path) not in error.value.public


def test_a_policy_that_asks_for_encryption(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    change_yaml(table_sites["anna"], lambda content: content.update(policy={"encrypted": True}))
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    with pytest.raises(PolicyRefused, match="'encrypted'"):
        runners["anna"].handle(coordinator.init_messages()["anna"])


def test_of_initial_weights_the_server_sees_only_whether_they_are_equal(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, key: ckks.Key
) -> None:
    """They may be a checkpoint that the hospitals alone have, of an earlier encrypted job, say."""
    coordinator, runners = pieces(make_job(encryption="ckks"), share_key(table_sites), tmp_path)
    answers = {site: runners[site].handle(asked) for site, asked in coordinator.init_messages().items()}
    for runner in runners.values():
        assert any(tensor.count_nonzero() for tensor in runner.networks.gather()["model"].values())
    tensors = [t for answer in answers.values() for state in answer.slots.values() for t in state.values()]
    assert len(tensors) > 8 and not any(t.count_nonzero() for t in tensors if t.is_floating_point())
    marks = {answer.header.common["initial weights"] for answer in answers.values()}
    assert len(marks) == 1 and len(marks.pop()) == 64
    other = {"model": {**START["model"], "net.2.scale": torch.tensor(7.0)}}
    made = [Seal("anna", one, start, BUFFERS, ROSTER).mark()["initial weights"]
            for one in (key, ckks.Key.new()) for start in (START, other)]  # fmt: skip
    assert len(set(made)) == 4
    answers["clara"].header.common["initial weights"] = made[0]
    coordinator.take_init(answers)
    assert coordinator.joined == [site for site in table_sites if site != "clara"]
    assert any("clara has initial weights of SHA-256" in event.event for event in coordinator.record.events)


@pytest.mark.parametrize(
    "privacy", [DPSGD(noise_multiplier=2.0), ClippedNoise(clip=0.5, noise_multiplier=1.0)], ids=lambda one: one.level
)
@pytest.mark.slow
def test_noise_is_added_before_encryption(
    privacy: Privacy, make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once decrypted it is the same noised update, up to CKKS' rounding, at the same epsilon."""
    monkeypatch.setenv(FIXED, "3")
    method = SoftPullMethod(lr=0.1, steps=2, batch_size=12, optimizer="sgd", privacy=privacy)
    job = make_job(2, {"model": Mean()}, method, encryption="ckks")
    sites, made = share_key(table_sites), []
    for name in ("sealed", "before"):
        coordinator, runners = pieces(job, sites, tmp_path / name)
        ready(coordinator, runners)
        anna, asked = runners["anna"], coordinator.rounds.train_messages(1, coordinator.joined)["anna"]
        assert anna._seal is not None
        made.append(anna.handle(asked) if name == "sealed" else anna._answer(anna._seal.open(asked)))
    sealed, before = made
    (weighted,) = mix_sealed(np.ones((1, 1)), [sealed.slots["model"]])
    found = opened(anna._seal, {"model": weighted}, asked.header)["model"]
    start = anna._seal.open(asked).slots["model"]
    for key, tensor in before.slots["model"].items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=2e-6, msg=key)
    assert any((found[key] - start[key]).abs().max() > 0.02 for key in start)
    assert isinstance(sealed.header, TrainReply) and isinstance(before.header, TrainReply)
    assert sealed.header.privacy is not None and sealed.header.privacy == before.header.privacy


def test_the_list_of_what_leaves_says_it(make_job: Make) -> None:
    told = {
        one.when: one.meaning for one in leaves_of(make_job(encryption="ckks")) if one.what == "tensors of slot 'model'"
    }
    assert "encrypted: only hospitals can read it" in told["train"] and "encrypted" not in told["init"]
    assert not any("encrypted" in one.meaning for one in leaves_of(make_job()) if one.what.startswith("tensors"))


def last_models(folder: Path, sites: dict[str, Path]) -> dict[str, torch.Tensor]:
    return {
        f"{site} {name}": tensor
        for site in sites
        for name, tensor in store.read(folder / "home" / site / "small" / "models" / "personal-last.safetensors")[
            0
        ].items()
    }


@pytest.mark.slow
def test_a_whole_job_with_an_absent_hospital_and_a_restart(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The models are those of the job in the clear; the server's files hold none, in the clear or encrypted."""
    share_key(table_sites)
    found = {}
    for kind, encryption in (("plain", None), ("encrypted", "ckks")):
        job = make_job(encryption=encryption, mixers={"fedavg": Mean(), "model": SoftPull(lam=0.5)})
        coordinator, runners = pieces(job, table_sites, tmp_path / kind)
        ready(coordinator, runners)
        round_of(coordinator, runners, 1, ["anna", "clara"])  # berta and dora miss the first round
        coordinator.close()
        for runner in runners.values():
            runner.close()
        coordinator, runners = pieces(job, table_sites, tmp_path / kind)  # all processes are new
        ready(coordinator, runners)
        assert coordinator.done == 1
        round_of(coordinator, runners, 2)
        round_of(coordinator, runners, 3, ["anna", "berta", "clara"])
        asked = coordinator.end.validate_messages(list(table_sites))
        seals = {site: runner._seal for site, runner in runners.items()}
        found[kind] = {
            site: seal.open(asked[site]).slots if seal else asked[site].slots for site, seal in seals.items()
        }
        if encryption:
            tensors = store.read(sorted((tmp_path / kind / "s" / "state").rglob("server-*"))[-1])[0]
            assert tensors and not any(t.is_floating_point() for t in tensors.values())
    for site, slots in found["plain"].items():
        for slot, entries in slots.items():
            for name, tensor in entries.items():
                torch.testing.assert_close(found["encrypted"][site][slot][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_simulate_leaves_no_model_at_the_server(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    share_key(table_sites)
    left = run(make_job(rounds=2, encryption="ckks"), table_sites, tmp_path)
    assert not left["slots"] and left["test"]
    assert not list((tmp_path / "results").rglob("*.safetensors"))
    assert last_models(tmp_path, table_sites)


def test_a_hospital_that_sends_nonsense_is_refused_and_the_others_go_on(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Where it can be seen; nonsense of the right form stops the job instead of becoming anybody's model."""
    share_key(table_sites)
    job: Job = make_job(encryption="ckks", mixers={"model": SoftPull(lam=0.5)}, min_clients=2)
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    replies = {
        site: runners[site].handle(asked)
        for site, asked in coordinator.rounds.train_messages(1, list(table_sites)).items()
    }
    replies["berta"].slots["model"]["ciphertext 0"] = torch.zeros(5, dtype=torch.uint8)
    assert coordinator.rounds.take_train(1, replies) == ["anna", "clara", "dora"]
    assert any(
        "berta: entry 'model::ciphertext 0': a ciphertext is malformed" in one.event
        for one in coordinator.record.events
    )
    asked = coordinator.rounds.train_messages(2, list(table_sites))
    other = ckks.Key.new()
    asked["anna"].slots["model"]["ciphertext 0"] = torch.frombuffer(
        bytearray(other.encrypt(np.ones(5))[0]), dtype=torch.uint8
    )
    with pytest.raises(CodecError, match="another key"):
        runners["anna"].handle(asked["anna"])
    runners["berta"].handle(asked["berta"])
    with pytest.raises(QuorumLost):
        coordinator.rounds.take_train(2, {})
