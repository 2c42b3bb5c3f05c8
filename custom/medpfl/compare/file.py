# SPDX-License-Identifier: Apache-2.0
"""The comparison file: what it may say, read strictly."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationError,
    model_validator,
)

from medpfl.component import construct, import_named
from medpfl.core.errors import ConfigError, meant
from medpfl.data.untrusted import Exponents, load_yaml
from medpfl.methods.references import AVERAGE
from medpfl.methods.training import Training

LOCAL, FEDAVG, FINE_TUNED, POOLED = "Local", "FedAvg", "FedAvg + fine-tuning", "Pooled"
BEFORE_MEAN = "FedAvg before the mean"
REFERENCES = (LOCAL, FEDAVG, BEFORE_MEAN, FINE_TUNED, POOLED)
"""The rows of a comparison that are no method of its file, in their order."""
SHARED = ("epochs", "steps", "batch_size", "accumulate", "start")
"""Arguments that are the same for every method of a comparison."""
_TRAINING = (
    "batch_size", "lr", "optimizer", "schedule", "clip_gradient", "accumulate", "optimizer_state", "precision",
    "start",
)  # fmt: skip

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .+_()-]{0,39}$")]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Arguments = dict[str, JsonValue]
"""Argument to value."""
Values = Annotated[list[JsonValue], Field(min_length=1)]
Number = Annotated[int, Field(strict=True)] | float


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Range(_Strict):
    """Values of an argument from ``low`` to ``high``, both included: whole numbers if both are. ``log``: as many are
    tried between 0.001 and 0.01 as between 0.01 and 0.1."""

    low: Number
    high: Number
    log: bool = False

    @model_validator(mode="after")
    def _has_values(self) -> Self:
        if self.low >= self.high or (self.log and self.low <= 0):
            raise ValueError(f"'low' must be below 'high', and above 0 with 'log', got {self.low} and {self.high}")
        return self

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


Sweep = Annotated[dict[str, Values], Field(max_length=1)]
_TAGS = "its list", "its range"
Axis = Annotated[
    Annotated[Values, Tag(_TAGS[0])] | Annotated[Range, Tag(_TAGS[1])],
    Discriminator(lambda found: _TAGS[isinstance(found, dict | Range)]),
]
Axes = dict[str, Axis]
"""Argument to the values to try. ``lr``: the method's; ``model.lam``: the server component's of slot "model"."""


class Component(_Strict):
    """A class by its full name, with its arguments."""

    path: str
    args: Arguments = {}


class CodecsEntry(_Strict):
    """Codecs of the messages to the hospitals and from them; a direction without one is not encoded."""

    to_site: Component | None = None
    from_site: Component | None = None


class MethodEntry(Component):
    """A method; ``slots`` names server components for slots that shall not have the method's own (else the mean);
    ``codecs`` encode its messages; ``tune`` is what is searched for this method beside what is searched for all;
    ``sweep`` one argument with the values that are compared, each as a method of its own ("FedSM personal.lam 0.5");
    ``chosen`` says, for the pages, what was tried before this comparison to find its arguments."""

    slots: dict[str, Component] = {}
    codecs: CodecsEntry | None = None
    tune: Axes = {}
    sweep: Sweep = {}
    chosen: str = Field(default="", exclude_if=lambda found: not found)

    @property
    def swept(self) -> list[tuple[str, JsonValue]]:
        """Argument and value of each point of the sweep."""
        return [(key, value) for key, values in self.sweep.items() for value in values]


class Tuning(_Strict):
    """A search of arguments with the same budget for every method, the references included.

    Attributes:
        budget: candidates a method. Of a larger grid so many are drawn; a smaller one is refused. Where an argument has
            a range, the first third is drawn at random and the others follow from the scores so far.
        seeds: seeds of the searching runs, none of them among the comparison's ``seeds``.
        tune: what is searched for every method; a method's own ``tune`` goes before it.
    """

    budget: Annotated[int, Field(ge=2)]
    seeds: Annotated[list[Seed], Field(min_length=1)]
    tune: Axes


class Comparison(_Strict):
    """What a comparison file says.

    Attributes:
        rounds, finetune: as a job's controller takes them.
        seeds: one run a method and seed; a seed changes the initial weights and the order of the batches.
        splits: seeds of the site files' split rules, in place of their own, or numbers of their folds; each is combined
            with every seed.
        steps, epochs: local training a round, of every method; ``steps`` or ``epochs``, not both.
        lr, batch_size: of every method; a method may have another lr in its ``args``.
        optimizer, schedule, clip_gradient, accumulate, optimizer_state, precision: of every method, as a job has them
            (``methods.training.Training``); a method may have others in its ``args``, but not another ``accumulate``.
        start: the weights with which every method's networks begin, as a job has them; all site files declare them.
        pooled: also train one model on all hospitals' data together.
        unseen: also repeat every run without each hospital in turn, and test there.
        examples: show test cases with their segmentations on the page: images of patients.
        tuning: search arguments first.
        target: the validation score whose round and bytes are reported; default: what Local reaches at its best.
        demo: the demo data to use where no site files are given.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$")]
    task: Component
    rounds: PositiveInt
    seeds: Annotated[list[Seed], Field(min_length=1)]
    methods: dict[Name, MethodEntry]
    splits: Annotated[list[Seed], Field(min_length=2)] | None = None
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    lr: PositiveFloat = 1e-3
    batch_size: PositiveInt = 8
    optimizer: JsonValue = "adam"
    schedule: JsonValue = None
    clip_gradient: JsonValue = None
    accumulate: JsonValue = None
    optimizer_state: JsonValue = None
    precision: JsonValue = None
    start: JsonValue = None
    finetune: Annotated[int, Field(ge=1)] = 5
    pooled: bool = False
    unseen: bool = False
    examples: bool = False
    tuning: Tuning | None = None
    target: float | None = None
    demo: str | None = None

    @property
    def training(self) -> Arguments:
        """The arguments of every method that the file sets, the local work in a round left out."""
        return {name: value for name in _TRAINING if (value := getattr(self, name)) is not None}

    @property
    def compared(self) -> dict[str, tuple[str, Arguments]]:
        """Name of each method that is compared to its name in the file and the arguments that a sweep sets."""
        found: dict[str, tuple[str, Arguments]] = {}
        for name, entry in self.methods.items():
            found |= {swept_name(name, key, value): (name, {key: value}) for key, value in entry.swept} or {
                name: (name, {})
            }
        return found


def swept_name(name: str, argument: str, value: JsonValue) -> str:
    """ "FedSM personal.lam 0.5" """
    return f"{name} {argument} {value}"


def load_comparison(path: Path) -> Comparison:
    """Read a comparison file (YAML, or JSON, which is YAML too).

    Raises:
        ConfigError: one sentence with the file, the key, expected and got.
    """
    try:
        content = load_yaml(path, Exponents)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    return comparison_of(content, path)


def comparison_of(content: object, path: Path | str) -> Comparison:
    """The comparison that a file's content says.

    Args:
        path: where it comes from, for sentences.

    Raises:
        ConfigError: as ``load_comparison``.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping with 'name', 'task', 'rounds', 'seeds' and 'methods'")
    try:
        found = Comparison.model_validate(content, strict=True)
    except ValidationError as error:
        problem = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")  # else misspelt is missing
        place = ".".join(str(part) for part in problem["loc"] if part not in _TAGS)
        if problem["type"] == "extra_forbidden":
            raise ConfigError(f"{path}: unknown key '{place}'{meant(place, Comparison.model_fields)}") from error
        if problem["type"] == "missing":
            raise ConfigError(f"{path}: '{place}' is missing") from error
        text = problem["msg"].removeprefix("Value error, ")
        text = text[0].lower() + text[1:]
        raise ConfigError(f"{path}: '{place}': {text}, got {problem['input']!r}") from error
    _check(found, path)
    return found


def _check(file: Comparison, path: Path | str) -> None:
    searching = file.tuning.seeds if file.tuning else []
    for key, values in (("seeds", file.seeds), ("splits", file.splits or []), ("tuning.seeds", searching)):
        if len(set(values)) < len(values):
            raise ConfigError(f"{path}: '{key}' names a seed twice: {values}")
    if file.steps is not None and file.epochs is not None:
        raise ConfigError(f"{path}: give 'steps' or 'epochs', not both: it is the local training of every method")
    import_named(file.training)
    construct(Training, file.training, str(path))
    if file.demo is not None:
        from medpfl.demo.known import DEMOS

        if file.demo not in DEMOS:
            raise ConfigError(f"{path}: 'demo' must be one of {', '.join(DEMOS)}; got '{file.demo}'")
    for name, entry in file.methods.items():
        if name in REFERENCES:
            how = "'pooled: true' adds it" if name == POOLED else "it is in every comparison already"
            raise ConfigError(f"{path}: '{name}' is taken: {how}; give your method another name")
        if name == AVERAGE:
            raise ConfigError(
                f"{path}: '{name}' is what the average of a hospital's models is called; give your method another name"
            )
        for key, given in (("args", entry.args), ("tune", entry.tune), ("sweep", entry.sweep)):
            _same_for_all(path, f"methods.{name}.{key}", given)
        if len(set(map(repr, entry.swept))) < len(entry.swept):
            raise ConfigError(f"{path}: methods.{name}.sweep names a value twice")
        _each_once(path, f"methods.{name}.tune", entry.tune)
        if entry.sweep and entry.tune.keys() & entry.sweep.keys():
            raise ConfigError(f"{path}: methods.{name}: what is swept cannot be tuned: {', '.join(entry.sweep)}")
        if entry.tune and file.tuning is None:
            raise ConfigError(f"{path}: methods.{name}.tune needs 'tuning' with a budget and seeds of its own")
    if len(file.compared) < sum(len(entry.swept) or 1 for entry in file.methods.values()):
        raise ConfigError(f"{path}: a point of a sweep has the name of another method")
    if file.tuning:
        _same_for_all(path, "tuning.tune", file.tuning.tune)
        _each_once(path, "tuning.tune", file.tuning.tune)
        if shared := sorted(set(file.tuning.seeds) & set(file.seeds)):
            raise ConfigError(
                f"{path}: seed {shared[0]} is in 'tuning.seeds' and in 'seeds'; what is chosen with a seed "
                "may not be judged with it"
            )


def _same_for_all(path: Path | str, where: str, args: Collection[str]) -> None:
    for key in SHARED:
        if key in args:
            raise ConfigError(f"{path}: {where} may not set '{key}': it is the same for every method of a comparison")


def _each_once(path: Path | str, where: str, axes: Axes) -> None:
    """Raises ConfigError for a value that would count twice in a budget that is the same for every method."""
    for name, values in axes.items():
        if not isinstance(values, Range) and len(set(map(repr, values))) < len(values):
            raise ConfigError(f"{path}: {where}.{name} names a value twice: {values}")
