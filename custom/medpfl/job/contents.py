# SPDX-License-Identifier: Apache-2.0
"""A job as it was read: what it says, with its components built."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from medpfl.core.errors import ConfigError, shown
from medpfl.core.mixers import Mixer
from medpfl.job.codecs import Codecs
from medpfl.job.declared import name_of
from medpfl.job.sampling import check_sampling
from medpfl.job.settings import EvaluationSettings, Settings
from medpfl.job.slots import mixers_of
from medpfl.methods.contract import Method
from medpfl.privacy.linear import check_encryptable
from medpfl.results.callbacks import Callback
from medpfl.tasks.contract import Task


def check_kind(value: object, kind: type, what: str) -> None:
    """Raises ConfigError: it is something else."""
    if isinstance(value, type):
        raise ConfigError(f"{what} must be an object, got the class {value.__name__}: call it, {value.__name__}(...)")
    if not isinstance(value, kind):
        raise ConfigError(f"{what} must be a {kind.__name__}, got {shown(value)}")


@dataclass(frozen=True)
class Job:
    """A job that trains.

    Attributes:
        min_clients: how many hospitals must answer for a round to count.
        components: slot to the server component that the job names in place of the usual one.
        trackers: are told at the server of every round's end and the job's.
        filters: full class names of the filters of other people that the job puts at the hospitals; FLARE builds them.
        mixers: slot to the component that mixes it, for every slot, the references' first.

    Raises:
        ConfigError: its name cannot be a folder's, or what is given is of another kind;
            there is no such reference or slot, a slot has no component (``mixers_of``), the job is too short
            for what the method or a component does in it (``check_length``), it encrypts what the server must see
            (``check_encryptable``) or what is too fine for it, or there are start weights for a network that is only
            planned when the job starts, or fewer hospitals are asked in a round than must answer, or a codec goes by
            losses that nobody is told.
    """

    name: str
    min_clients: int
    settings: Settings
    components: dict[str, Mixer] = field(compare=False)
    method: Method
    task: Task
    codecs: Codecs | None = None
    trackers: tuple[Callback, ...] = ()
    filters: tuple[str, ...] = ()
    mixers: dict[str, Mixer] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name_of(self.name, "the job's name")
        for what, kind in (("settings", Settings), ("method", Method), ("task", Task)):
            check_kind(getattr(self, what), kind, f"a job's {what}")
        check_kind(self.components, Mapping, "a job's components")
        for slot, mixer in self.components.items():
            check_kind(mixer, Mixer, f"component '{slot}'")
        if self.min_clients < 1:
            raise ConfigError(f"a job's min_clients must be at least 1, got {self.min_clients}")
        if self.task.to_be_planned and self.method.start is not None:
            raise ConfigError(
                "start weights are of a known network, and this job's is planned when it starts: leave 'start' out, or "
                "take the network that 'medpfl plan' writes"
            )
        if self.method.privacy and self.codecs and self.codecs.from_site and self.codecs.from_site.adapts:
            raise ConfigError(
                f"{type(self.codecs.from_site).__name__} goes by the training losses, which are withheld where a job "
                "asks for privacy: give DAdaQuant a fixed number of 'levels'"
            )
        check_sampling(self.settings, self.min_clients)
        object.__setattr__(self, "mixers", mixers_of(self.method, self.settings.references, self.components))
        self.method.check_length(self.settings.rounds)
        for mixer in self.mixers.values():
            mixer.check_length(self.settings.rounds)
        if self.settings.encryption is not None:
            check_encryptable(self.mixers, self.settings.clip_updates is not None, self.codecs is not None)
            if (too_fine := self.method.too_fine()) is not None:
                raise ConfigError(
                    "the controller's 'encryption' rounds numbers to multiples of 2^-28, and "
                    f"{type(self.method).__name__} sends {too_fine}"
                )


@dataclass(frozen=True)
class EvaluationJob:
    """A job that evaluates a given model; ``model`` is its file in the job folder."""

    name: str
    min_clients: int
    settings: EvaluationSettings
    method: Method
    task: Task
    model: Path
    trackers: tuple[Callback, ...] = ()
