# SPDX-License-Identifier: Apache-2.0
"""The file of a deployed model: what it says of itself, and the networks rebuilt from it."""

import hashlib
import json
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, PositiveInt, ValidationError
from torch import Tensor, nn

from medpfl import store
from medpfl.component import Spec, build
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.sizes import Bounded
from medpfl.core.tied import first_names, load_own_state
from medpfl.data.meaning import Meaning
from medpfl.data.samples import Samples, SiteData
from medpfl.methods.contract import Build, Method
from medpfl.privacy.contract import Spent
from medpfl.tasks.contract import Task
from medpfl.tasks.metrics.calibration import Calibration
from medpfl.tasks.metrics.certainty import Certainty, Interval
from medpfl.tasks.metrics.operating import OperatingPoint

MODEL_FORMAT = 1
_NETWORKS = 16
"""A method may make so many networks for one that it predicts with."""
_SPARE = 2**24
"""Entries that they may have beyond that."""
_LONGEST = 2**31
"""Values along one axis of an input; what torch cannot even count is no shape."""
_MOST_HOSPITALS = 10_000
"""As many as a job can have. Each gets a name before any network is built."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _none_or_several(classes: list[str]) -> list[str]:
    if len(classes) == 1:
        raise ValueError("expected no class or at least 2")
    return classes


def _with_test(cases: dict[str, int]) -> dict[str, int]:
    if "test" not in cases:
        raise ValueError("expected the number of cases of the test split")
    return cases


class Recipe(_Strict):
    """What rebuilds the networks. It names no hospital, but those between whose models a super model chooses.

    Attributes:
        method: configuration of the method.
        task: configuration of the task.
        deployed: the method's own name of the model.
        classes: the classes' names; none where the answer is a number.
        input_shape: shape of one input, without the batch axis.
        hospitals: size of the federation (a method may have a network with an output a hospital).
        networks: those of the method's networks that the model predicts with; None: all.
        meaning: what the entries of an input mean, in their order; see ``Preparation.meaning``.
    """

    method: Spec
    task: Spec
    deployed: str
    classes: Annotated[list[str], AfterValidator(_none_or_several)]
    input_shape: list[Annotated[PositiveInt, Field(le=_LONGEST)]] = Field(min_length=1)
    hospitals: Annotated[PositiveInt, Field(le=_MOST_HOSPITALS)]
    networks: list[str] | None = None
    meaning: Meaning = []


class Chosen(_Strict):
    """How a hospital's validation cases chose the model (``deployed.choice``).

    Attributes:
        model: its name among the ``candidates``.
        patients: validation patients.
        best: the candidate that ``gain`` speaks of, the best supported beside the local model.
        gain: its gain over the local model on them; None where nothing can be said; ``error``: its standard error;
            ``needed``: how many of these it takes to be chosen; ``interval``: 95 %, for all candidates at once;
            None, too, where a few patients gain exactly alike.
        candidates: name to validation score; None where it is not defined.
        operating: of a classifier, thresholds that the same cases chose for the model, and their test.
    """

    model: str
    patients: int
    best: str | None = None
    gain: float | None
    error: float | None
    needed: float | None = None
    interval: Interval | None
    candidates: dict[str, float | None]
    operating: tuple[OperatingPoint, ...] = Field(default=(), exclude_if=lambda found: not found)


class History(_Strict):
    """Where a model comes from: known at its hospital, and left out of what is given away.

    Attributes:
        model: the model's name in the job's results.
        choice: "best" or "last" round.
        cases: number of cases of each split.
        samples_by_class: split to class to number of samples; empty where a sample has no single class.
        test: results on the hospital's test split; None stands for a metric that is not defined there.
        threshold: of the second class's probability, chosen on the hospital's validation split; None where no metric of
            the task uses one.
        one_answer: whether it gave all test cases the same class though there are several.
        fitted: what the task fitted on the training part's decisions (the baseline of a survival model); see
            ``Task.fit_after``.
        score: the metric of the results that chose rounds; None in older files.
        certainty: how sure it is; None where there are too few patients.
        chosen: of the model that the hospital's validation cases chose, how; None of the others.
        preparation: what was fitted on the hospital's training part to prepare inputs (a table's means, say).
        privacy: what the noise on what the hospital sent has cost in the job; None: there was none.
    """

    job: str
    site: str
    model: str
    choice: str
    round: int
    cases: Annotated[dict[str, int], AfterValidator(_with_test)]
    samples_by_class: dict[str, dict[str, int]]
    test: dict[str, float | None]
    calibration: Calibration | None
    threshold: float | None = Field(default=None, exclude_if=lambda found: found is None)
    one_answer: bool = Field(default=False, exclude_if=lambda found: not found)
    fitted: tuple[float, ...] = Field(default=(), exclude_if=lambda found: not found)
    score: str | None = Field(default=None, exclude_if=lambda found: found is None)
    certainty: Certainty | None = Field(default=None, exclude_if=lambda found: found is None)
    chosen: Chosen | None = Field(default=None, exclude_if=lambda found: found is None)
    preparation: dict[str, JsonValue]
    privacy: Spent | None = Field(default=None, exclude_if=lambda found: found is None)


class ModelMeta(_Strict):
    """The JSON of a deployed model's file."""

    kind: Literal["model"] = "model"
    model_format: int = MODEL_FORMAT
    recipe: Recipe
    history: History | None
    parameters: int
    versions: dict[str, str]
    sha256: str = ""

    def seal(self, tensors: Mapping[str, Tensor]) -> "ModelMeta":
        """The same with the SHA-256 over the tensors and everything said of them."""
        content = {**self.model_dump(mode="json"), "sha256": "", "tensors": store.fingerprint(tensors)}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return self.model_copy(update={"sha256": digest})

    def write(self, path: Path, tensors: Mapping[str, Tensor]) -> "ModelMeta":
        """Seal it and write the file.

        Raises:
            MedPFLError: the file cannot be written.
        """
        sealed = self.seal(tensors)
        store.save(path, tensors, sealed.model_dump(mode="json"))
        return sealed


@dataclass(frozen=True)
class Deployed:
    """A deployed model, ready to predict.

    Attributes:
        method: it knows how its networks predict.
        name: the method's own name of the model.
        networks: the method's networks that it predicts with, in evaluation mode, on the CPU but while ``on`` lasts.
        task: prepares inputs and turns outputs into decisions.
        meta: everything the file says.
    """

    method: Method
    name: str
    networks: nn.ModuleDict
    task: Task
    meta: ModelMeta

    @property
    def class_names(self) -> list[str]:
        return self.meta.recipe.classes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one prepared input, without the batch axis."""
        return tuple(self.meta.recipe.input_shape)

    @property
    def preparation(self) -> dict[str, JsonValue]:
        """What was fitted on the training part to prepare inputs; empty for a model without its history."""
        return self.meta.history.preparation if self.meta.history else {}

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs for N x input_shape prepared inputs, float32, on the CPU."""
        with torch.inference_mode():
            return self.method.predict(self.name, self.networks, inputs)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[nn.ModuleDict]:
        """While it lasts the networks, which it gives, lie on that device."""
        try:
            yield self.networks.to(device)
        finally:
            self.networks.cpu()

    def module(self) -> "Predictor":
        """The model as a single module, inputs to outputs, for tools that want one."""
        return Predictor(self.method, self.name, self.networks).eval()


class Predictor(nn.Module):
    """A method's prediction as ``forward``."""

    def __init__(self, method: Method, name: str, networks: nn.ModuleDict):
        super().__init__()
        self._method, self._name = method, name
        # Registered under names of their own: TorchScript cannot load a module that is called "global".
        self.__dict__["_networks"] = networks
        for key, network in networks.items():
            self.add_module(f"network_{key}", network)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._method.predict(self._name, self.__dict__["_networks"], inputs)


def load_deployed(path: Path) -> Deployed:
    """Read a model that a job left at a hospital.

    Raises:
        MedPFLError: one sentence: the file is missing, broken, altered, made by a newer MedPFL, not a model of
            MedPFL's, or needs a class that is not installed.
    """
    tensors, meta = _read(path)
    try:
        method: Method = build(meta.recipe.method, Method, "method")
        task: Task = build(meta.recipe.task, Task, "task")
        networks = build_networks(method, task, meta.recipe, sum(tensor.numel() for tensor in tensors.values()))
    except ConfigError as error:
        raise MedPFLError(f"{path}: {error}") from error
    if difference := differing_entry(networks, tensors):
        raise MedPFLError(f"{path}: {difference}")
    _check_seal(path, meta, tensors)
    load_own_state(networks, tensors)
    if meta.history and meta.history.fitted:
        task = task.after_fit(meta.history.fitted)
    return Deployed(method, meta.recipe.deployed, networks.eval(), task, meta)


def read_model(path: Path) -> tuple[dict[str, Tensor], ModelMeta]:
    """A model's tensors and what its file says of them; the networks are not built and no class is imported.

    Raises:
        MedPFLError: as ``load_deployed``.
    """
    tensors, meta = _read(path)
    _check_seal(path, meta, tensors)
    return tensors, meta


def _check_seal(path: Path, meta: ModelMeta, tensors: Mapping[str, Tensor]) -> None:
    if meta.seal(tensors).sha256 != meta.sha256:
        raise MedPFLError(f"{path}: its content was altered after it was written (its SHA-256 does not fit)")


def read_description(path: Path) -> ModelMeta:
    """What a model's file says of itself; its tensors are not read.

    Raises:
        MedPFLError: the file is missing, broken, made by a newer MedPFL, or not a model of MedPFL's.
    """
    return _description(path, store.read_meta(path))


def _read(path: Path) -> tuple[dict[str, Tensor], ModelMeta]:
    tensors, content = store.read(path)
    return tensors, _description(path, content)


def _description(path: Path, content: store.Meta) -> ModelMeta:
    if content.get("kind") != "model":
        raise MedPFLError(f"{path}: not a deployed model but another file of MedPFL's")
    version = content.get("model_format")
    if type(version) is int and version > MODEL_FORMAT:
        raise MedPFLError(
            f"{path}: made by a newer MedPFL (model format {version}, this one reads {MODEL_FORMAT}); update MedPFL"
        )
    try:
        return ModelMeta.model_validate({key: value for key, value in content.items() if key != "format"})
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise MedPFLError(f"{path}: what it says of itself is broken: '{place}': {problem['msg'].lower()}") from error


def build_networks(method: Method, task: Task, recipe: Recipe, entries: int) -> nn.ModuleDict:
    """The recipe's networks with arbitrary weights; torch's CPU generator is left as it was.

    Args:
        entries: of the tensors that the networks are for. What the recipe says may not take much more memory than they
            do, for it may be of a file that somebody made up.

    Raises:
        ConfigError: the method deploys no such model or has no such network, or the networks cannot be built or are
            far larger than the tensors.
    """
    if recipe.deployed not in method.deploys:
        known = ", ".join(method.deploys)
        raise ConfigError(f"{type(method).__name__} deploys no model '{recipe.deployed}'; it deploys: {known}")
    roster = tuple(f"hospital-{number}" for number in range(recipe.hospitals))
    with torch.random.fork_rng(devices=[]):
        try:
            data = _blank(recipe)
            with Bounded(_SPARE + _NETWORKS * entries):
                networks = method.models(Build(task, data, roster, seed=0))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # torch's, for shapes that no layer takes
            raise ConfigError(
                f"the networks of {type(method).__name__} cannot be built for inputs of shape {recipe.input_shape}: "
                f"{error}"
            ) from error
    wanted = list(networks) if recipe.networks is None else recipe.networks
    for name in wanted:
        if name not in networks:
            raise ConfigError(f"{type(method).__name__} has no network '{name}'; it has: {', '.join(networks)}")
    return nn.ModuleDict({name: networks[name] for name in wanted})


def _blank(recipe: Recipe) -> SiteData:
    """Splits without samples, of the recipe's shape and classes."""
    none = torch.empty(0, *recipe.input_shape)
    samples = Samples(none, torch.empty(0, dtype=torch.int64), np.empty(0, dtype=np.int64), [], len(recipe.classes))
    return SiteData(dict.fromkeys(("train", "validation", "test"), samples), recipe.classes)


def predicting(method: Method, name: str, networks: nn.ModuleDict, input_shape: Sequence[int]) -> nn.ModuleDict:
    """Those of the networks, with their weights, that the deployed model ``name`` asks for when it predicts."""
    watched = _Watched(networks)
    blank = torch.zeros(1, *input_shape, device=next(networks.parameters()).device)
    with torch.no_grad():
        method.predict(name, watched.eval(), blank)
    return nn.ModuleDict({key: network for key, network in networks.items() if key in watched.asked})


class _Watched(nn.ModuleDict):
    """Networks that note which of them are asked for; whoever goes through them asks for all."""

    def __init__(self, networks: nn.ModuleDict):
        super().__init__(dict(networks.items()))
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> nn.Module:
        self.asked.add(key)
        return super().__getitem__(key)

    def items(self) -> ItemsView[str, nn.Module]:
        self.asked.update(self.keys())
        return super().items()

    def values(self) -> ValuesView[nn.Module]:
        self.asked.update(self.keys())
        return super().values()


def differing_entry(networks: nn.Module, tensors: Mapping[str, Tensor]) -> str | None:
    """The first entry of ``tensors`` that the networks do not take as it is; None: all fit."""
    state, first = networks.state_dict(), first_names(networks)
    for key in sorted(state.keys() | tensors.keys()):
        if key not in tensors:
            if first[key] != key:  # a further name of a tensor that layers share
                continue
            return f"entry '{key}' is missing"
        if key not in state:
            return f"entry '{key}' is too many: the networks have no such entry"
        expected, got = ([list(t.shape), str(t.dtype)] for t in (state[key], tensors[key]))
        if expected != got:
            return f"entry '{key}': expected shape {expected[0]} {expected[1]}, got {got[0]} {got[1]}"
    return None
