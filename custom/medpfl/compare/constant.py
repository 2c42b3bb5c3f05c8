# SPDX-License-Identifier: Apache-2.0
"""What a comparison says of models that answer every case alike: the row of such a model, the metrics that tell it from
a useful one, and a sentence for each method that ends with one."""

import numpy as np

from medpfl.compare.counted import left_out
from medpfl.compare.results import Results
from medpfl.core.errors import counted
from medpfl.tasks.metrics.constant import BESIDE, most_frequent

ALWAYS = "(always the most frequent class)"


def beside(content: Results) -> list[str]:
    """Metrics that stand beside the score, because a model that learnt nothing can lead by the score alone."""
    every = {name for row in content.rows for name in row.metrics}
    return [name for name in BESIDE.get(content.score, ()) if name in every]


def always(content: Results) -> dict[str, dict[str, float]]:
    """Hospital to metric to what always answering the hospital's most frequent class scores, by all its samples, mean
    over the splits; empty where the score cannot be led by that, or samples have no single class."""
    if content.score not in BESIDE:
        return {}
    found: dict[str, dict[str, float]] = {}
    for site in content.hospitals:
        each = []
        for split in content.splits:
            counts = list(split.labels.get(site, {}).values())
            if not any(counts) or sum(counts) != sum(split.sizes[site].values()):
                return {}
            each.append(most_frequent(counts))
        found[site] = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
    return found


def always_mean(content: Results) -> dict[str, str]:
    """Metric to its mean over the hospitals, as tables have it."""
    each = always(content).values()
    return {name: f"{np.mean([one[name] for one in each]):.3f}" for name in next(iter(each), {})}


def warnings(content: Results) -> list[str]:
    """Where a metric is not defined, and a sentence for each method whose model gives all test cases of a hospital the
    same class."""
    return [
        *left_out(content),
        *(
            f"{row.name} gives all test cases the same class: "
            + ", ".join(
                f"{site} in {count} of {counted(len(row.pairs), 'run')}" for site, count in row.one_answer.items()
            )
            + "."
            for row in content.rows
            if row.one_answer
        ),
    ]
