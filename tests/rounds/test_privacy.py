# SPDX-License-Identifier: Apache-2.0
"""A hospital's noise in a job: what is counted, what is sent, what a kill leaves, and when nothing more is sent."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from medpfl.core.codecs import Chain, DAdaQuant, Half
from medpfl.core.errors import BudgetSpent, ConfigError, MedPFLError, PolicyRefused
from medpfl.core.mixers import Identity, Mean, NetworkProx
from medpfl.data.policy import Policy
from medpfl.data.samples import SiteData
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.local import Local
from medpfl.methods.pfednet import PFedNet
from medpfl.methods.softpull import SoftPull
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.ledger import FILE, Ledger, read
from medpfl.privacy.noise import FIXED
from medpfl.results.files import read_summary
from medpfl.rounds.messages import Message, Slots, flatten
from medpfl.rounds.privacy import _check_task, refuse_plan
from medpfl.rounds.protocol.requests import StatisticsRequest
from medpfl.rounds.server.end import TOLD_LAST
from medpfl.rounds.simulate import simulate
from medpfl.tasks.survival import Survival
from small_jobs import small_job, write_table_sites
from tools import assert_same, exchange, normed, pieces, ready, retell, round_of, run

DELTA = 1e-5
RECORD = DPSGD(noise_multiplier=1.5, max_grad_norm=0.5)
UPDATE = ClippedNoise(clip=0.1, noise_multiplier=6.0)
MIXERS: Any = {"fedavg": Mean()}


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FIXED, "0")


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, Path]:
    return write_table_sites(tmp_path / "sites", ["anna", "berta", "clara"])


def averaged(privacy: DPSGD | ClippedNoise, rounds: int = 2, **args: Any) -> Job:
    method = FedAvg(**{"lr": 0.1, "steps": 3, "batch_size": 6, "optimizer": "sgd", "privacy": privacy, **args})
    return small_job(rounds, MIXERS, method)


def opacus(history: list[tuple[float, float, int]]) -> float:
    from opacus.accountants import RDPAccountant  # its import takes more than a second

    accountant = RDPAccountant()
    accountant.history = history
    return float(accountant.get_epsilon(delta=DELTA))


def account(home: Path, site: str = "anna") -> tuple[int, list[tuple[float, float, int]]]:
    kept = read(home / site / "small" / FILE)
    return kept.releases, [tuple(one) for one in kept.history]


@pytest.mark.slow
def test_what_ran_is_what_is_counted_of_the_method_and_the_references(sites: dict[str, Path], tmp_path: Path) -> None:
    """SoftPull and FedAvg leave, local training stays: 2 rounds x 2 methods x 4 lots, at each hospital's own rate."""
    job = small_job(2, method=SoftPull(lr=0.1, steps=4, batch_size=6, privacy=RECORD))
    simulate(job, sites, tmp_path / "r", tmp_path / "h")
    summary = read_summary(tmp_path / "r")
    for site in sites:
        rate = 6 / summary.sizes[site]["train"]
        releases, history = account(tmp_path / "h", site)
        assert (releases, history) == (2, [(1.5, pytest.approx(rate), 16)])
        epsilon = opacus([(1.5, rate, 16)])
        assert summary.privacy[site].epsilon == pytest.approx(epsilon)  # type: ignore[union-attr]
        card = (tmp_path / "h" / site / "small" / "models" / "personal-best.md").read_text()
        assert f"epsilon {epsilon:.3f} at delta 1e-05 for each case" in card
    page = (tmp_path / "r" / "report.html").read_text()
    assert f"<td>anna</td><td>record</td><td>{summary.privacy['anna'].epsilon:.3f}</td>" in page  # type: ignore[union-attr]


def test_a_message_that_was_not_used_counts_and_its_noise_is_never_used_again(
    sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = pieces(averaged(UPDATE), sites, tmp_path)
    ready(coordinator, runners)
    messages = coordinator.rounds.train_messages(1, coordinator.joined)
    dropped = exchange(runners, messages)  # the server dies with them, or refuses them
    again = exchange(runners, messages)
    assert account(tmp_path) == (2, [(3.0, 1.0, 2)])
    assert not torch.equal(*(flatten(reply["anna"].slots)["fedavg::fedavg.0.weight"] for reply in (dropped, again)))
    coordinator.rounds.take_train(1, again)
    spent = again["anna"].header.privacy
    assert spent is not None and spent.epsilon == pytest.approx(opacus([(3.0, 1.0, 2)])) and spent.releases == 2


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [RECORD, UPDATE])
def test_a_kill_between_rounds_changes_nothing(
    privacy: DPSGD | ClippedNoise, sites: dict[str, Path], tmp_path: Path
) -> None:
    whole = run(averaged(privacy, 3), sites, tmp_path / "whole")
    simulate(averaged(privacy, 3), sites, tmp_path / "k" / "results", tmp_path / "k" / "home", stop_after=1)
    assert_same(whole, run(averaged(privacy, 3), sites, tmp_path / "k"))
    assert account(tmp_path / "k" / "home") == account(tmp_path / "whole" / "home")
    assert account(tmp_path / "k" / "home")[0] == 3


@pytest.mark.slow
def test_a_kill_within_the_training_costs_nothing(
    sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was sent: the round that is redone is the same to the bit, and counts once."""
    coordinator, runners = pieces(averaged(RECORD), sites, tmp_path)
    ready(coordinator, runners)
    messages = coordinator.rounds.train_messages(1, ["anna"])

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "release", killed)
        with pytest.raises(KeyboardInterrupt):
            exchange(runners, messages)
    runners["anna"].close()
    other, again = pieces(averaged(RECORD), sites, tmp_path)
    again["anna"].handle(other.init_messages()["anna"])
    sent = exchange(again, messages)["anna"].slots
    assert account(tmp_path)[0] == 1
    fresh, untouched = pieces(averaged(RECORD), sites, tmp_path / "fresh")
    ready(fresh, untouched)
    assert same(sent, exchange(untouched, fresh.rounds.train_messages(1, ["anna"]))["anna"].slots)


def same(one: Slots, other: Slots) -> bool:
    return all(torch.equal(tensor, flatten(other)[name]) for name, tensor in flatten(one).items())


def test_an_update_is_shortened_over_all_slots_together_before_the_noise(
    sites: dict[str, Path], tmp_path: Path
) -> None:
    """With hardly any noise the difference is the clipped one; with noise it differs from it by noise of z C."""

    def change(noise: float, clip: float, **args: Any) -> tuple[torch.Tensor, int]:
        how = ClippedNoise(clip=clip, noise_multiplier=noise)
        mixers = {"fedavg": Mean(), "model": Mean()}
        job = small_job(1, mixers, SoftPull(lr=0.5, steps=3, batch_size=6, optimizer="sgd", privacy=how))
        coordinator, runners = pieces(job, sites, tmp_path / f"{noise} {clip}")
        ready(coordinator, runners)
        message = coordinator.rounds.train_messages(1, ["anna"])["anna"]
        before, after = flatten(message.slots), flatten(runners["anna"].handle(message).slots)
        assert {name.split("::")[0] for name in after} == {"fedavg", "model"}
        return torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)]), len(after)

    whole, _ = change(1e-9, 1e3)
    clipped, _ = change(1e-7, 0.01)
    assert whole.norm() > 0.1 and clipped.norm() == pytest.approx(0.01, rel=1e-3)
    assert torch.allclose(clipped / clipped.norm(), whole / whole.norm(), atol=1e-3)
    noised, _ = change(50.0, 0.01)
    assert float((noised - clipped).std()) == pytest.approx(0.5, rel=0.35)  # of 42 values


def limited(sites: dict[str, Path], site: str, **policy: Any) -> dict[str, Path]:
    file = sites[site].with_name(f"{site}.limited.yaml")
    file.write_text(yaml.safe_dump({**yaml.safe_load(sites[site].read_text()), "policy": policy}))
    return {**sites, site: file}


@pytest.mark.slow
def test_a_hospital_whose_budget_is_spent_trains_no_more_and_keeps_its_models(
    sites: dict[str, Path], tmp_path: Path
) -> None:
    two = opacus([(3.0, 1.0, 2)])
    limit = limited(sites, "anna", most_epsilon=two * 1.001)
    simulate(averaged(UPDATE, 4), limit, tmp_path / "r", tmp_path / "h", stop_after=3)
    simulate(averaged(UPDATE, 4), limit, tmp_path / "r", tmp_path / "h")  # new processes: it is still spent
    summary = read_summary(tmp_path / "r")
    refused = [event for event in summary.events if "most_epsilon" in event.event]
    assert [(event.site, event.round) for event in refused] == [("anna", 3), ("anna", 4)]
    assert "trains no more and keeps its models" in refused[0].event
    assert summary.privacy["anna"].epsilon == pytest.approx(two)  # type: ignore[union-attr]
    assert summary.privacy["berta"].releases == 4  # type: ignore[union-attr]
    assert account(tmp_path / "h")[0] == 2
    assert (tmp_path / "h/anna/small/models/fedavg-last.safetensors").is_file()
    # Another job's name begins no new budget.
    with pytest.raises(BudgetSpent):
        _one_round(averaged(UPDATE), limit, tmp_path / "h", "other")
    # Nor does a new kit into which the hospital's folder was moved; without it the account is another.
    (tmp_path / "new").mkdir()
    (tmp_path / "h/anna").rename(tmp_path / "new/anna")
    with pytest.raises(BudgetSpent):
        _one_round(averaged(UPDATE), limit, tmp_path / "new", "third")


@pytest.mark.slow
def test_a_job_ends_in_order_when_all_budgets_are_spent(sites: dict[str, Path], tmp_path: Path) -> None:
    limit = opacus([(3.0, 1.0, 2)]) * 1.001
    for site in list(sites):
        sites = limited(sites, site, most_epsilon=limit)
    simulate(averaged(UPDATE, 9), sites, tmp_path / "r", tmp_path / "h")
    summary = read_summary(tmp_path / "r")
    assert any("the job ends after round 2" in event.event for event in summary.events)
    assert {(line.site, line.round) for line in summary.test if line.choice == "last"} == {(s, 2) for s in sites}
    for site in sites:
        assert (tmp_path / "h" / site / "small/models/fedavg-last.safetensors").is_file()


def test_what_a_hospital_has_spent_is_told_where_it_was_gone_in_the_end(sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = pieces(averaged(UPDATE), sites, tmp_path)
    ready(coordinator, runners)
    for number, there in enumerate((["anna", "berta", "clara"], ["berta", "clara"]), 1):
        round_of(coordinator, runners, number, there)
    exchange(runners, coordinator.rounds.train_messages(2, ["anna"]))  # the server dies with it
    coordinator.end.take_final(exchange(runners, coordinator.end.finish_messages(["berta", "clara"])))
    summary = read_summary(tmp_path / "r")
    assert {site: spent.releases for site, spent in summary.privacy.items()} == {"anna": 1, "berta": 2, "clara": 2}  # type: ignore[union-attr]
    assert summary.privacy["anna"].epsilon == pytest.approx(opacus([(3.0, 1.0, 1)]))  # type: ignore[union-attr]
    assert account(tmp_path)[0] == 2
    last = f"{TOLD_LAST} 1, its last answer that counted; what it sent since is in its own account alone"
    assert [event.site for event in summary.events if event.event == last] == ["anna"]
    page = (tmp_path / "r" / "report.html").read_text()
    assert "<td>anna</td><td>update</td>" in page and "gone in the end" in page


def _one_round(job: Job, sites: dict[str, Path], home: Path, name: str) -> None:
    object.__setattr__(job, "name", name)
    coordinator, runners = pieces(job, sites, home)
    ready(coordinator, runners)
    runners["anna"].handle(coordinator.rounds.train_messages(1, ["anna"])["anna"])


@pytest.mark.parametrize("first", [RECORD, UPDATE])
def test_what_was_sent_with_noise_for_single_cases_is_not_said_to_hide_all_of_them(
    first: DPSGD | ClippedNoise, sites: dict[str, Path], tmp_path: Path
) -> None:
    """A job of the same name had the one kind of noise before, and now it has the other: together they hide a case."""
    for number, privacy in enumerate((first, UPDATE if first is RECORD else RECORD)):
        coordinator, runners = pieces(averaged(privacy, batch_size=100), sites, tmp_path)
        ready(coordinator, runners)
        spent = exchange(runners, coordinator.rounds.train_messages(1, ["anna"]))["anna"].header.privacy
        assert spent is not None and spent.level == (privacy.level if number == 0 else "record")
        runners["anna"].close()
    assert spent.epsilon == pytest.approx(opacus([(1.5, 1.0, 3), (3.0, 1.0, 1)])) and spent.releases == 2


@pytest.mark.parametrize(
    ("policy", "privacy", "told"),
    [
        ({"privacy": "record"}, None, "asks for noise of the level 'record'"),
        ({"privacy": "update"}, RECORD, "asks for noise of the level 'update' .ClippedNoise.*this job has DPSGD"),
        ({"most_epsilon": 8.0}, None, "'most_epsilon'.* allows at most 8; this job has no noise"),
        ({"privacy": "record"}, UPDATE, None),
        ({"privacy": "record", "most_epsilon": 8.0}, RECORD, None),
    ],
)
def test_the_policy_asks_for_noise(
    policy: dict[str, Any], privacy: Any, told: str | None, sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = pieces(averaged(privacy), limited(sites, "anna", **policy), tmp_path)
    message = coordinator.init_messages()["anna"]
    if told is None:
        runners["anna"].handle(message)
        return
    with pytest.raises(PolicyRefused, match=told):
        runners["anna"].handle(message)


def test_a_damaged_account_stops_everything(sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = pieces(averaged(UPDATE), sites, tmp_path)
    ready(coordinator, runners)
    path = tmp_path / "anna" / "small" / FILE
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(MedPFLError, match="what was spent is not known") as refused:
        runners["anna"].handle(coordinator.rounds.train_messages(1, ["anna"])["anna"])
    assert str(tmp_path) not in refused.value.public


def test_batch_norm_statistics_and_own_counts_are_refused(sites: dict[str, Path], tmp_path: Path) -> None:
    from medpfl.tasks.losses import CrossEntropy
    from medpfl.tasks.tabular import Tabular

    def begun(privacy: Any, number: int, **job: Any) -> None:
        method = FedAvg(lr=0.1, steps=2, batch_size=6, privacy=privacy)
        coordinator, runners = pieces(small_job(1, MIXERS, method, **job), sites, tmp_path / str(number))
        runners["anna"].handle(coordinator.init_messages()["anna"])

    for number, privacy in enumerate((RECORD, UPDATE)):
        with pytest.raises(ConfigError, match="norm 'group'"):
            begun(privacy, number, task=normed())
    for number, task in enumerate(
        (Tabular("blood", loss=CrossEntropy("balanced")), Tabular("blood", sampling="balanced"))
    ):
        with pytest.raises(ConfigError, match="own numbers of cases"):
            begun(RECORD, 2 + number, task=task)


def test_a_description_of_the_data_does_not_leave_where_noise_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="would leave without noise"):
        refuse_plan(Policy(), FedAvg(privacy=UPDATE))
    with pytest.raises(PolicyRefused, match="'privacy'"):
        refuse_plan(Policy(privacy="record"), FedAvg())
    refuse_plan(Policy(), FedAvg())


def test_a_loss_that_compares_cases_is_refused() -> None:
    """Of a single case its gradient is 0: nothing but noise would be learnt."""
    with pytest.raises(ConfigError, match="DPSGD cannot train Survival: its loss compares the cases of a batch"):
        _check_task(Survival(dataset="blood", horizons=(1.0,)), SiteData({}, []))


def test_statistics_are_refused_by_the_server_and_by_the_hospital(sites: dict[str, Path], tmp_path: Path) -> None:
    method = PFedNet(lr=0.1, steps=2, privacy=UPDATE)
    mixers: Any = {"shared": Mean(), "personal": NetworkProx(tau=0.1, neighbours=1)}
    with pytest.raises(ConfigError, match="NetworkProx of slot 'personal' asks for the statistics"):
        pieces(small_job(1, mixers, method), sites, tmp_path)
    coordinator, runners = pieces(averaged(UPDATE), sites, tmp_path)
    ready(coordinator, runners)
    asked = coordinator.rounds.train_messages(1, ["anna"])["anna"].header
    wanted = StatisticsRequest(**asked.model_dump(include={"run", "round", "rounds", "best"}), names=("moments",))
    with pytest.raises(ConfigError, match=r"the server asks for the statistics moments.*leave without noise"):
        runners["anna"].handle(Message(wanted))


def test_a_server_cannot_ask_for_what_is_trained_without_noise(sites: dict[str, Path], tmp_path: Path) -> None:
    job = small_job(1, method=SoftPull(lr=0.1, batch_size=6, privacy=RECORD))
    coordinator, runners = pieces(job, sites, tmp_path)
    message = coordinator.init_messages()["anna"]
    retell(message, slots={**message.header.slots, "local": True})
    with pytest.raises(ConfigError, match="slot 'local' cannot leave under DPSGD"):
        runners["anna"].handle(message)


@pytest.mark.slow
def test_a_target_is_met_and_the_training_loss_stays(sites: dict[str, Path], tmp_path: Path) -> None:
    job = averaged(DPSGD(target_epsilon=4.0), batch_size=100)  # all cases in every lot, whose cost is soon computed
    coordinator, runners = pieces(job, sites, tmp_path)
    ready(coordinator, runners)
    for number in (1, 2):
        replies = exchange(runners, coordinator.rounds.train_messages(number, ["anna", "berta"]))
        assert all(reply.header.loss == {} for reply in replies.values())
        coordinator.rounds.take_train(number, replies)
    for reply in replies.values():
        assert reply.header.privacy is not None and 3.9 < reply.header.privacy.epsilon <= 4.0


def test_without_a_fixed_seed_nobody_can_compute_the_noise(
    sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FIXED)
    sent = []
    for folder in ("one", "other"):
        coordinator, runners = pieces(averaged(UPDATE), sites, tmp_path / folder)
        ready(coordinator, runners)
        reply = runners["anna"].handle(coordinator.rounds.train_messages(1, ["anna"])["anna"])
        sent.append(reply.slots)
        assert reply.header.privacy is not None and not reply.header.privacy.fixed
    assert not same(*sent)
    assert b"secret" not in (tmp_path / "one" / "anna" / "small" / FILE).read_bytes()


@pytest.mark.parametrize("privacy", [RECORD, DPSGD(target_epsilon=4.0), UPDATE])
def test_where_nothing_leaves_there_is_no_noise_and_no_cost(
    privacy: DPSGD | ClippedNoise, sites: dict[str, Path], tmp_path: Path
) -> None:
    """Local training by itself: there is no update to be shortened."""
    method = Local(lr=0.1, steps=3, batch_size=6, privacy=privacy)
    coordinator, runners = pieces(small_job(1, {"local": Identity()}, method), sites, tmp_path)
    ready(coordinator, runners)
    reply = exchange(runners, coordinator.rounds.train_messages(1, ["anna"]))["anna"]
    assert not flatten(reply.slots) and reply.header.privacy.releases == reply.header.privacy.epsilon == 0


def test_noise_from_a_fixed_seed_is_told_of_in_later_rounds_too(
    sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is gone on with without the seed has messages of before whose noise protects nothing."""
    coordinator, runners = pieces(averaged(UPDATE), sites, tmp_path)
    ready(coordinator, runners)
    for seed in ("0", None):
        if seed is None:
            monkeypatch.delenv(FIXED)
        spent = exchange(runners, coordinator.rounds.train_messages(1, ["anna"]))["anna"].header.privacy
        assert spent is not None and spent.fixed
        assert str(spent).endswith("protects nothing")


def test_levels_that_go_by_losses_are_refused_where_losses_are_withheld() -> None:
    """They would stay at one, without a word."""
    job = averaged(RECORD)
    for codec in (DAdaQuant(), Chain(Half(), DAdaQuant())):
        with pytest.raises(ConfigError, match="goes by the training losses, which are withheld where a job asks"):
            replace(job, codecs=Codecs(None, codec))
    assert replace(job, codecs=Codecs(None, DAdaQuant(4))).codecs is not None
