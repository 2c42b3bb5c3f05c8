# SPDX-License-Identifier: Apache-2.0
"""The folder in which a hospital finds its models of a job: those of one run, never of two beside each other."""

import os
from datetime import UTC, datetime
from pathlib import Path

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.deployed.evaluate import write_text

_NAME, _MARK = "models", ".run"


def open_models(home: Path, run: str) -> Path:
    """The folder for a run's models. What another run has left there is moved to ``models-<when it was written>``.

    Args:
        home: the hospital's folder of the job.
        run: a name of the run and of the data that it was trained on.

    Raises:
        MedPFLError: the folder cannot be looked through or moved.
    """
    folder = home / _NAME
    mark = folder / _MARK
    try:
        store.sweep(folder)  # a process that was killed here left a model or a list of patients' cases half-written
        if mark.is_file() and mark.read_bytes() == run.encode():
            return folder
        written = [file.stat().st_mtime for file in folder.glob("*")]
        if written:
            aside = f"{_NAME}-{datetime.fromtimestamp(max(written), UTC):%Y%m%dT%H%M%SZ}"
            taken = {path.name for path in home.iterdir()}
            later = (f"{aside}-{number}" for number in range(2, len(taken) + 2))
            os.rename(folder, home / next(name for name in (aside, *later) if name not in taken))
    except OSError as error:
        raise MedPFLError(
            f"cannot move the models of an earlier run, {folder}: {error.strerror}",
            f"the models of an earlier run could not be moved: {error.strerror}",
        ) from error
    write_text(mark, run)
    return folder
