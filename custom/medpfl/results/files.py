# SPDX-License-Identifier: Apache-2.0
"""A results folder's files, written from their types and read back into them (``results.schema``)."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from torch import Tensor

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.core.mixing import Matrix
from medpfl.data.arrays.npz import Npz
from medpfl.results.schema import EvaluationSummary, FailureReport, Line, Summary, Traffic, TrainingSummary

SUMMARY, LINES, TRAFFIC, FAILURE = "summary.json", "metrics.jsonl", "bytes.json", "failure.json"
MIXING = "mixing.npz"

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
_LINE: TypeAdapter[Line] = TypeAdapter(Line)
_TRAFFIC = TypeAdapter(list[Traffic])
_GOT = 60
"""So many characters of a wrong value are shown."""
_MIXED = re.compile(r".+/[0-9]{1,9}", re.DOTALL)


def read_summary(folder: Path) -> Summary:
    """A job's summary.json.

    Raises:
        MedPFLError: it is missing, altered or of another version; of a job that failed, with the reason.
    """
    if not (folder / SUMMARY).exists():
        _say_why_not(folder)
    return read_versioned(folder, SUMMARY, "a results folder", _kind)


def _say_why_not(folder: Path) -> None:
    """Raise what is known of a job without a summary, if anything."""
    failed, log = folder / FAILURE, folder.parent / "log.txt"
    if failed.is_file():
        report = parse(TypeAdapter(FailureReport), _text(failed), failed)
        raise MedPFLError(f"{folder}: job '{report.job}' failed and has no results: {report.reason}")
    if (folder / LINES).is_file():
        raise MedPFLError(
            f"{folder}: the job has not come to its end: it is still running, or was stopped; the same job, started "
            "again, goes on where it was"
        )
    if log.is_file():  # as FLARE's console downloads a job
        raise MedPFLError(f"{folder} is not a results folder: {SUMMARY} is not there; {log} tells how the job ended")


def _kind(content: dict[str, JsonValue]) -> type[Summary]:
    return EvaluationSummary if "evaluated" in content else TrainingSummary


def read_versioned(folder: Path, name: str, what: str, kind: Callable[[dict[str, JsonValue]], type[M]]) -> M:
    """A folder's main file.

    Args:
        what: the folder that has such a file, for the sentence.
        kind: the content to its type.

    Raises:
        MedPFLError: it is missing, altered or of another version.
    """
    path = folder / name
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise MedPFLError(f"{folder} is not {what}: {name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise MedPFLError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return parse(TypeAdapter(kind(content)), text, path)


def read_training(folder: Path) -> TrainingSummary:
    """The summary.json of a training job.

    Raises:
        MedPFLError: as ``read_summary``, or the job only evaluated a given model.
    """
    summary = read_summary(folder)
    if not isinstance(summary, TrainingSummary):
        raise MedPFLError(f"{folder}: job '{summary.job}' only evaluated a given model; nothing was trained")
    return summary


def read_lines(folder: Path) -> list[Line]:
    """A job's metrics.jsonl.

    Raises:
        MedPFLError: it is missing, altered or of another version.
    """
    path = folder / LINES
    return parse_lines(_text(path), path)


def parse_lines(text: str, path: Path) -> list[Line]:
    """Whole lines of the metrics.jsonl at ``path``.

    Raises:
        MedPFLError: they are altered or of another version.
    """
    return [parse(_LINE, line, path, f"line {place}, ") for place, line in enumerate(text.splitlines(), start=1)]


def read_traffic(folder: Path) -> list[Traffic]:
    """A job's bytes.json.

    Raises:
        MedPFLError: it is missing, altered or of another version.
    """
    path = folder / TRAFFIC
    return parse(_TRAFFIC, _text(path), path)


def read_mixing(folder: Path, hospitals: int | None = None) -> dict[str, Matrix]:
    """A job's mixing.npz: "slot/round" to its matrix.

    Args:
        hospitals: in the job's roster, for each of whom a matrix has a row; None: not known.

    Raises:
        MedPFLError: it is missing, damaged or altered.
    """
    path = folder / MIXING
    try:
        file = Npz(path)
        headers = file.headers()
    except MedPFLError as error:
        raise MedPFLError(f"{path} cannot be read: {error}") from error
    for name, (shape, dtype) in headers.items():
        if name == "roster":
            continue
        if len(shape) != 2 or shape[0] != shape[1] or dtype.kind != "f":
            raise MedPFLError(f"{path} was altered: '{shortened(name)}' is no square matrix of numbers")
        if hospitals is not None and shape[0] != hospitals:
            raise MedPFLError(f"{path} was altered: '{shortened(name)}' has {shape[0]} rows for {hospitals} hospitals")
        if not _MIXED.fullmatch(name):
            raise MedPFLError(f"{path} was altered: '{shortened(name)}' names no slot and round")
    try:
        return {name: matrix for name, matrix in file.arrays().items() if name != "roster"}
    except MedPFLError as error:
        raise MedPFLError(f"{path} cannot be read: {error}") from error


def parse(kind: TypeAdapter[T], text: str, path: Path, place: str = "") -> T:
    """``text`` of the file at ``path`` as its type.

    Args:
        place: where in the file, for the sentence.

    Raises:
        MedPFLError: naming the file, the key, what was expected and what is there.
    """
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        got = json.dumps(first["input"], default=repr)
        wanted = "JSON" if first["type"] == "json_invalid" else first["msg"].removeprefix("Input should be ")
        problem = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(first["type"])
        told = problem or f"expected {wanted}, got {shortened(got)}"
        of = f"{place}'{key}' " if key else place
        raise MedPFLError(f"{path} was altered or is of another version: {of}{told}") from error


def shortened(text: str) -> str:
    """What a file holds, for a sentence: of a long text the beginning."""
    return text if len(text) <= _GOT else f"{text[:_GOT]}..."


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: it is no UTF-8
        raise MedPFLError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def json_of(value: BaseModel) -> dict[str, JsonValue]:
    """As JSON values, for ``json.dumps``."""
    return value.model_dump(mode="json")


def append_lines(folder: Path, lines: Iterable[Line]) -> None:
    """Write lines to the end of metrics.jsonl, so that progress can be followed while the job runs."""
    with open(folder / LINES, "a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(json_of(line)) + "\n")


def write_json(path: Path, value: BaseModel | list[Traffic]) -> None:
    """The whole file at once; see ``write_whole``."""
    content = [json_of(each) for each in value] if isinstance(value, list) else json_of(value)
    write_whole(path, json.dumps(content, indent=1))


def write_whole(path: Path, text: str) -> None:
    """A reader sees the old file or the new one.

    Raises:
        OSError: it cannot be written; the old one is as it was, and nothing is left of the new one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_slots(folder: Path, job: str, slots: Mapping[str, Mapping[str, Mapping[str, Tensor]]]) -> dict[str, str]:
    """Write every slot's models into ``slots/``: slot to owner to entry to tensor; returns the files' SHA-256. Those of
    an earlier job in the same folder go."""
    digests = {}
    for old in (folder / "slots").glob("*.safetensors"):
        if old.stem not in slots:
            old.unlink()
    for slot, states in slots.items():
        tensors = {f"{owner}::{key}": tensor for owner, state in states.items() for key, tensor in state.items()}
        path = folder / "slots" / f"{slot}.safetensors"
        store.save(path, tensors, {"slot": slot, "job": job})
        digests[slot] = store.file_digest(path)
    return digests
