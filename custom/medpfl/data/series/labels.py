# SPDX-License-Identifier: Apache-2.0
"""The answer of each time step of a recording."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.data.declared import Problems, canonical
from medpfl.data.outcome import Answer, Outcome, read_answer
from medpfl.data.series.recordings import Recording
from medpfl.data.series.rules import SeriesLabel


def labels_of(
    recording: Recording, label: SeriesLabel | None, value: str | None, outcome: Outcome | None, problems: Problems
) -> tuple[NDArray[np.int64], list[Answer]]:
    """Of each step the number of its answer, -1 where it is ignored, missing or not declared; and the answers."""
    if label:
        return _classes(label, recording, problems), list(range(len(label.classes)))
    columns = outcome.used() if outcome else [str(value)]
    kept, inverse = _distinct([recording.marks[column] for column in columns])
    answers: list[Answer] = []
    good = []
    for number, step in enumerate(kept):
        try:
            cells = {column: recording.marks[column][step] for column in columns}
            answers.append(read_answer(cells, None, value, outcome))
            good.append(number)
        except ValueError as error:
            problems.add(f"{recording.at(step)}: {error}")
            answers.append(0)
    return np.where(np.isin(inverse, good), inverse, -1), answers


def _distinct(columns: list[NDArray[Any]]) -> tuple[list[int], NDArray[np.int64]]:
    """The first step of each combination of values, and of each step the number of its combination."""
    import pandas as pd

    codes = np.stack([pd.factorize(column)[0] for column in columns], axis=1)
    _, first, inverse = np.unique(codes, axis=0, return_index=True, return_inverse=True)
    return first.tolist(), inverse.reshape(-1)


def _classes(label: SeriesLabel, recording: Recording, problems: Problems) -> NDArray[np.int64]:
    """The class of each step; -1 where it is ignored, missing or not declared."""
    import pandas as pd

    index = label.index() | {canonical(value): -1 for value in label.ignore}
    codes, values = pd.factorize(recording.marks[label.column])
    unknown = np.flatnonzero(codes < 0)
    if len(unknown):
        problems.add(f"{recording.at(int(unknown[0]))}: label '{label.column}' is missing ({len(unknown)} time steps)")
    classes = [index.get(canonical(value), -2) for value in values]
    for number, found in enumerate(classes):
        if found == -2:
            first = int(np.flatnonzero(codes == number)[0])
            ignored = f"; ignored: {', '.join(map(str, label.ignore))}" if label.ignore else ""
            problems.add(
                f"{recording.at(first)}: label '{label.column}': '{values[number]}' is not among the declared values "
                f"({label.declared()}{ignored})"
            )
    return np.maximum(np.array([*classes, -1], dtype=np.int64)[codes], -1)
