# SPDX-License-Identifier: Apache-2.0
"""A method of another package with a mistake in it: one sentence that names its class, and nothing that is wrong in
silence."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from medpfl.core.errors import ConfigError, PolicyRefused
from medpfl.core.groups import under
from medpfl.core.mixers import Identity, Mean
from medpfl.deployed.model_file import load_deployed
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.fedsm import FedSMExtra
from medpfl.methods.softpull import SoftPull
from medpfl.privacy import ClippedNoise
from medpfl.privacy.contract import Cover
from medpfl.rounds.simulate import simulate
from own_method import Ours
from small_jobs import small_job, write_table_sites
from tools import pieces, ready, round_of


def run(method: Method, folder: Path, rounds: int = 2) -> None:
    job = small_job(rounds, {"model": Mean()}, method)
    simulate(job, write_table_sites(folder / "sites"), folder / "results", folder / "home")


def like(name: str, **members: Any) -> type[Ours]:
    """A class of that name with these members instead of ``Ours``'s."""
    return dataclass(frozen=True, kw_only=True)(type(name, (Ours,), members))


WRONG = {
    "models": (lambda self, build: build.network(), "a dictionary of networks by their names; it gives .*Linear"),
    "slots": (
        lambda self, models: under(models, "model"),
        r"a dictionary of slots, each a list of entries; it gives \[",
    ),
    "components": (
        lambda self: {"model": Mean},
        r"a server component for slot 'model', such as Mean\(\); it gives <cla",
    ),
    "diagnose": (lambda self, *given: None, "a dictionary of numbers by their names; it gives None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_it_gives_of_another_kind_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    """These were errors of Python's, with a traceback of files of ours."""
    given, said = WRONG[name]
    with pytest.raises(ConfigError, match=f"'{name}' of Wrong must give {said}"):
        run(like("Wrong", **{name: given})(), tmp_path)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("models", lambda self, build: None, "a dictionary of networks by their names; it gives None"),
        ("models", lambda self, build: {"model": 1}, "a network as 'model'; it gives 1"),
        ("models", lambda self, build: {"a.b": nn.Linear(1, 1)}, r"names of networks without a point; it gives 'a\.b'"),
        ("slots", lambda self, models: {"model": "model"}, "a list of entries for slot 'model'; it gives 'model'"),
        ("slots", lambda self, models: None, "a dictionary of slots, each a list of entries; it gives None"),
        ("components", lambda self: None, "a dictionary of server components by their slots' names; it gives None"),
        ("diagnose", lambda self, *given: {"gapp": 1.0}, "what its 'diagnoses' name and nothing else; it gives 'gapp'"),
    ],
)
def test_so_are_parts_of_it(name: str, given: Callable[..., Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' of Wrong must give {said}"):
        run(like("Wrong", diagnoses=("gap",), **{name: given})(), tmp_path)


@pytest.mark.parametrize("privacy", [None, ClippedNoise(noise_multiplier=1.0, clip=1.0)])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nowhere": {}}, "puts into 'site.outbox' slot 'nowhere', which it does not have; its slots are: model"),
        ({"model": [1]}, r"must give a dictionary of tensors by .* for slot 'model'; it gives \[1\]"),
        ({"model": {"model.0.weight": 1}}, "must give a tensor for 'model.0.weight' of slot 'model'; it gives 1"),
        ({"model": {}}, "puts into 'site.outbox' slot 'model' without the entry 'model.0.bias'; it has: model.0.w"),
        ({"model": {"model.x": torch.zeros(1)}}, "slot 'model' without the entry 'model.0.bias'"),
        (
            {"model": {"model.0.bias": torch.zeros(1)}},
            r"'model.0.bias' of slot 'model' as \[1\] torch.float32; it is \[4\]",
        ),
    ],
)
def test_what_it_sends_instead_of_its_slots_is_what_they_hold(
    given: Any, said: str, privacy: ClippedNoise | None, tmp_path: Path
) -> None:
    """With noise or a codec these were errors of Python's; else the server told of them in sentences of its own."""

    def send(self: Method, site: Site) -> None:
        site.fit("model")
        site.outbox |= given
        if said.startswith("'model.0.bias'"):
            site.outbox["model"] = {**site.models.state_dict(), **given["model"]}

    with pytest.raises(ConfigError, match=f"Wrong.*{said}"):
        run(like("Wrong", local_round=send, cover=Cover())(privacy=privacy), tmp_path)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"deploys": {"model"}}, r"Wrong's 'deploys' must be a dictionary .*; it is \{'model'\}"),
        (
            {"deploys": {"../mine": "model"}},
            r"Wrong calls a model '\.\./mine', which cannot be a file's name: rename it",
        ),
        ({"deploys": {}}, "Wrong has no 'deploys'"),
        ({"after_steps": "mine"}, "Wrong's 'after_steps' must be a list of its models, got 'mine'"),
        ({"after_steps": ("mein",)}, "Wrong's 'after_steps' names 'mein', .* it deploys: mine; did you mean 'mine'"),
        ({"fine_tuned": "model"}, "Wrong's 'fine_tuned' names 'model', which it does not deploy; it deploys: mine"),
    ],
)
def test_what_its_models_are_called_is_said_everywhere_alike(members: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        like("Wrong", **members)()


def test_no_model_is_called_as_that_of_the_hospitals_choice() -> None:
    """Its file was written over by the chosen model's."""
    with pytest.raises(
        ConfigError, match="Wrong calls a model 'chosen', as the model of a hospital's choice is called"
    ):
        small_job(1, {"model": Mean()}, like("Wrong", deploys={"chosen": "model"})())


@dataclass(frozen=True, kw_only=True)
class Copied(Ours):
    """Trains a copy of its network, as other packages' methods do."""

    def local_round(self, site: Site) -> None:
        site.models["model"] = copy.deepcopy(site.models["model"])
        site.fit("model")


@dataclass(frozen=True, kw_only=True)
class Halved(Ours):
    """Puts other weights into its network."""

    def local_round(self, site: Site) -> None:
        site.fit("model")
        first = next(layer for layer in site.models["model"].modules() if isinstance(layer, nn.Linear))
        first.weight = nn.Parameter(first.weight.detach() / 2)


@dataclass(frozen=True, kw_only=True)
class Teaching(Ours):
    """Has a network that nothing keeps."""

    def local_round(self, site: Site) -> None:
        site.models["teacher"] = copy.deepcopy(site.models["model"])
        site.fit("model")


@pytest.mark.parametrize(
    ("method", "key"), [(Copied, "model.0.weight"), (Halved, "model.0.weight"), (Teaching, "teacher.0.weight")]
)
def test_a_weight_that_another_takes_the_place_of_is_named(method: type[Method], key: str, tmp_path: Path) -> None:
    """The optimiser, which is kept, went on with the old ones: from the second round on nothing was trained."""
    with pytest.raises(ConfigError, match=f"{method.__name__} puts another tensor or network in the place of '{key}'"):
        run(method(lr=0.05), tmp_path)


@dataclass(frozen=True, kw_only=True)
class Headed(SoftPull):
    """Makes a network by itself, not by ``build``."""

    begun: ClassVar[list[torch.Tensor]] = []

    def models(self, build: Build) -> dict[str, nn.Module]:
        head = nn.Linear(3, 2)
        if build.site:
            self.begun.append(head.weight.detach().clone())
        return {"head": head, **super().models(build)}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": under(models, "model")}


def test_a_network_that_it_makes_by_itself_begins_by_the_jobs_seed_too(tmp_path: Path) -> None:
    """It began with whatever torch drew next: otherwise at every hospital, and in every run."""
    Headed.begun.clear()
    for number in range(2):
        torch.manual_seed(number)
        run(Headed(), tmp_path / str(number), rounds=1)
    assert len(Headed.begun) == 8 and all(torch.equal(one, Headed.begun[0]) for one in Headed.begun)


def test_what_it_trains_after_the_mixing_is_of_as_many_samples_as_the_policy_asks_for(tmp_path: Path) -> None:
    """The round's training goes on from there, and what few samples had taught left with it."""

    def of_two(self: Method, site: Site) -> None:
        for batch in site.training_batches(steps=1):
            site.step("model", site.task.loss(site.models["model"](batch.inputs), batch.targets))

    method = like("Tuned", after_mixing=of_two)(batch_size=2, steps=15)
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    coordinator, runners = pieces(small_job(2, {"model": Mean()}, method), sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    with pytest.raises(PolicyRefused, match=r"\('least_update'\) asks for at least 8 .* Tuned; this job takes 2"):
        runners["anna"].handle(coordinator.rounds.train_messages(2, ["anna"])["anna"])


class Memory(nn.Module):
    """A row for every training sample."""

    def __init__(self, rows: int):
        super().__init__()
        self.register_buffer("answers", torch.zeros(rows))


@dataclass(frozen=True, kw_only=True)
class Remembering(Ours):
    """Predicts with what it remembers of the training part, as kNN-Per does."""

    predicts: bool = True

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {**super().models(build), "memory": Memory(len(build.data.splits["train"]))}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": under(models, "model")}

    def predict(self, name: str, models: nn.ModuleDict, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().predict(name, models, inputs)
        return outputs + models["memory"].get_buffer("answers").sum() if self.predicts else outputs


def test_a_network_as_long_as_a_hospitals_data_is_refused_at_the_start(tmp_path: Path) -> None:
    """It trained for all its rounds, and left model files that nothing could read."""
    with pytest.raises(ConfigError, match=r"Remembering has a network 'memory' .* 'mine' is read.*\('answers'|entry"):
        run(Remembering(), tmp_path)


def test_where_no_model_predicts_with_it_it_may_be(tmp_path: Path) -> None:
    run(Remembering(predicts=False), tmp_path, rounds=1)
    (model, *_) = sorted((tmp_path / "home").rglob("mine-best.safetensors"))
    assert load_deployed(model).networks.keys() == {"model"}


@pytest.mark.parametrize("what", ["refined", "shown", "delivered", "probabilities", "anew"])
def test_a_slot_that_it_does_not_have_is_named(what: str) -> None:
    """It was passed over: nothing was exchanged within the rounds, in silence."""
    with pytest.raises(ConfigError, match=f"Wrong's '{what}' names slot 'modle', which it does not have; .*: model"):
        small_job(1, {"model": Mean()}, like("Wrong", **{what: ("modle",)})())


def test_what_hospitals_are_shown_reaches_the_server() -> None:
    """All rounds were trained, and the exchange after the last one ended the job with a KeyError at every hospital."""
    with pytest.raises(ConfigError, match=r"component 'personal': FedSMExtra shows every hospital .* Identity keeps"):
        small_job(1, {"personal": Identity()}, FedSMExtra(selector_steps=1))
