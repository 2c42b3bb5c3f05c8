# SPDX-License-Identifier: Apache-2.0
"""FedSM's selector: its networks, its other ways of training, and that it tells the phantom hospitals apart."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.fedsm import research_example
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, Mixer, ServerAdam, SoftPull
from medpfl.demo.phantom import write_phantoms
from medpfl.job import Job, load_job
from medpfl.methods.fedsm import FedSM
from medpfl.models.conv1d import Conv1d
from medpfl.models.selector import Signature, SmallCnn, Vgg11, by_case, with_content
from medpfl.rounds.messages import Message
from medpfl.rounds.simulate import simulate
from tools import assert_same, exchange, outcome, pieces, ready, round_of, run

Make = Callable[..., Job]
ROOT = Path(__file__).resolve().parents[2]


def averaging() -> dict[str, Mixer]:
    return {"global": Mean(), "personal": SoftPull(lam=0.5), "selector": Mean()}


def with_training(how: str, **more: float) -> FedSM:
    return FedSM(lr=0.05, batch_size=8, selector_training=how, selector_lr=0.02, **more)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_selector_tells_the_phantom_hospitals_apart(tmp_path: Path) -> None:
    """The shipped job, with its number of selector steps in two rounds and hardly any training of the other models."""
    job = load_job(ROOT / "jobs" / "fedsm_phantom")
    assert isinstance(job, Job) and isinstance(job.method, FedSM)
    total = job.settings.rounds * job.method.selector_steps
    settings = replace(job.settings, rounds=2, references=())
    short = replace(job, settings=settings, method=replace(job.method, steps=1, selector_steps=total // 2))
    files = {site: tmp_path / "sites" / f"{site}.yaml" for site in write_phantoms(tmp_path / "sites", seed=1)}
    simulate(short, files, tmp_path / "results", tmp_path / "home")
    lines = [line for line in outcome(tmp_path / "results")["scores"] if line["round"] == 2]
    for name in ("selector_accuracy", "selector_accuracy_cases"):
        found = [line["metrics"][name] for line in lines if line["model"] == name and line["site"] != "mean"]
        assert len(found) == 4 and np.mean(found) >= 0.95, name
    # At least 20 times fewer bytes than NVFlare's research example, though here a round has 60 steps of the selector.
    traffic = json.loads((tmp_path / "results" / "bytes.json").read_text())
    assert len(traffic) == 2 * 4 * 2 + 4 and max(line["raw"] for line in traffic) * 20 < research_example(4)["total"]


def test_averaged_moments_by_hand(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Two steps in two rounds: every hospital's torch.optim.Adam, then size-weighted means of weights and moments."""
    job = make_job(mixers=averaging(), method=with_training("averaged_moments", selector_steps=2))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    start = coordinator.rounds.train_messages(1, ["anna"])["anna"].slots["selector"]
    network = Signature().build((3,), 4)
    keys = list(network.state_dict())
    parts = [runners[site].data.splits["train"].inputs[:] for site in coordinator.roster]
    state = {key: start[f"selector.{key}"].clone() for key in keys}
    moments = {key: (torch.zeros_like(state[key]), torch.zeros_like(state[key])) for key in keys}
    for step in range(4):
        weights, means, squares = [], [], []
        for index, inputs in enumerate(parts):
            network.load_state_dict(state)
            network.zero_grad()
            adam = torch.optim.Adam(network.parameters(), lr=0.02)
            for key, weight in network.named_parameters():
                mean, square = (tensor.clone() for tensor in moments[key])
                adam.state[weight] = {"step": torch.tensor(float(step)), "exp_avg": mean, "exp_avg_sq": square}
            cross_entropy(network(inputs), torch.full((len(inputs),), index)).backward()
            adam.step()
            weights.append({key: value.clone() for key, value in network.state_dict().items()})
            means.append({key: adam.state[weight]["exp_avg"] for key, weight in network.named_parameters()})
            squares.append({key: adam.state[weight]["exp_avg_sq"] for key, weight in network.named_parameters()})
        share = [len(part) / sum(map(len, parts)) for part in parts]

        def averaged(found: list[dict[str, torch.Tensor]], key: str, share: list[float] = share) -> torch.Tensor:
            return sum((s * one[key] for s, one in zip(share[1:], found[1:], strict=True)), share[0] * found[0][key])

        state = {key: averaged(weights, key) for key in keys}
        moments = {key: (averaged(means, key), averaged(squares, key)) for key in keys}
    for number in (1, 2):
        round_of(coordinator, runners, number)
    after = coordinator.rounds.train_messages(3, ["anna"])["anna"].slots["selector"]
    assert float(after["moments.step"]) == 4
    for key in keys:
        torch.testing.assert_close(after[f"selector.{key}"], state[key], atol=1e-5, rtol=0)
        name = key.replace(".", "_")
        torch.testing.assert_close(after[f"moments.mean_{name}"], moments[key][0], atol=1e-6, rtol=0)
        torch.testing.assert_close(after[f"moments.square_{name}"], moments[key][1], atol=1e-6, rtol=0)


def test_local_steps_by_hand(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Algorithm 1, line 11 and 15, literally: Adam on the batches of a single class, then the size-weighted mean."""
    job = make_job(mixers=averaging(), method=with_training("local_steps", selector_steps=1))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    messages = coordinator.rounds.train_messages(1, coordinator.joined)
    start = {key: value.clone() for key, value in messages["anna"].slots["selector"].items()}
    coordinator.rounds.take_train(1, exchange(runners, messages))
    assert not coordinator.rounds.refine_messages()  # one exchange a round
    expected: dict[str, torch.Tensor] = {}
    total = sum(sizes["train"] for sizes in coordinator.sizes.values())
    for index, site in enumerate(coordinator.roster):
        network = Signature().build((3,), 4)
        network.load_state_dict({key.removeprefix("selector."): value for key, value in start.items()})
        adam = torch.optim.Adam(network.parameters(), lr=0.02)
        for batch in runners[site].rounds.site(job.method, 1).training_batches():
            adam.zero_grad()
            cross_entropy(network(batch.inputs), torch.full((len(batch.inputs),), index)).backward()
            adam.step()
        for key, value in network.state_dict().items():
            expected[key] = expected.get(key, 0) + coordinator.sizes[site]["train"] / total * value
    after = coordinator.rounds.train_messages(2, ["anna"])["anna"].slots["selector"]
    for key, value in expected.items():
        torch.testing.assert_close(after[f"selector.{key}"], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("how", "steps"), [("averaged_moments", 3), ("local_steps", 1)])
@pytest.mark.slow
def test_resuming(make_job: Make, table_sites: dict[str, Path], tmp_path: Path, how: str, steps: int) -> None:
    def job() -> Job:
        return make_job(rounds=4, mixers=averaging(), method=with_training(how, selector_steps=steps))

    whole = run(job(), table_sites, tmp_path / "whole")
    simulate(job(), table_sites, tmp_path / "a", tmp_path / "home", stop_after=2)
    simulate(job(), table_sites, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))


def test_the_component_must_fit_what_is_sent(make_job: Make) -> None:
    adam = {**averaging(), "selector": ServerAdam()}
    with pytest.raises(
        ConfigError, match="'selector': ServerAdam takes gradients, but FedSM as it is configured sends w"
    ):
        make_job(mixers=adam, method=with_training("averaged_moments"))
    with pytest.raises(
        ConfigError, match="'selector': Mean takes weights, but FedSM as it is configured sends gradients"
    ):
        make_job(mixers=averaging(), method=with_training("server_adam"))
    with pytest.raises(ConfigError, match="'fedavg': ServerAdam takes gradients"):
        make_job(mixers={"fedavg": ServerAdam()})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"selector_steps": 0}, "selector_steps must be at least 1"),
        ({"selector_samples": 0}, "selector_samples must be at least 1"),
        ({"selector_lr": 0.0}, "selector_lr must be above 0"),
        ({"selector_training": "local_steps"}, "selector_steps must be 1 with the training 'local_steps', got 10"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedSM(**arguments)  # type: ignore[arg-type]


def test_a_hospital_outside_the_roster_is_told_so(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={**averaging(), "selector": ServerAdam()}, method=with_training("server_adam"))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    message = coordinator.init_messages()["anna"]
    header = message.header.model_copy(update={"roster": ("berta", "clara", "dora")})
    with pytest.raises(ConfigError, match="anna is not one of this job's hospitals: berta, clara, dora"):
        runners["anna"].handle(Message(header))


def test_a_network_that_is_no_selector_is_refused(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    for selector, words in ((SmallCnn(), "SmallCnn sees images and series"), (Conv1d(), "Conv1d")):
        method = replace(with_training("server_adam"), selector=selector)
        coordinator, runners = pieces(
            make_job(mixers={**averaging(), "selector": ServerAdam()}, method=method), table_sites, tmp_path
        )
        with pytest.raises(ConfigError, match=words):
            exchange(runners, coordinator.init_messages())


def test_the_paper_s_selector() -> None:
    with torch.device("meta"):  # 515 MB that nobody needs here
        network = Vgg11().build((1, 256, 256), 6)
        assert network(torch.zeros(2, 1, 256, 256)).shape == (2, 6)
    torchvision = 132_863_336  # weights of its vgg11, for 3 channels and 1000 classes
    assert sum(p.numel() for p in network.parameters()) == torchvision - 994 * 4097 - 2 * 9 * 64
    with pytest.raises(ConfigError, match="from 32 x 32"):
        Vgg11().build((1, 31, 40), 4)


def test_the_signature_is_invariant_to_where_things_lie() -> None:
    network = Signature().build((1, 24, 24), 3)
    image = torch.rand(4, 1, 24, 24)
    torch.testing.assert_close(network(image), network(image.flip(3)))
    torch.testing.assert_close(network(image), network(image.transpose(2, 3)))
    assert not torch.allclose(network(image), network(image + 0.5 * torch.rand_like(image)), atol=1e-3)


def test_a_case_is_decided_by_its_slices_with_content() -> None:
    images = torch.rand(5, 1, 8, 8)
    images[1] = 0
    images[4] = 3
    content = with_content(images)
    assert content.tolist() == [True, False, True, True, False]
    logits = torch.tensor([[2.0, 0.0], [0.0, 9.0], [1.0, 0.0], [0.0, 1.0], [0.0, 9.0]])
    scores = by_case(logits, np.array([0, 0, 0, 1, 2]), content)
    expected = logits.log_softmax(1)[[0, 2]].mean(0)
    torch.testing.assert_close(scores[0], expected.log_softmax(0), atol=1e-4, rtol=0)
    assert scores.argmax(1).tolist() == [0, 1, 1]  # the last case has nothing else
    assert with_content(torch.zeros(3, 1)).all()  # rows of features are never empty
