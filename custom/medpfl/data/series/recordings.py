# SPDX-License-Identifier: Apache-2.0
"""Recordings of time series: from table files (a row per time step) and .npz arrays to steps, and steps to windows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from medpfl.core.errors import DataError, unreadable
from medpfl.data.cells import PLACE, Cells, read_cells, to_numbers
from medpfl.data.declared import Problems
from medpfl.data.meaning import described
from medpfl.data.numbers import MISSING, no_number
from medpfl.data.preparation import NewCase, Preparation, Spec
from medpfl.data.untrusted import BROKEN_NPZ, check_member

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Recording:
    """Consecutive time steps of a file, or one entry of an array.

    Attributes:
        name: the file, and the entry if it holds several.
        channels: C names.
        values: T x C float32; NaN where a sample is missing.
        places: T lines (rows of Parquet, steps of an array), for messages.
        marks: wanted column to its T texts, NaN or None where one is missing.
        bad: T, whether the step holds something that is no number.
    """

    name: str
    channels: Sequence[str]
    values: NDArray[np.float32]
    places: NDArray[np.int64]
    marks: Mapping[str, NDArray[np.object_]]
    bad: NDArray[np.bool_]

    def marked(self, fields: Mapping[str, str]) -> Recording:
        """The same, with columns that have one text throughout."""
        steps = len(self.values)
        return replace(
            self, marks={**self.marks, **{key: np.full(steps, text, object) for key, text in fields.items()}}
        )

    def at(self, step: int) -> str:
        """The place of a step, for messages."""
        return f"{self.name}:{self.places[step]}"


def read_recording(
    path: Path,
    shown: str,
    form: Cells,
    channels: Sequence[str],
    marks: Sequence[str],
    problems: Problems,
    optional: Collection[str] | None = None,
    answers: Sequence[str] = (),
) -> Recording:
    """One file as a recording: the columns ``channels`` as values, the columns ``marks`` as texts, of which ``answers``
    are numbers.

    Raises:
        DataError: the file cannot be read, has no rows, or lacks a column.
    """
    numbers = set(channels) - set(marks)
    values, places, bads = [], [], []
    texts: dict[str, list[Any]] = {mark: [] for mark in marks}
    told: set[str] = set()
    wanted = [*channels, *marks]
    for frame in read_cells(path, shown, form, problems, wanted, numbers, optional, as_texts=answers):
        rows = np.stack([to_numbers(frame, channel) for channel in channels], axis=1)
        with np.errstate(over="ignore"):
            small = rows.astype(np.float32)
        wrong = ~np.isfinite(small) & frame[list(channels)].notna().to_numpy()
        for column in np.flatnonzero(wrong.any(axis=0)).tolist():
            row, channel = int(np.flatnonzero(wrong[:, column])[0]), channels[column]
            if channel not in told:
                told.add(channel)
                said = no_number(frame[channel].iloc[row], MISSING)
                problems.add(f"{shown}:{frame[PLACE].iloc[row]}: channel '{channel}': {said}")
        values.append(small)
        places.append(frame[PLACE].to_numpy(dtype=np.int64))
        for mark in marks:
            texts[mark].append(frame[mark].to_numpy(dtype=object))
        bads.append(wrong.any(axis=1))
    marked = {mark: np.concatenate(parts) for mark, parts in texts.items()}
    return Recording(shown, channels, np.concatenate(values), np.concatenate(places), marked, np.concatenate(bads))


def read_arrays(path: Path, shown: str, inputs: str, marks: Sequence[str], problems: Problems) -> Iterator[Recording]:
    """The entries of an .npz file: array ``inputs``, n x channels x length, and ``marks``, arrays of n values.

    Raises:
        DataError: the file cannot be read, or an array is missing or has another shape or type.
    """
    arrays = _load(path, [inputs, *marks])
    values = arrays[inputs]
    if values.ndim != 3 or not values.size:
        raise DataError(f"{path}: array '{inputs}': expected n x channels x length, got shape {values.shape}")
    if values.dtype.kind not in "iufb":
        raise DataError(f"{path}: array '{inputs}': expected numbers, got type {values.dtype}")
    texts: dict[str, list[Any]] = {}
    for mark in marks:
        if arrays[mark].size != len(values):
            raise DataError(
                f"{path}: array '{mark}': expected {len(values)} values, one for each of '{inputs}', "
                f"got shape {arrays[mark].shape}"
            )
        texts[mark] = [_text(value) for value in arrays[mark].ravel().tolist()]
    steps = np.arange(values.shape[2])
    channels = [str(number) for number in range(values.shape[1])]
    for number in range(len(values)):
        with np.errstate(over="ignore"):
            small = np.ascontiguousarray(values[number].T, dtype=np.float32)
        name = f"{shown}[{number}]"
        infinite: NDArray[np.bool_] = np.isinf(small)
        for step, channel in np.argwhere(infinite)[:1].tolist():
            got = values[number, channel, step]
            problems.add(f"{name}:{step}: channel '{channel}': expected a number, got '{got}'")
        marked = {mark: np.full(len(steps), texts[mark][number], dtype=object) for mark in marks}
        yield Recording(name, channels, small, steps, marked, np.any(infinite, axis=1))


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(int(value))
    return None if value != value else str(value)  # NaN is no label


def _load(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: expected an .npz file with named arrays, got a single array")
            for name in names:
                if name not in content.files:
                    raise DataError(f"{path}: array '{name}' is missing; the file has: {', '.join(content.files)}")
            for member in content.zip.infolist() if content.zip else []:
                if member.filename.removesuffix(".npy") in names:
                    check_member(path, member)
            return {name: content[name] for name in names}
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (*BROKEN_NPZ, MemoryError) as error:
        raise DataError(unreadable(path, "an .npz file", error)) from error


def interpolated(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """T x C with missing samples filled: linearly in time between known ones, before the first and after the last
    known one with its value. A channel without any known sample stays missing."""
    filled = values.copy()
    steps = np.arange(len(values))
    for column in range(values.shape[1]):
        known = ~np.isnan(values[:, column])
        if known.any() and not known.all():
            filled[:, column] = np.interp(steps, steps[known], values[known, column])
    return filled


def windows(values: NDArray[np.float32], length: int, step: int) -> NDArray[np.float32]:
    """T x C to N x C x length, a window every ``step`` time steps; none if T is below ``length``."""
    if len(values) < length:
        return np.empty((0, values.shape[1], length), dtype=values.dtype)
    return np.array(np.lib.stride_tricks.sliding_window_view(values, length, axis=0)[::step], order="C")


def missing_samples(recording: Recording, used: NDArray[np.bool_]) -> Iterator[str]:
    """One sentence for each channel that lacks samples in the ``used`` steps: where first, and how many."""
    missing = np.isnan(recording.values) & used[:, None]
    for column in np.flatnonzero(missing.any(axis=0)).tolist():
        steps = np.flatnonzero(missing[:, column])
        place = recording.at(int(steps[0]))
        yield f"{place}: channel '{recording.channels[column]}' is missing ({len(steps)} samples of the recording)"


class SeriesPreparation(Preparation):
    """How recordings are written (``cells``), declared and cut (``length`` and ``step`` in time steps), and the mean
    and scale of each channel. ``label``: the column to predict; where there are several, the first of ``answers``."""

    form: ClassVar[str] = "windows"
    kind: Literal["series"] = "series"
    cells: Cells
    channels: list[str] | None
    inputs: str | None
    label: str
    answers: list[str] = Field(default=[], exclude_if=lambda found: not found)
    missing_samples: Literal["refuse", "interpolate"]
    length: int = Field(ge=1)
    step: int = Field(ge=1)
    rate: float | None = None
    mean: list[float]
    scale: list[float]

    def new_cases(self, path: Path, spec: Spec) -> Iterator[NewCase]:
        """The recordings of a file, or of all files of a folder, each with its windows as samples; no label needed."""
        for name, made in new_recordings(path, self):
            yield NewCase(name, made)

    def meaning(self) -> list[str]:
        """The channels; those of arrays have no names."""
        told = [described(channel, "channel") for channel in self.channels or []]
        return [*told, f"{self.rate:g} time steps a second"] if self.rate else told

    def standardised(self) -> tuple[list[float], list[float]]:
        return self.mean, self.scale


def new_recordings(path: Path, preparation: SeriesPreparation) -> Iterator[tuple[str, Tensor]]:
    """Recordings that no site file declares, each with its windows, N x C x length, prepared as in training.

    Args:
        path: a file, or a folder all of whose files are read, but hidden ones, which Macs put beside others.

    Raises:
        DataError: with the file, the line and the column, expected and got.
    """
    import torch

    problems = Problems()
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and file.name[0] != ".")
    if not files:
        raise DataError(f"{path}: the folder has no files")
    mean, scale = np.array(preparation.mean), np.array(preparation.scale)
    for file in files:
        recordings: Iterator[Recording]
        if preparation.inputs is not None:
            recordings = read_arrays(file, file.name, preparation.inputs, [], problems)
        else:
            channels, optional = preparation.channels or [], preparation.answers or [preparation.label]
            recordings = iter([read_recording(file, file.name, preparation.cells, channels, [], problems, optional)])
        for recording in recordings:
            steps, width = recording.values.shape
            length = preparation.length
            if width != len(mean):
                raise DataError(f"{recording.name}: expected {len(mean)} channels, got {width}")
            if steps < length:
                raise DataError(f"{recording.name}: expected at least {length} time steps (a window), got {steps}")
            if preparation.missing_samples == "interpolate":
                recording = replace(recording, values=interpolated(recording.values))
            for sentence in missing_samples(recording, np.ones(steps, dtype=bool)):
                raise DataError(sentence)
            made = windows(((recording.values - mean) / scale).astype(np.float32), length, preparation.step)
            yield recording.name, torch.from_numpy(made)
