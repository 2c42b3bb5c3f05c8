# SPDX-License-Identifier: Apache-2.0
"""Put a joint model (FedSM's super model) together from what a job left at the server, and give it the threshold that
validation chose."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import JsonValue, ValidationError
from torch import Tensor, nn

import medpfl
from medpfl import store
from medpfl.component import build, spec_of
from medpfl.core.devices import training_device
from medpfl.core.errors import ConfigError, DataError, MedPFLError
from medpfl.core.tied import load_own_state, own_state
from medpfl.data.samples import SiteData
from medpfl.data.site_file import SiteFile, load_site_file
from medpfl.data.target import listed
from medpfl.deployed.model_file import Deployed, History, ModelMeta, Recipe, build_networks, differing_entry
from medpfl.methods.contract import JointModel, Method
from medpfl.methods.joint_study import Found, Study
from medpfl.results.files import read_summary, read_training
from medpfl.results.schema import EvaluationSummary, TrainingSummary
from medpfl.rounds.messages import unflatten
from medpfl.rounds.server.checkpoint import SHARED
from medpfl.tasks.contract import Task
from medpfl.tasks.metrics.digits import rounded


@dataclass(frozen=True)
class Joint:
    """A joint model that is not written yet.

    Attributes:
        job: the job whose last round's models it holds; ``round``: that round's number.
        preparation: as ``SiteData.preparation``, where it tells nothing of a hospital's data.
        untrained: hospitals that trained in no round, for whose own models the common one stands.
    """

    method: JointModel
    task: Task
    networks: nn.ModuleDict
    recipe: Recipe
    job: str
    round: int
    preparation: dict[str, JsonValue]
    untrained: tuple[str, ...] = ()

    def with_gamma(self, gamma: float | None) -> "Joint":
        """The same with another threshold.

        Raises:
            ConfigError: it is not in [0, 1], or the choice needs none.
        """
        method = self.method.with_gamma(gamma)
        return replace(self, method=method, recipe=self.recipe.model_copy(update={"method": spec_of(method)}))

    def write(self, path: Path, found: Found | None) -> ModelMeta:
        """Write the deployed model's file.

        Args:
            found: how it did, if it was tested.

        Raises:
            MedPFLError: it cannot be written.
        """
        lines = [line for line in found.lines if line.hospital in self.method.hospitals] if found else []
        cases = sum(line.cases for line in lines)
        whole = bool(lines) and all(line.super_ is not None for line in lines)
        pooled = sum(line.cases * (line.super_ or 0.0) for line in lines) / cases if whole else None
        history = History(
            job=self.job,
            site="all hospitals",
            model=self.recipe.deployed,
            choice="last",
            round=self.round,
            cases={"test": cases},
            samples_by_class={},
            test={} if pooled is None else {self.task.score: rounded(pooled)},
            calibration=None,
            preparation=self.preparation,
        )
        parameters = sum(parameter.numel() for parameter in self.networks.parameters())
        versions = {"MedPFL": medpfl.__version__, "torch": str(torch.__version__)}
        meta = ModelMeta(recipe=self.recipe, history=history, parameters=parameters, versions=versions)
        return meta.write(path, own_state(self.networks))


def read_result(folder: Path) -> Joint:
    """The super model of a job's results folder, after its last round, with the usual threshold.

    Under the name of a hospital that never trained the server holds the initial weights; the common model stands in
    their place.

    Raises:
        MedPFLError: a file is missing or altered, the job's method has no such networks, or the hospitals of the
            files are not those of the selector.
    """
    summary = read_training(folder)
    recipe, hashes = summary.recipe, summary.slots
    if recipe is None:
        raise MedPFLError(f"{folder}: its summary.json does not say how to rebuild the models; run the job again")
    most = sum(file.stat().st_size for file in (folder / "slots").glob("*.safetensors"))  # an entry has a byte or more
    try:
        trained: Method = build(recipe.method, Method, "method")
        task: Task = build(recipe.task, Task, "task")
        roster = tuple(summary.roster)
        found = Recipe(
            method=recipe.method,
            task=recipe.task,
            deployed=next(iter(trained.deploys)),
            classes=summary.classes,
            input_shape=recipe.input_shape,
            hospitals=len(roster),
            meaning=recipe.meaning,
        )
        parts = build_networks(trained, task, found, most)
        if list(roster) != sorted(set(roster)):
            raise ConfigError(f"its roster is not in order: {', '.join(roster)}")
    except (ValueError, ConfigError) as error:
        said = str(error)
        if isinstance(error, ValidationError):  # its own text has a line for everything
            first = error.errors()[0]
            said = f"'{'.'.join(map(str, first['loc']))}': {first['msg'].lower()}"
        raise MedPFLError(f"{folder / 'summary.json'} was altered or is of another version: {said}") from error
    method = trained.joint(roster)
    if method is None:
        raise MedPFLError(f"{folder}: {type(trained).__name__} makes no super model of the hospitals' models")
    untrained = tuple(site for site in roster if summary.trained.get(site) == [])  # of before it was told: none
    rounds = summary.settings.rounds
    done = max((last for found in summary.trained.values() for _, last in found), default=rounds)
    if trained.refinements(rounds, rounds) and not trained.refinements(done, rounds):
        raise MedPFLError(
            f"{folder}: the job ended after round {done} of {rounds}, and {type(trained).__name__} learns which model "
            "serves a case after the last one only, so it makes no super model"
        )
    sources, common = method.sources(), next(iter(method.deploys.values()))
    sources.update({name: sources[common] for name, (_, site) in sources.items() if site in untrained})
    slots = sorted({slot for slot, _ in sources.values()})
    for slot in slots:
        if slot not in hashes or slot not in parts:
            raise MedPFLError(
                f"{folder}: {type(trained).__name__} left no slot '{slot}' at the server, so it makes no super model"
            )
    found = found.model_copy(update={"method": spec_of(method), "deployed": next(iter(method.deploys))})
    networks = build_networks(method, task, found, most)
    owned = {slot: _owners(folder / "slots" / f"{slot}.safetensors", hashes[slot]) for slot in slots}
    state = _state(folder, sources, owned)
    if difference := differing_entry(networks, state):
        raise MedPFLError(f"{folder}: the slots do not fit the job's configuration: {difference}")
    load_own_state(networks, state)
    preparation = dict(recipe.preparation)
    return Joint(method, task, networks.eval(), found, summary.job, done, preparation, untrained)


def makes_joint(summary: TrainingSummary) -> bool:
    """Whether a joint model can be made of what the job left at the server."""
    if summary.recipe is None:
        return False
    method: Method = build(summary.recipe.method, Method, "method")
    found = method.joint(tuple(summary.roster))
    return found is not None and {slot for slot, _ in found.sources().values()} <= summary.slots.keys()


Owners = dict[str, dict[str, Tensor]]
Sources = Mapping[str, tuple[str, str | None]]
"""As ``JointModel.sources`` gives them."""


def _owners(path: Path, digest: str) -> Owners:
    """Hospital (or ``SHARED``) to its entries of a slot, from the slot's file."""
    if store.file_digest(path) != digest:
        raise MedPFLError(f"{path}: it was altered after the job (its SHA-256 does not fit summary.json)")
    return unflatten(store.read(path)[0])


def _state(folder: Path, sources: Sources, owned: Mapping[str, Owners]) -> dict[str, Tensor]:
    """The joint model's entries, from the slots' files."""
    state: dict[str, Tensor] = {}
    for name, (slot, site) in sources.items():
        path, owners = folder / "slots" / f"{slot}.safetensors", owned[slot]
        owner = _of_all(path, owners) if site is None else owners.get(site, owners.get(SHARED))
        if owner is None:
            raise MedPFLError(f"{path}: holds no model of {site}; it has: {', '.join(owners)}")
        for key, tensor in owner.items():
            if key.startswith(f"{slot}."):  # a selector's slot may hold its optimiser's moments too
                state[f"{name}.{key.removeprefix(f'{slot}.')}"] = tensor
    return state


def _of_all(path: Path, owners: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The model that all hospitals have. Integers may differ, such as BatchNorm's count of its batches, which predicts
    nothing: every hospital keeps its own."""
    first, *others = owners.values()
    for key, tensor in first.items():
        if tensor.is_floating_point() and not all(torch.equal(tensor, other[key]) for other in others):
            raise MedPFLError(f"{path}: the hospitals' models differ; a super model has one for all")
    return first


def from_file(deployed: Deployed, path: Path) -> Joint:
    """A super model's file, to give it another threshold.

    Raises:
        MedPFLError: the file holds another model, or was given away without its history.
    """
    method, history = deployed.method, deployed.meta.history
    if not isinstance(method, JointModel) or history is None:
        raise MedPFLError(f"{path}: not a super model's file, as 'medpfl super' writes it")
    return Joint(
        method,
        deployed.task,
        deployed.networks,
        deployed.meta.recipe,
        history.job,
        history.round,
        history.preparation,
    )


def study_here(
    model: Joint, site_files: Mapping[str, Path], read: Callable[[Path, str], SiteFile] = load_site_file
) -> dict[str, Study]:
    """The super model's validation and test at every hospital that took part, in this process.

    Args:
        read: reads a hospital's site file, given its path and the hospital's name.

    Raises:
        MedPFLError: a hospital is not among the selector's classes, or its data cannot be read or do not fit.
    """
    for site in site_files:
        if site not in model.method.hospitals:
            raise MedPFLError(
                f"{site} is not among the selector's classes: {', '.join(model.method.hospitals)}; gamma is chosen "
                "on the hospitals that took part in training"
            )
    return {site: study_of(model, site, model.task.load(read(path, site))) for site, path in sorted(site_files.items())}


def study_of(model: Joint, site: str, data: SiteData) -> Study:
    """The super model's validation and test at one hospital, also one that took no part.

    Raises:
        MedPFLError: its data do not fit.
    """
    expected, got = model.recipe.input_shape, list(data.splits["test"].inputs.shape[1:])
    if got != expected or data.class_names != model.recipe.classes:
        raise DataError(
            f"{site}: the super model takes inputs of shape {expected} with the classes "
            f"{listed(model.recipe.classes)}; the data have {got} and {listed(data.class_names)}"
        )
    device = training_device()
    return model.method.study(model.networks.to(device), model.task, data, device)


def studies_of(model: Deployed, evaluation: Path) -> dict[str, Study]:
    """What the hospitals told in an evaluation job of just this model.

    Raises:
        MedPFLError: the folder holds the results of another job or model, or was altered.
    """
    method, summary = model.method, read_summary(evaluation)
    if not isinstance(method, JointModel):
        raise MedPFLError(f"{evaluation}: the model is no super model, so no study of it can be read")
    given = model.meta.model_copy(update={"history": None}).seal(own_state(model.networks))
    if not isinstance(summary, EvaluationSummary) or summary.evaluated.sha256 != given.sha256:
        raise MedPFLError(f"{evaluation}: not the results of an evaluation job of this super model")
    if not summary.study:
        raise MedPFLError(f"{evaluation / 'summary.json'} was altered: it says nothing of the thresholds")
    return {site: method.read_study(site, found) for site, found in summary.study.items()}


def chosen(model: Joint, studies: Mapping[str, Study]) -> tuple[Joint, Found]:
    """The model with the threshold that validation chose, and its tests."""
    found = model.method.choose_gamma(studies, model.task.measure)
    return model.with_gamma(found.gamma), found
