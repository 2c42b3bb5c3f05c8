# SPDX-License-Identifier: Apache-2.0
"""CusFL on small tables, for its tests and those of its variants."""

from typing import Any

from medpfl.job import Job
from medpfl.methods.cusfl import CusFL
from tools import Make, normed


def on_tables(make_job: Make, rounds: int = 4, **method: Any) -> Job:
    chosen = CusFL(**{"lr": 0.05, "batch_size": 8, "split": "2", "projection": 3, **method})
    return make_job(rounds=rounds, mixers=chosen.components(), method=chosen, task=normed())
