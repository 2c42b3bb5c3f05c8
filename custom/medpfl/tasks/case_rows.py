# SPDX-License-Identifier: Apache-2.0
"""What is told of every case of an evaluation beside its metrics; it follows from what the answers are."""

from torch import Tensor

from medpfl.data.preparation import Row
from medpfl.data.samples import Samples
from medpfl.data.target import Target


def rows_of(target: Target, decisions: Tensor, samples: Samples) -> list[Row]:
    """Of one class a case, of labels and of numbers what was there and what was found; else the names alone.

    Args:
        decisions: N x ..., as ``target`` has them.
    """
    match target:
        case Target.CLASS:
            return _classes(decisions, samples)
        case Target.LABELS:
            return _labels(decisions, samples)
        case Target.VALUE:
            pairs = zip(samples.targets[:].tolist(), decisions.tolist(), strict=True)
            return [
                {"case": samples.names[case], "value": value, "predicted": found}
                for case, (value, found) in zip(samples.case.tolist(), pairs, strict=True)
            ]
    return [{"case": name} for name in samples.names]


def _classes(decisions: Tensor, samples: Samples) -> list[Row]:
    """The class, the most probable one and its probability."""
    truth, probability = samples.targets[:].numpy(), decisions.numpy()
    found = probability.argmax(axis=1)
    return [
        {
            "case": name,
            "class": int(truth[i]),
            "predicted": int(found[i]),
            "probability": float(probability[i].max()),
        }
        for i, name in enumerate(samples.names)
    ]


def _labels(decisions: Tensor, samples: Samples) -> list[Row]:
    """Of each case every label, by its number: 1 or 0, or nothing where it is not known, and its probability."""
    truth, probability = samples.targets[:].tolist(), decisions.tolist()
    rows: list[Row] = []
    for number, name in enumerate(samples.names):
        row: Row = {"case": name}
        for label, (known, found) in enumerate(zip(truth[number], probability[number], strict=True)):
            row |= {f"label_{label}": int(known) if known == known else "", f"p_{label}": found}
        rows.append(row)
    return rows
