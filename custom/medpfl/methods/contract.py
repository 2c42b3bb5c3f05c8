# SPDX-License-Identifier: Apache-2.0
"""What a method is, and what of a hospital it sees while it trains."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Self

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from medpfl.core.errors import ConfigError, RefusedUpdate
from medpfl.core.groups import check_entries, check_statistics, under
from medpfl.core.mixers import Mean, Mixer, NoDefault
from medpfl.core.seeding import seed_torch
from medpfl.data.samples import Samples, SiteData
from medpfl.data.target import Target
from medpfl.methods.batches import Batch, Span
from medpfl.methods.deployed_names import check_names
from medpfl.methods.hospital import Hospital
from medpfl.methods.joint_study import Found, Study
from medpfl.methods.panels import AtServer, CurvesPanel, GraphPanel, Panel
from medpfl.methods.site import Site
from medpfl.methods.start import Started
from medpfl.methods.training import Training
from medpfl.privacy.contract import UNKNOWN, Cover
from medpfl.tasks.contract import Task
from medpfl.tasks.inference import BATCH, decide_samples
from medpfl.tasks.metrics.measure import Measure

__all__ = ["BATCH", "Batch", "Build", "Hospital", "JointModel", "Method", "Served", "Site", "Span"]


@dataclass(frozen=True)
class Build:
    """What a method builds its networks from. All but ``site``, the hospital's own name, is equal at every hospital,
    so that all start from the same weights. ``public``: name to inputs, of the method's public datasets; empty where
    no hospital is at work (a deployed model is read); ``data`` have no cases there. ``start``: the weights that the
    task's network starts with; None: random ones."""

    task: Task
    data: SiteData
    roster: tuple[str, ...]
    seed: int
    site: str = ""
    public: Mapping[str, Tensor] = field(default_factory=dict)
    start: Started | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: (C, H, W) for slices, (F,) for rows."""
        return self.data.input_shape

    def network(self) -> nn.Module:
        """The task's network, each time with the same initial weights."""
        network = self.seeded(lambda: self.task.network(self.data))
        return self.start.put_into(network) if self.start else network

    def only_for(self, method: str, *targets: Target) -> None:
        """Refuse a task whose answers are none of these.

        Raises:
            ConfigError: with what the method can learn.
        """
        if self.task.spec.target not in targets:
            raise ConfigError(
                f"{method} learns {' or '.join(target.told for target in targets)}; the answer of "
                f"{type(self.task).__name__} is {self.task.spec.target.told}"
            )
        if not self.task.spec.readout.exclusive:
            raise ConfigError(
                f"{method} needs classes of which one holds; the regions of {type(self.task).__name__} overlap"
            )

    def seeded(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A network of the method's own, with initial weights that depend on the job's seed only.

        Raises:
            ConfigError: its state holds something else than its tensors, or a BatchNorm layer keeps no statistics.
        """
        seed_torch(self.seed, "initial weights")
        network = make()
        check_entries(network)
        check_statistics(network)
        return network


@dataclass(frozen=True)
class Served:
    """How a case is served: ``network`` turns its prepared inputs, N x ..., into outputs, N x ...; ``told``: what
    people are told of the choice, by column of predictions.csv."""

    network: Callable[[Tensor], Tensor]
    told: Mapping[str, str | float] = field(default_factory=dict)


_CHANGES = frozenset(
    ("models", "slots", "components", "local_round", "statistics", "refine", "refinements", "after_mixing", "anew")
)
"""What says of a method what leaves, and of what that depends: whoever overrides one of these, or what they call of
their class's own, is not covered by what its parent says of noise."""


def _changes(kind: type) -> bool:
    """Whether a class that says no ``cover`` of its own has another's code in place of the one that was covered: its
    own, or that of a class beside the one that said it."""
    said = next(each for each in kind.__mro__ if "cover" in vars(each))
    own = set(dir(said)) - set(dir(Method))
    return any(
        name in _CHANGES or (name in own and hasattr(type(value), "__get__"))
        for each in kind.__mro__
        if each not in said.__mro__
        for name, value in vars(each).items()
    )


@dataclass(frozen=True, kw_only=True)
class Method(Training):
    """A personalised federated learning method, as a frozen dataclass whose fields are the job's arguments;
    those of every method are ``Training``'s.

    A subclass says which networks a hospital holds (``models``), which of their tensors form which slot (``slots``;
    by default every network is a slot of the same name), how one local round trains them, and which models it deploys.
    """

    deploys: ClassVar[Mapping[str, str]]
    """Deployed model's name to the network that predicts; the first is the one a hospital would use."""

    after_steps: ClassVar[Collection[str]] = ()
    """Deployed models that are as the hospital's own steps left them when they are evaluated. The others are as they
    came out of the server's mixing, before they are trained again."""

    fine_tuned: ClassVar[str | None] = None
    """The deployed model, common to all hospitals, that every hospital also fine-tunes after the last round; the result
    is deployed as ``<name>_finetuned``. None: there is no such phase."""

    cover: ClassVar[Cover] = Cover(record=UNKNOWN, update=UNKNOWN)
    """What differential privacy does for this method. A class that changes what leaves, or what that depends on, says
    it anew; of one that does not, nothing is known (``_CHANGES``)."""

    passes: ClassVar[int | None] = 1
    """Passes over the data with noise in a round of record-level privacy; None: it depends on the arguments, so that
    ``DPSGD`` must be given its noise."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "cover" not in vars(cls) and _changes(cls):
            cls.cover = Method.cover

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(type(self).__name__, getattr(self, "deploys", None), self.after_steps, self.fine_tuned)
        if self.privacy is not None:
            self.cover.check(type(self).__name__, self.privacy.level)
        if self.start and self.start.frozen and type(self).joint is not Method.joint:
            raise ConfigError(
                f"{type(self).__name__} takes no frozen layers: its model of all hospitals' models is put together at "
                "the server, where frozen layers do not come"
            )

    def at(self, site: str) -> "Method":
        """The method as this hospital follows it; the same everywhere, unless the job says otherwise."""
        return self

    @property
    def named_hospitals(self) -> Collection[str]:
        """Hospitals that the arguments name; it is told where no hospital of a run has such a name."""
        return ()

    def check_length(self, rounds: int) -> None:
        """Refuse arguments with which a job of so many rounds would be over before they do anything.

        Raises:
            ConfigError: naming the argument, the value and what the rounds allow.
        """

    @abstractmethod
    def models(self, build: Build) -> dict[str, nn.Module]:
        """The networks a hospital holds; ``build.network()`` makes the task's."""

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        """Slot name to keys of ``models.state_dict()``; what is in no slot is private."""
        return {name: under(models, name) for name in models}

    def components(self) -> Mapping[str, Mixer | NoDefault]:
        """Every slot, to the server component that mixes it where the job names none; new ones at every call. By
        default the networks that are deployed are the slots, and each gets the mean."""
        return {name: Mean() for name in self.deploys.values()}

    def too_fine(self) -> str | None:
        """What it sends of which most numbers are smaller than encrypted ones can tell apart (2^-28), and what to take
        instead; None: nothing."""
        return None

    def checkpoints(self) -> list[str]:
        """Names of the checkpoints it uses, which every hospital's site file must declare; none by default."""
        return []

    def declared_checkpoints(self) -> list[str]:
        """The same with that of the start weights."""
        return list(dict.fromkeys([*self.checkpoints(), *([self.start.checkpoint] if self.start else [])]))

    def public_datasets(self) -> list[str]:
        """Names of the datasets that every hospital's site file must declare, with the same data; none by default."""
        return []

    @abstractmethod
    def local_round(self, site: Site) -> None:
        """Train ``site.models`` for one round."""

    def statistics(self, name: str, site: Site) -> dict[str, Tensor]:
        """What this hospital tells of its data when a server component wants the statistics ``name``: float64 tensors,
        of the same shapes everywhere. They leave the hospital: say so in the method's documentation.

        Raises:
            ConfigError: the method has no such statistics.
        """
        raise ConfigError(f"the server wants the statistics '{name}', which {type(self).__name__} does not have")

    diagnoses: ClassVar[Sequence[str]] = ()
    """Names of the numbers that ``diagnose`` may give."""

    def kept(self, models: nn.ModuleDict) -> list[str]:
        """Entries of travelling slots that a hospital also keeps on its own disk, as its training left them, because
        ``statistics`` reads them before the server's are there again; none by default."""
        return []

    probabilities: ClassVar[Sequence[str]] = ()
    """Slots that hold probabilities, N x C x ..., which sum to 1 over C: the server refuses a training's answer of
    anything else."""

    refined: ClassVar[Sequence[str]] = ()
    """Slots that are exchanged again within a round, ``refinements`` times after its training."""

    shown: ClassVar[Sequence[str]] = ()
    """Slots of which every hospital is sent all hospitals' mixed models with the first of these exchanges. A hospital
    then holds the others' models: say so in the method's documentation."""

    waiting: ClassVar[Sequence[str]] = ()
    """Slots of gradients, among these, whose training begins with such an exchange: with the training's answer a
    hospital sends zeros, whatever its data are, on which no noise is put."""

    delivered: ClassVar[Sequence[str]] = ()
    """Slots that every hospital is sent with these exchanges as the server mixed them for it, and does not answer with:
    what they hold fixed."""

    @property
    def anew(self) -> Sequence[str]:
        """Slots in which a hospital sends what it holds itself, whatever it was sent, instead of what its training made
        of that: codecs encode the difference to what the server knows of it already."""
        return ()

    def refinements(self, round_number: int, rounds: int) -> int:
        """How many further exchanges of the ``refined`` slots follow the training of this round of ``rounds``."""
        return 0

    def refine(self, site: Site, step: int) -> None:
        """This hospital's part in such an exchange, ``step`` counted from 1: change the refined slots' networks, or put
        into ``site.outbox`` what is to be sent instead of them. Optimisers kept across rounds must not be touched."""

    def after_mixing(self, site: Site) -> None:
        """Make of what the server sent the networks that predict; before they are evaluated. Nothing by default."""

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        """Outputs of the deployed model ``name``; the models are in evaluation mode."""
        outputs: Tensor = models[self.deploys[name]](inputs)
        return outputs

    def decide_cases(
        self, name: str, models: nn.ModuleDict, task: Task, samples: Samples, device: torch.device
    ) -> Tensor:
        """The task's decisions of the deployed model ``name`` about a non-empty split, as ``decide_samples`` has them;
        the models are in evaluation mode. Sample by sample, unless the method decides something of a case as a whole.
        """
        return decide_samples(task, partial(self.predict, name, models), samples, device)

    def serve(
        self, name: str, models: nn.ModuleDict, inputs: Tensor, shape: Sequence[int], device: torch.device
    ) -> Served:
        """What predicts a new case.

        Args:
            models: in evaluation mode, on the ``device``.
            inputs: N x ..., the case's prepared samples, on the CPU; slices may be larger than in training.
            shape: that of one sample in training.
        """
        return Served(lambda given: self.predict(name, models, given))

    by_case: ClassVar[bool] = False
    """Whether the network that predicts is chosen case by case, so that no export format can hold the model."""

    def study(self, models: nn.ModuleDict, task: Task, data: SiteData, device: torch.device) -> BaseModel | None:
        """What a hospital tells beside its metrics when an evaluation job tests a model of this method: numbers that
        tell of no single case. They leave the hospital: say so in the method's documentation. None: nothing."""
        return None

    def read_study(self, site: str, content: object) -> BaseModel:
        """What a hospital told, checked at the server.

        Raises:
            RefusedUpdate: naming the hospital.
        """
        raise RefusedUpdate(f"{site}: it sent a study, and {type(self).__name__} asks for none")

    def joint(self, roster: tuple[str, ...]) -> "JointModel | None":
        """The method of the one model that can be made of all hospitals' models after a job, which predicts for
        patients from anywhere. None: there is no such model."""
        return None

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """Further numbers about the models on a non-empty validation split, by their names among ``diagnoses``."""
        return {}

    def report_panels(self, known: AtServer) -> list[Panel]:
        """What the job's report shows of this method beside what it shows of all; by default the graph of every
        component that connects hospitals, and the curves of ``diagnoses``."""
        graphs = [GraphPanel(slot=slot, edges=list(pairs)) for slot, pairs in known.links.items()]
        title = "What the method measures of its models"
        curves = [CurvesPanel(title=title, names=list(self.diagnoses))] if self.diagnoses else []
        return [*graphs, *curves]


@dataclass(frozen=True, kw_only=True)
class JointModel(Method):
    """One model for patients from anywhere. It is not trained: it is put together from what a job left at the server.

    It holds a common model and every hospital's own, and chooses between them case by case; where the choice has a
    threshold, the hospitals' validation cases say which.

    Args:
        trained: the method that trained its networks.
        hospitals: whose personal models it holds, in the roster's order.
        gamma: the threshold, in [0, 1]; None: the choice needs none.
    """

    by_case: ClassVar = True

    trained: Method
    hospitals: tuple[str, ...]
    gamma: float | None

    @property
    @abstractmethod
    def labels(self) -> list[str]:
        """What the models to choose from are called towards people: the common one, then the hospitals'."""

    @abstractmethod
    def sources(self) -> dict[str, tuple[str, str | None]]:
        """Network to where it comes from: the trained method's network (and slot) of that name, and whose of them;
        None: the one that all hospitals have."""

    @abstractmethod
    def with_gamma(self, gamma: float | None) -> Self:
        """The same with another threshold.

        Raises:
            ConfigError: it is not in [0, 1], or the choice needs none.
        """

    @abstractmethod
    def study(self, models: nn.ModuleDict, task: Task, data: SiteData, device: torch.device) -> Study:
        """Validation and test with every threshold that is tried, and of the networks alone.

        Raises:
            ConfigError: the test split is empty.
        """

    @abstractmethod
    def read_study(self, site: str, content: object) -> Study: ...

    @abstractmethod
    def choose_gamma(self, studies: Mapping[str, Study], measure: Measure) -> Found:
        """The threshold with the best validation score over the hospitals; no test counts.

        Args:
            measure: which scores are better.

        Raises:
            MedPFLError: no hospital that took part in training has validation cases.
        """
