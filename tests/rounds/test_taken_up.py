# SPDX-License-Identifier: Apache-2.0
"""A hospital that is asked to get ready again, or that failed or was started again within a round."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import medpfl
from medpfl.core.codecs import STC
from medpfl.core.errors import DataError, ProtocolError
from medpfl.core.mixers import Mean, ServerAdam, SoftPull
from medpfl.data.site_file import load_site_file
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.fedsm import FedSMExtra
from medpfl.rounds.coders import Link
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.loop import Exchange, Watch, carry, training
from medpfl.rounds.messages import Message
from medpfl.rounds.server.coordinator import Coordinator, Replies
from tools import assert_same, entries, exchange, outcome, pieces, ready, round_of, same

Make = Callable[..., Job]
Declared = dict[str, Any]


@pytest.mark.slow
def test_getting_ready_again_keeps_the_private_part(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """A server that starts again asks a hospital's process for the second time; what it holds alone goes on."""
    straight, runners = pieces(make_job(), table_sites, tmp_path / "straight")
    again, others = pieces(make_job(), table_sites, tmp_path / "again")
    for coordinator, sites in ((straight, runners), (again, others)):
        ready(coordinator, sites)
        round_of(coordinator, sites, 1)
        round_of(coordinator, sites, 2)
    again.close()
    back, _ = pieces(make_job(), table_sites, tmp_path / "again")
    ready(back, others)
    assert back.done == 2
    round_of(straight, runners, 3)
    round_of(back, others, 3)
    for site, runner in runners.items():
        assert same(entries(runner, "local"), entries(others[site], "local"))
    assert "resumed from the state after round 2" in [event.event for event in back.record.events]


def stop_after_a_round(job: Job, sites: dict[str, Path], folder: Path) -> None:
    coordinator, runners = pieces(job, sites, folder)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    for piece in (coordinator, *runners.values()):
        piece.close()


def labelled_anew(lines: list[str]) -> list[str]:
    *features, label = lines[1].split(",")
    return [lines[0], ",".join([*features, "1" if label == "0" else "0"]), *lines[2:]]


def other_values(lines: list[str]) -> list[str]:
    return [lines[0], *(f"{100 * float(a)},{rest}" for a, rest in (line.split(",", 1) for line in lines[1:]))]


def one_more(lines: list[str]) -> list[str]:
    return [*lines, lines[-1]]


def one_less(lines: list[str]) -> list[str]:
    return lines[:-1]


@pytest.mark.parametrize("changed", [one_more, one_less, labelled_anew, other_values])
def test_a_run_does_not_go_on_with_other_data(
    changed: Callable[[list[str]], list[str]], make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Another row cuts all rows anew: rows that were trained on would be tested on, with scores too good to be true."""
    stop_after_a_round(make_job(), table_sites, tmp_path / "run")
    file = next(iter(load_site_file(table_sites["anna"]).datasets.values())).files[0]  # type: ignore[attr-defined]
    data = table_sites["anna"].with_name(file)
    lines = data.read_text().splitlines()
    data.write_text("\n".join(changed(lines)) + "\n")
    back, others = pieces(make_job(), table_sites, tmp_path / "run")
    ready(back, others)
    messages = back.rounds.train_messages(2, back.joined)
    for _ in range(2):
        with pytest.raises(DataError, match="anna's data are not those with which this run began: cases were added"):
            others["anna"].handle(messages["anna"])
    data.write_text("\n".join(lines) + "\n")
    for piece in (back, *others.values()):
        piece.close()
    back, others = pieces(make_job(), table_sites, tmp_path / "run")
    ready(back, others)
    round_of(back, others, 2)
    assert "resumed from the state after round 1" in [event.event for event in back.record.events]


def other_order(declared: Declared) -> None:
    declared["features"] = {"b": "number", "a": "number", "c": "number"}


def other_unit(declared: Declared) -> None:
    declared["units"] = {"a": "kg"}


def swapped(declared: Declared) -> None:
    declared["rename"] = {"b": "a", "a": "b"}


def other_classes(declared: Declared) -> None:
    declared["label"]["classes"] = {"healthy": [0], "ill": [1]}


@pytest.mark.parametrize("change", [other_order, other_unit, swapped, other_classes])
def test_a_run_does_not_go_on_with_the_same_rows_declared_otherwise(
    change: Callable[[Declared], None], make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Where all hospitals change it alike they still fit together, and the model's inputs mean something else."""
    stop_after_a_round(make_job(), table_sites, tmp_path / "run")
    for file in table_sites.values():
        said = yaml.safe_load(file.read_text())
        change(said["datasets"]["blood"])
        file.write_text(yaml.safe_dump(said, sort_keys=False))
    back, others = pieces(make_job(), table_sites, tmp_path / "run")
    ready(back, others)
    assert back.done == 1
    with pytest.raises(DataError, match="anna's data are not those with which this run began"):
        others["anna"].handle(back.rounds.train_messages(2, back.joined)["anna"])


def test_a_run_that_goes_on_with_other_versions_says_so(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its summary names the newer one only, as if it had made all rounds."""
    stop_after_a_round(make_job(), table_sites, tmp_path)
    for version, told in ((medpfl.__version__, []), ("99.0", [f"medpfl {medpfl.__version__}, and medpfl is 99.0 now"])):
        monkeypatch.setattr(medpfl, "__version__", version)
        back, others = pieces(make_job(), table_sites, tmp_path)
        ready(back, others)
        found = [event.event for event in back.record.events if "rounds before were made with" in event.event]
        assert len(found) == len(told) and all(part in text for part, text in zip(told, found, strict=True))
        for piece in (back, *others.values()):
            piece.close()


def extra(make_job: Make) -> Job:
    slots = {"global": Mean(), "personal": SoftPull(lam=0.7), "selector": ServerAdam(lr=0.02)}
    return make_job(rounds=2, mixers=slots, method=FedSMExtra(lr=0.05, batch_size=8, selector_steps=2))


@pytest.mark.parametrize("how", ["failed", "started again"])
def test_an_exchange_of_a_round_that_is_lost_is_refused(
    how: str, make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Its networks are initial ones then, of which nothing may be sent."""
    coordinator, runners = pieces(extra(make_job), table_sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    coordinator.rounds.take_train(2, exchange(runners, coordinator.rounds.train_messages(2, coordinator.joined)))
    messages = coordinator.rounds.refine_messages()
    anna = runners["anna"]
    if how == "failed":
        anna.recover()
    else:
        anna.close()
        _, others = pieces(extra(make_job), table_sites, tmp_path)
        anna = others["anna"]
        anna.handle(coordinator.init_messages()["anna"])
    words = "anna is asked for exchange 1 of round 2, of which it holds nothing now: .* the next round"
    with pytest.raises(ProtocolError, match=words):
        anna.handle(messages["anna"])
    runners["anna"] = anna
    others_only = {site: message for site, message in messages.items() if site != "anna"}
    coordinator.rounds.take_refined(exchange(runners, others_only))
    rest = coordinator.rounds.refine_messages()
    del rest["anna"]
    coordinator.rounds.take_refined(exchange(runners, rest))
    assert coordinator.done == 2


def through(
    job: Job, sites: dict[str, Path], folder: Path, away: str = ""
) -> tuple[Coordinator, dict[str, SiteRunner]]:
    """A whole job, in whose first round a hospital may be away."""
    coordinator, runners = pieces(job, sites, folder)
    links = {site: Link(job.codecs, folder / "s", folder / site, site) for site in runners} if job.codecs else {}

    def deliver(asked: Exchange) -> Replies:
        carried = {site: links[site].carry if links else hand_over for site in asked.messages}
        return {site: carried[site](message, runners[site].handle) for site, message in asked.messages.items()}

    def asked(round_number: int | None, joined: list[str]) -> list[str]:
        return [site for site in joined if site != away or round_number != 1]

    carry(training(coordinator, Watch(asked=asked)), deliver)
    for runner in runners.values():
        runner.close()
    return coordinator, runners


def hand_over(message: Message[Any], handle: Callable[[Message[Any]], Message[Any]]) -> Message[Any]:
    return handle(message)


@pytest.mark.parametrize("codecs", [None, Codecs(STC(), STC())])
def test_a_run_that_begins_anew_takes_up_nothing_of_the_one_before(
    codecs: Codecs | None, make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Both have the same key. Who was away in the first round went on with what it had trained in the one before."""
    job, sites = dataclasses.replace(make_job(rounds=2), codecs=codecs), dict(list(table_sites.items())[:3])
    once, runners = through(job, sites, tmp_path / "once", away="anna")
    through(job, sites, tmp_path / "again")
    again, others = through(job, sites, tmp_path / "again", away="anna")
    assert_same(outcome(tmp_path / "once" / "r"), outcome(tmp_path / "again" / "r"))
    assert same(entries(runners["anna"], "local"), entries(others["anna"], "local"))
    assert [event.event for event in once.record.events] == [event.event for event in again.record.events]
    assert "no state of this run is kept here; the private part starts anew in round 2" in [
        event.event for event in again.record.events if event.site == "anna"
    ]
