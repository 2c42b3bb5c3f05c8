# SPDX-License-Identifier: Apache-2.0
"""Whether hospitals are suspiciously alike or very different: sentences, before anything is trained.

Over FLARE the server knows only what is told for a plan, the fingerprints (``of_fingerprints``), and nothing of
intensities. Where all hospitals' data are on one machine (``medpfl simulate``, ``check-job --sites``) the prepared
inputs themselves are compared (``of_inputs``); nothing of them is kept or leaves.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from medpfl.data.fingerprint import Fingerprint
from medpfl.data.samples import Samples

APART = 1.0
"""Of the intensities' means, in deviations: from here on they are named. 0.8 is usually called large."""
CONTRAST = 2.0
"""The same for the ratio of the deviations."""
COARSER = 3.0
"""The same for the ratio of the distances of voxels."""
_VALUES = 32
"""Inputs of fewer values, such as rows of a table, may well be equal by chance."""
_ROWS = 64


@dataclass(frozen=True)
class Look:
    """A hospital's training inputs, as networks see them.

    Attributes:
        mean, deviation: by channel (of a table: by feature), over all samples and voxels.
        digests: one for each sample; of samples of few values, or of one value throughout, none.
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]
    digests: frozenset[bytes]


def look_at(samples: Samples) -> Look:
    """Every training input is read once; of whole cases the views (``CaseRows``)."""
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    digests = set()
    step = samples.together(_ROWS)
    for start in range(0, len(samples), step):
        rows = samples.inputs[start : start + step].numpy()
        flat = rows.reshape(*rows.shape[:2], -1).astype(np.float64)
        count += flat.shape[0] * flat.shape[2]
        total, squares = total + flat.sum(axis=(0, 2)), squares + (flat**2).sum(axis=(0, 2))
        if rows[0].size >= _VALUES:
            digests |= {hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows if np.ptp(row) > 0}
    mean = total / max(count, 1)
    return Look(mean, np.sqrt(np.maximum(squares / max(count, 1) - mean**2, 0)), frozenset(digests))


def of_inputs(looks: Mapping[str, Look]) -> list[str]:
    """Hospitals that have equal training samples, and hospitals whose intensities are far from the others' together."""
    names = sorted(looks)
    found = []
    for one, other in combinations(names, 2):
        if equal := len(looks[one].digests & looks[other].digests):
            counts = " and ".join(str(len(looks[name].digests)) for name in (one, other))
            samples = "sample" if equal == 1 else "samples"
            found.append(
                f"{one} and {other} have {equal} equal training {samples} (of {counts} different ones): are the same "
                "patients at both? Then the results say less than they seem to"
            )
    for name in names[1:] if len(names) == 2 else names:
        if len({looks[each].mean.shape for each in names}) == 1:
            found += _apart(name, looks)
    return found


def _apart(name: str, looks: Mapping[str, Look]) -> list[str]:
    others = [look for each, look in sorted(looks.items()) if each != name]
    if not others:
        return []
    mine = looks[name]
    mean = np.mean([look.mean for look in others], axis=0)
    deviation = np.sqrt(np.mean([look.deviation**2 for look in others], axis=0))
    pooled = np.sqrt((mine.deviation**2 + deviation**2) / 2)
    shift = np.divide(mine.mean - mean, pooled, out=np.zeros_like(mean), where=pooled > 0)
    both = (mine.deviation > 0) & (deviation > 0)
    spread = np.divide(mine.deviation, deviation, out=np.ones_like(mean), where=both)
    most, widest = int(np.argmax(np.abs(shift))), int(np.argmax(np.abs(np.log(spread))))
    told = []
    if abs(shift[most]) >= APART:
        where = "above" if shift[most] > 0 else "below"
        told.append(f"their mean lies {abs(shift[most]):.1f} deviations {where} the others'{_channel(most, mean)}")
    if max(spread[widest], 1 / spread[widest]) >= CONTRAST:
        told.append(f"they spread {spread[widest]:.2g} times as widely{_channel(widest, mean)}")
    if not told:
        return []
    whom = next(each for each in sorted(looks) if each != name) if len(looks) == 2 else "the other hospitals"
    return [
        f"{name}'s prepared inputs differ much from those of {whom}: {'; '.join(told)}. If that is the scanner or the "
        "unit and not the patients, prepare them alike (the task's intensity, the site file's units), or keep "
        "normalisation layers at each hospital"
    ]


def _channel(number: int, all_: NDArray[np.float64]) -> str:
    return f" (channel {number})" if len(all_) > 1 else ""


def of_fingerprints(told: Mapping[str, Fingerprint]) -> list[str]:
    """Hospitals that say exactly the same of their volumes, and hospitals with much coarser or finer ones."""
    names = sorted(told)
    found = []
    for one, other in combinations(names, 2):
        if told[one] == told[other]:
            found.append(
                f"{one} and {other} say exactly the same of their volumes ({told[one].cases} for training, of equal "
                "size and spacing): unless both brought them to one grid before, are they the same patients?"
            )
    for name in names[1:] if len(names) == 2 else names:
        others = [told[each] for each in names if each != name]
        if not others:
            continue
        ratios = [_ratio(told[name].spacing[axis], [each.spacing[axis] for each in others]) for axis in range(3)]
        most = max(ratios, key=lambda ratio: abs(math.log(ratio)))
        if max(most, 1 / most) >= COARSER:
            what = f"{most:.2g} times as far apart as" if most > 1 else f"{1 / most:.2g} times as close together as"
            axis = ("right to left", "front to back", "head to foot")[ratios.index(most)]
            found.append(
                f"{name}'s voxels are {what} the other hospitals' from {axis}: all are resampled to one spacing, so "
                "details are lost or made up; look at its predictions by themselves"
            )
    return found


def _ratio(one: float, others: Sequence[float]) -> float:
    return one / float(np.median(others))
