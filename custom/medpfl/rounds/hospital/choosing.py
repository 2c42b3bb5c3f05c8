# SPDX-License-Identifier: Apache-2.0
"""The models that a hospital holds at the end of a job: each is tested and kept, and the one that the hospital's own
validation cases support is kept once more, as "chosen"."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from medpfl.core.copied import copied
from medpfl.core.errors import ConfigError
from medpfl.data.samples import SiteData
from medpfl.deployed.choice import Choice, choose
from medpfl.deployed.evaluate import Origin, evaluate_test, save_deployed, sheet_of_validation
from medpfl.deployed.model_file import Chosen, predicting
from medpfl.methods.contract import Method
from medpfl.methods.references import AVERAGE, CHOSEN, LOCAL, averaged
from medpfl.privacy.contract import Spent
from medpfl.results.line import ChosenModel, MetricLine
from medpfl.results.schema import number
from medpfl.rounds.hospital.details import Details, GroupScore, score_groups
from medpfl.rounds.hospital.pictures import pictures_of
from medpfl.rounds.hospital.scoring import line_of
from medpfl.tasks.contract import Evaluation, Task
from medpfl.tasks.metrics.calibration import Calibration
from medpfl.tasks.metrics.certainty import LEAST_PATIENTS, Certainty, certainty_of
from medpfl.tasks.metrics.digits import rounded
from medpfl.tasks.metrics.operating import OperatingPoint, operating_points
from medpfl.tasks.metrics.sheet import Sheet
from medpfl.tasks.together import averaged_as

Tested = tuple[Evaluation, Calibration | None]


def local_first(methods: Sequence[Method]) -> list[Method]:
    """The others' gains are over the local model."""
    return sorted(methods, key=lambda method: LOCAL not in method.deploys)


@dataclass(frozen=True)
class _Held:
    """A model of its best round: what predicts, what it says of the validation cases (None where there are none), and
    its test (None: it was not tested)."""

    method: Method
    name: str
    networks: nn.ModuleDict
    round: int
    sheet: Sheet | None
    tested: Tested | None = None


class Holding:
    """The models of one hospital at the end of a job.

    Args:
        folder: where they are kept.
        job, site, seed: of the run; ``hospitals``: how many there are in the federation.
        methods: the job's and the references; without a local model there is nothing to choose over.
        least: of patients, whose scores may leave (the policy's ``least_scored``).
        spent: what the noise on what left has cost.
    """

    def __init__(
        self, task: Task, data: SiteData, device: torch.device, folder: Path, job: str, site: str, seed: int,
        methods: Sequence[Method], hospitals: int, least: int, spent: Spent | None = None,
    ):  # fmt: skip
        self._task, self._data, self._device = task, data, device
        self._folder, self._job, self._site, self._seed = folder, job, site, seed
        self._hospitals, self._least, self._spent = hospitals, least, spent
        self._chooses = any(LOCAL in method.deploys for method in methods)
        self._held: dict[str, _Held] = {}
        self._local: dict[str, Sheet | None] = {}
        self._latest: tuple[str, int, Tested] | None = None

    def test(
        self,
        method: Method,
        name: str,
        models: nn.ModuleDict,
        networks: nn.ModuleDict,
        choice: Literal["best", "last"],
        round_number: int,
        deployed: str,
    ) -> MetricLine:
        """Test a model once and keep it.

        Args:
            name: the method's own name of the model; ``deployed``: what it is called in the results.
            models: all networks, as they are of that round; ``networks``: those of the method among them.
        """
        if self._latest is None or self._latest[:2] != (deployed, round_number):
            tested = evaluate_test(method, name, models, self._task, self._data, self._device)
            self._latest = deployed, round_number, tested
        tested = self._latest[2]  # of the last round, too, where that is the best one
        if deployed == LOCAL:
            self._local[choice] = tested[0].sheet
        if choice == "best" and self._chooses:
            shape = list(self._data.input_shape)
            mine = copied(predicting(method, name, networks, shape))
            self._held[deployed] = replace(self._hold(method, name, mine, round_number), tested=tested)
        return self._keep(deployed, method, name, networks, choice, round_number, tested, None)

    def _hold(self, method: Method, name: str, networks: nn.ModuleDict, round_number: int) -> _Held:
        sheet = None
        if len(self._data.splits["validation"]):
            sheet = sheet_of_validation(method, name, networks, self._task, self._data, self._device)
        return _Held(method, name, networks, round_number, sheet)

    def _keep(
        self, deployed: str, method: Method, name: str, networks: nn.ModuleDict, choice: Literal["best", "last"],
        round_number: int, tested: Tested, chosen: Chosen | None,
    ) -> MetricLine:  # fmt: skip
        model = chosen.model if chosen else deployed
        certainty = self._certainty(model, choice, tested[0].sheet)
        origin = Origin(self._job, self._site, deployed, choice, round_number, self._spent)
        save_deployed(
            self._folder, origin, method, name, networks, self._task, self._data, self._hospitals, tested, certainty,
            chosen,
        )  # fmt: skip
        line = line_of(model, "test", round_number, tested[0])
        return line.model_copy(update={"choice": choice, "certainty": certainty})

    def _certainty(self, model: str, choice: str, sheet: Sheet | None) -> Certainty | None:
        if sheet is None:
            return None
        local = None if model == LOCAL else self._local.get(choice)
        return certainty_of(sheet, local, self._task.measure, self._least, self._seed, self._site, "test")

    def choose(self, last: int) -> ChosenModel | None:
        """The model that the validation cases support, kept as "chosen"; None where there is none to choose over.

        Args:
            last: the last round, of which an average is said to be.
        """
        if LOCAL not in self._held or len(self._held) < 2:
            return None
        self._average(last)
        sheets = {name: held.sheet for name, held in self._held.items() if held.sheet is not None}
        found = Choice(LOCAL, {}, 0)
        if sheets:
            found = self._bounded(choose(sheets, LOCAL, self._task.measure, self._seed, self._site, "validation"))
        taken = self._held[found.model]
        tested = taken.tested or evaluate_test(
            taken.method, taken.name, taken.networks, self._task, self._data, self._device
        )
        said = Chosen(
            model=found.model,
            patients=found.patients,
            best=found.best,
            gain=number(found.gain),
            error=number(found.error),
            needed=number(found.needed),
            interval=found.interval,
            candidates={name: number(score) for name, score in found.scores.items()},
            operating=self._operating(taken.sheet, tested[0].sheet),
        )
        self._detail(taken, tested[0])
        line = self._keep(CHOSEN, taken.method, taken.name, taken.networks, "best", taken.round, tested, said)
        told = found.patients >= max(self._least, LEAST_PATIENTS) and said.gain is not None
        gain = rounded(found.gain) if told else None
        return ChosenModel(test=line, gain=gain, interval=found.interval if told else None)

    def _detail(self, taken: _Held, tested: Evaluation) -> None:
        """Keep what only the hospital's own page shows of the chosen model."""
        groups: tuple[GroupScore, ...] = ()
        if tested.sheet is not None:
            seeds = (self._seed, self._site, "test")
            groups = score_groups(tested.sheet, self._data.groupings, self._task.measure, self._least, *seeds)
        pictures = pictures_of(taken.method, taken.name, taken.networks, self._task, self._data, self._device, tested)
        Details(subgroups=groups, pictures=pictures).write(self._folder / f"{CHOSEN}-best.safetensors")

    def _operating(self, validation: Sheet | None, test: Sheet | None) -> tuple[OperatingPoint, ...]:
        if validation is None or test is None:
            return ()
        return operating_points(self._task.spec.target, validation, test)

    def _bounded(self, found: Choice) -> Choice:
        """With few patients a gain and its errors reach further than scores can differ; the server refuses that."""
        least, largest = next(metric.range for metric in self._task.tested if metric.name == self._task.score)
        if found.interval is None:
            return found
        low, high = (min(max(end, least - largest), largest - least) for end in found.interval)
        return replace(found, interval=(low, high))

    def _average(self, last: int) -> None:
        """A further candidate: the average of all whose validation score is defined."""
        members = {
            name: (held.method, held.name, held.networks)
            for name, held in self._held.items()
            if held.sheet is not None and math.isfinite(held.sheet.score)
        }
        if len(members) > 1:
            if AVERAGE in members:
                raise ConfigError(f"a method deploys a model called '{AVERAGE}', which is what their average is called")
            method, name, networks = averaged(members, averaged_as(self._task.spec))
            self._held[AVERAGE] = self._hold(method, name, networks, last)
