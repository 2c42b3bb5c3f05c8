# SPDX-License-Identifier: Apache-2.0
"""A number: of a row, a window of a recording or an image."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.data.numbers import in_full
from medpfl.data.target import Target
from medpfl.models.outputs import check_outputs
from medpfl.tasks.any_input import AnyInput
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.numbers import number_metrics

_ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": nn.functional.mse_loss,
    "absolute": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
}


@dataclass(frozen=True, kw_only=True)
class Regression(AnyInput):
    """One number a case.

    The network learns (number - centre) / spread. Both are the job's, because models whose outputs mean different
    numbers at different hospitals could not be averaged; about the mean and the standard deviation that are expected
    over all hospitals do.

    Args:
        centre: a typical value.
        spread: by how much values typically differ from it, > 0.
        unit: of the number, for tables and cards; at most 20 characters.
        error: what training descends: the mean of the "squared" or "absolute" error or of Huber's loss, which is
            squared up to 1 (one spread) and grows linearly beyond it.
        score: metric that chooses the best round: mae, rmse or r2.
    """

    centre: float = 0.0
    spread: float = 1.0
    unit: str = ""
    error: Literal["squared", "absolute", "huber"] = "squared"
    score: str = "mae"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.spread <= 0:
            raise ConfigError(f"Regression's spread must be above 0, got {self.spread}")
        if len(self.unit) > 20 or not self.unit.isprintable():
            raise ConfigError(f"Regression's unit must have at most 20 printable characters, got {self.unit!r}")

    @property
    def metrics(self) -> tuple[Metric, ...]:  # type: ignore[override]
        return number_metrics(self.unit)

    @property
    def target(self) -> Target:
        return Target.VALUE

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """In float32 whatever the outputs are: in half precision 1007 would be 1008, and 70000 infinite."""
        check_outputs(outputs)
        expected = (targets.float() - self.centre) / self.spread
        return _ERRORS[self.error](outputs[:, 0].float(), expected)

    def decide(self, outputs: Tensor) -> Tensor:
        """N numbers, in the unit of the targets."""
        return outputs[:, 0].float() * self.spread + self.centre

    @property
    def reading(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        return f"{in_full(self.spread)} times the output plus {in_full(self.centre)}{unit}"
