# SPDX-License-Identifier: Apache-2.0
"""Folders for what is gone when a command ends, where the system or TMPDIR says that such folders lie."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medpfl.core.errors import MedPFLError


def temporary_place() -> Path:
    """The system's temporary folder.

    Raises:
        MedPFLError: there is none that can be written, as in a container whose disk is read-only, or a full one.
    """
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise _unwritable(error) from error


@contextmanager
def temporary_folder(prefix: str = "medpfl-") -> Iterator[Path]:
    """A new folder that is gone afterwards, with all that is in it.

    Raises:
        MedPFLError: it cannot be made.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise _unwritable(error) from error
    with made as name:
        yield Path(name)


def _unwritable(error: OSError) -> MedPFLError:
    return MedPFLError(
        f"no folder for temporary files can be written: {error.strerror}; name one in the environment: TMPDIR=FOLDER"
    )
