# SPDX-License-Identifier: Apache-2.0
"""The time until an event (death, relapse), where many patients were last seen before it came: Cox's model."""

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from medpfl.core.errors import ConfigError, DataError
from medpfl.core.extras import require
from medpfl.data.numbers import in_full
from medpfl.data.preparation import Row
from medpfl.data.samples import Samples, SiteData
from medpfl.data.target import Target
from medpfl.models.outputs import check_outputs
from medpfl.tasks.any_input import AnyInput
from medpfl.tasks.contract import Task
from medpfl.tasks.losses.cox import cox
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.survival import BrierAt, CIndex, IntegratedBrier, survivals

_MOST_HORIZONS = 100
"""A hospital holds the risk of each of its cases at each of them, several times over."""
_LARGEST = 1e300
"""Of cumulative hazards; a model's file holds numbers."""


@dataclass(frozen=True, kw_only=True)
class Survival(AnyInput):
    """The logarithm of a case's hazard ratio, by Cox's proportional hazards (J. R. Stat. Soc. B, 1972); and the risk
    that the event has come by each of the ``horizons``.

    The networks learn and share hazard ratios only. How frequent events are at a hospital, its baseline, is fitted
    there on the training part of every deployed model (Breslow's estimator), stays in the model's file, and is in no
    message but in what the Brier scores tell of it.

    Args:
        horizons: at most 100 times of interest, ascending, in the unit of the site files' times.
        unit: of the times, for cards; at most 20 characters.
        score: metric that chooses the best round: c_index.
        more_metrics: further metrics by which models are tested: integrated_brier, over the horizons, and brier_1,
            brier_2, ... at each of them.
    """

    horizons: tuple[float, ...]
    unit: str = ""
    score: str = "c_index"
    more_metrics: tuple[str, ...] = ()
    metrics: ClassVar[tuple[Metric, ...]] = (CIndex(),)
    fits_after: ClassVar[bool] = True
    by_batch: ClassVar[bool] = True
    _baseline: tuple[float, ...] = field(default=(), init=False, repr=False, compare=False)
    """Its cumulative hazard at each horizon."""

    def __post_init__(self) -> None:
        require("torchsurv", "survival", "the task Survival")
        object.__setattr__(self, "horizons", tuple(self.horizons))  # JSON has lists
        ascending = all(a < b for a, b in zip((0.0, *self.horizons), self.horizons, strict=False))
        if not self.horizons or not ascending:
            raise ConfigError(f"Survival's horizons must be ascending times above 0, got {list(self.horizons)}")
        if len(self.horizons) > _MOST_HORIZONS:
            raise ConfigError(f"Survival takes at most {_MOST_HORIZONS} horizons, got {len(self.horizons)}")
        if len(self.unit) > 20 or not self.unit.isprintable():
            raise ConfigError(f"Survival's unit must have at most 20 printable characters, got {self.unit!r}")
        super().__post_init__()
        if self.score not in {metric.name for metric in self.metrics}:
            raise ConfigError(
                f"Survival's score must be c_index, got '{self.score}': the Brier score needs a baseline, which is "
                "fitted for deployed models only"
            )

    @property
    def target(self) -> Target:
        return Target.SURVIVAL

    @property
    def offered(self) -> tuple[Metric, ...]:
        each = (BrierAt(number, self.horizons, self._baseline) for number in range(1, len(self.horizons) + 1))
        return IntegratedBrier(self.horizons, self._baseline), *each

    def informed(self, data: SiteData) -> Task:
        if not bool(data.splits["train"].targets[:][:, 1].any()):
            sentence = "no training case has the event, so no hazard can be learnt"
            raise DataError(sentence, public=sentence)
        return super().informed(data)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The negative partial log likelihood, divided by the batch's number of events; of ties by Efron's method. The
        risk sets are the batch's. A batch without an event says nothing: its loss is 0, and so is its gradient.

        Args:
            outputs: B x 1.
            targets: B x 2, time and event.
        """
        from torchsurv.loss.cox import neg_partial_log_likelihood

        check_outputs(outputs)
        hazard, time, event = outputs[:, 0].float(), targets[:, 0].float(), targets[:, 1] > 0
        if hazard.device.type != "cpu":  # there it would take longer, and its sums are other ones
            return cox(hazard, time, event)
        if len(hazard) < 2 or not bool(event.any()) or not bool(hazard.isfinite().all()):
            return hazard.sum() * 0  # NaN where an output is, as of other losses
        # Who was last seen when an event came was at risk then. Where no two events are tied torchsurv takes for the
        # risk set what stands behind the event, so those who were last seen must stand there: places in the order, of
        # events the even ones, say the same as times.
        place = 2 * torch.unique(time, return_inverse=True)[1] + (~event).long()
        with _quiet():
            total: Tensor = neg_partial_log_likelihood(hazard, event, place.float(), reduction="sum")
        return total / event.sum()

    def importance(self, targets: Tensor) -> Tensor:
        """By the likelihood's terms where all hazards are alike: that of an event is of its case and, by equal shares,
        of all that were at risk then. Who was last seen before the first event is in none."""
        time, event = targets[:, 0].contiguous(), (targets[:, 1] > 0).double()
        in_order, order = time.sort()
        at_risk = len(time) - torch.searchsorted(in_order, time)
        until = torch.searchsorted(in_order, time, right=True) - 1
        shares = (event / at_risk)[order].cumsum(dim=0)[until]
        weights = shares + event * (1 - 2 / at_risk)  # of its own term the case has 1 less its share
        return weights.clamp(min=0) * (len(time) / event.sum().clamp(min=1))

    def decide(self, outputs: Tensor) -> Tensor:
        """N logarithms of hazard ratios."""
        return outputs[:, 0].float()

    def fit_after(self, decisions: Tensor, samples: Samples) -> tuple[float, ...]:
        """The baseline's survival at each horizon, for people, and its cumulative hazard: Breslow's estimator on these
        (training) samples. Empty where none of them has the event, as may be where a given model is tested, and where a
        hazard is no number.

        Cox's likelihood leaves open where the ratios lie, and a network may be surer than the data are. Where
        ratios are small or large, the survival of a case whose ratio is 1 is 0 or 1 to all digits; the cumulative
        hazard tells what it is of the others.
        """
        time, event = samples.targets[:].unbind(dim=1)
        if not bool((event > 0).any()) or not bool(decisions.isfinite().all()):
            return ()
        order = time.argsort(descending=True)
        last = torch.searchsorted(-time[order], -time, right=True) - 1  # of all who were seen as long, the last place
        at_risk = decisions.double()[order].logcumsumexp(dim=0)[last]
        came = [(event > 0) & (time <= horizon) for horizon in torch.tensor(self.horizons)]
        hazards = [min(float((-at_risk[mine]).exp().sum()), _LARGEST) for mine in came]
        return (*(round(math.exp(-hazard), 8) for hazard in hazards), *hazards)

    def after_fit(self, values: Sequence[float]) -> Task:
        count = len(self.horizons)
        if len(values) not in (count, 2 * count):
            return self
        hazards = values[count:] or [-math.log(value) if value > 0 else _LARGEST for value in values]  # of older files
        mine = dataclasses.replace(self)
        object.__setattr__(mine, "_baseline", tuple(hazards))
        return mine

    def answer(self, decisions: Tensor, class_names: Sequence[str]) -> dict[str, str | float]:
        """The hazard ratio and, where the model's hospital fitted a baseline, the risk up to each horizon."""
        hazard = float(decisions.double().mean())
        told: dict[str, str | float] = {"log_hazard_ratio": round(hazard, 6)}
        (known,) = survivals(self._baseline, torch.tensor([hazard], dtype=torch.float64))
        for horizon, survival in zip(self.horizons, known, strict=False):
            told[f"risk_{in_full(horizon)}"] = round(1 - float(survival), 6)
        return told

    def told(self, decisions: Tensor, samples: Samples) -> list[Row]:
        targets = samples.targets[:].tolist()
        return [
            {"case": name, "time": targets[case][0], "event": int(targets[case][1]), **self.answer(found, ())}
            for case, (name, found) in enumerate(zip(samples.names, torch.split(decisions, 1), strict=True))
        ]

    @property
    def reading(self) -> str:
        if not self._baseline:
            return "the logarithm of the hazard ratio; survival is the baseline's to the power of the ratio"
        each = zip(self.horizons, self._baseline, strict=True)
        told = ", ".join(f"{hazard:g} at {in_full(at)}" for at, hazard in each)
        return (
            "the logarithm of the hazard ratio; survival is the exponential of minus the ratio times the baseline's "
            f"cumulative hazard, which is {told}{f' {self.unit}' if self.unit else ''}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torchsurv's news that times are tied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*[Tt]ies", UserWarning)
        yield
