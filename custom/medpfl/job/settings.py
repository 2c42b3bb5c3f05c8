# SPDX-License-Identifier: Apache-2.0
"""The controller's arguments: everything about a job that the server decides."""

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError

_LARGEST = 2**63
_LONGEST = 366 * 24 * 3600.0
"""Seconds. FLARE sends a task with its timeout as 64 bits; with a larger one it sends none, and says nothing."""


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """Arguments of the controller, in the job's ``config_fed_server.json``.

    Args:
        rounds: number of rounds, >= 1.
        references: what rides along beside the method, on the same batches: "local", "fedavg", both or neither.
        seed: every random number of the job derives from it.
        threads: torch threads at every hospital; 1 makes results equal bit for bit on one kind of machine.
        finetune: local rounds of the FedAvg + fine-tuning reference, >= 0 (0: leave it out).
        train_timeout: seconds a round may take before hospitals that have not answered are left out.
        init_timeout: seconds for reading the data and building the models.
        grace: seconds the remaining hospitals get once ``min_clients`` (of the job's meta.json) have answered.
        patience: rounds in a row a hospital may miss before it is only probed and not waited for.
        most_samples: training samples; a hospital that says it has more takes no part.
        clip_updates: how many times as long as the median of the others' updates one may be; a longer one is shortened
            to that. None: it counts as it is. Either way an event tells of one that is more than 10 times as long.
        hospitals_per_round: how many hospitals a round asks, drawn anew for each by the seed: a number of at least
            ``min_clients``, or a share of them in (0, 1), rounded up. None: all.
        encryption: "ckks": hospitals encrypt what they send, with a key that the server does not have, and the server
            mixes ciphertexts. None: it sees their models.
        schema: digest of the dataset's schema that every hospital's declaration must follow, 64 hexadecimal digits, as
            ``medpfl job new --schema FILE`` writes it. None: hospitals are compared with each other alone.
    """

    rounds: int
    references: tuple[str, ...] = ("local", "fedavg")
    seed: int = 0
    threads: int = 1
    finetune: int = 5
    train_timeout: float = 3600.0
    init_timeout: float = 3600.0
    grace: float = 600.0
    patience: int = 2
    most_samples: int = 10_000_000
    clip_updates: float | None = None
    hospitals_per_round: int | float | None = None
    encryption: Literal["ckks"] | None = None
    schema: str | None = None

    gone: ClassVar = {
        "slots": "remove it, for slots follow from the method; where 'local' or 'fedavg' was not among them, add "
        "'references' with those that were; and keep only components that differ from the method's own"
    }

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("threads", 1), ("finetune", 0), ("patience", 1), ("most_samples", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"the controller's {name} must be at least {least}, got {getattr(self, name)}")
        for name in ("rounds", "seed", "threads", "finetune", "patience", "most_samples"):
            if not -_LARGEST <= getattr(self, name) < _LARGEST:  # numbers in messages have 64 bits
                raise ConfigError(f"the controller's {name} must be smaller than 2^63, got {getattr(self, name)}")
        for name in ("train_timeout", "init_timeout"):
            if not 0 < getattr(self, name) <= _LONGEST:
                raise ConfigError(
                    f"the controller's {name} must be above 0 seconds and at most a year, got {getattr(self, name)}"
                )
        if not 0 <= self.grace <= _LONGEST:
            raise ConfigError(f"the controller's grace must be at least 0 seconds and at most a year, got {self.grace}")
        if self.clip_updates is not None and self.clip_updates < 1:
            raise ConfigError(f"the controller's clip_updates must be at least 1, or null, got {self.clip_updates}")
        self._check_hospitals_per_round()
        if self.schema is not None and not re.fullmatch("[0-9a-f]{64}", self.schema):
            raise ConfigError(
                "the controller's schema must be the digest of one, 64 hexadecimal digits, or null, got "
                f"'{self.schema}'; 'medpfl job new --schema FILE' writes it"
            )
        if len(set(self.references)) < len(self.references):
            raise ConfigError(f"the controller's references name one twice: {', '.join(self.references)}")

    def _check_hospitals_per_round(self) -> None:
        asked = self.hospitals_per_round
        if asked is None or (isinstance(asked, int) and asked >= 1) or (isinstance(asked, float) and 0 < asked < 1):
            return
        raise ConfigError(
            "the controller's hospitals_per_round must be a whole number of at least 1, or a share between 0 and 1, "
            f"got {asked}"
        )

    def of_run(self) -> dict[str, object]:
        """What makes a run another one: all, but what came later and is not used, so that a run keeps its key."""
        said = dataclasses.asdict(self)
        for later in ("hospitals_per_round", "schema"):
            if said[later] is None:
                del said[later]
        return said


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Checked):
    """Arguments of the controller of a job that only evaluates a given model.

    Args:
        threads: torch threads at every hospital.
        timeout: seconds until hospitals that have not answered are left out.
    """

    threads: int = 1
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"the controller's threads must be at least 1, got {self.threads}")
        if not 0 < self.timeout <= _LONGEST:
            raise ConfigError(
                f"the controller's timeout must be above 0 seconds and at most a year, got {self.timeout}"
            )
