# SPDX-License-Identifier: Apache-2.0
"""Errors whose message is one sentence for the person who has to mend the cause."""

import difflib
import shutil
import unicodedata
from collections.abc import Iterable


def printable(text: str) -> str:
    """The text itself, if all of it can be printed: no control of a terminal, no further line, no turn of the reading
    direction. For words that came from elsewhere and are shown to people.

    Raises:
        ValueError: some of it cannot.
    """
    if not text.isprintable():
        raise ValueError("it holds characters that cannot be printed")
    return text


def for_terminal(text: str) -> str:
    """The text with a question mark for each control of a terminal and each turn of the reading direction; letters,
    spaces of any width, ends of lines and tabs stay."""
    return text if text.isprintable() else "".join(map(_for_terminal, text))


def _for_terminal(letter: str) -> str:
    return letter if letter.isprintable() or letter in "\n\t" or unicodedata.category(letter) == "Zs" else "?"


def reason_of(error: OSError) -> str:
    """Why files could not be written, or copied: of several, why the first could not."""
    each = error.args[0] if isinstance(error, shutil.Error) else []  # of each file its places, and why
    return str(each[0][2] if each else error.strerror)


class MedPFLError(Exception):
    """Base of every error that MedPFL raises on purpose; its text is meant to be read by a user.

    ``public`` is what may be told outside the hospital: the text may name local files, so by default only the kind
    of error leaves.
    """

    def __init__(self, message: str, public: str | None = None):
        super().__init__(message)
        self.public = public or f"{type(self).__name__} (see this hospital's log)"


class ConfigError(MedPFLError):
    """A job or a setting is wrong. Jobs come from the server, so the message may go back to it. What it repeats of a
    job may be of any length, and is left out beyond ``LONGEST``."""

    LONGEST = 2000

    def __init__(self, message: str):
        if len(message) > self.LONGEST:
            message = f"{message[: self.LONGEST - 300]} ... {message[-250:]}"
        super().__init__(message, public=message)


class SiteFileError(MedPFLError):
    """A hospital's site file is missing or wrong."""


class DataError(MedPFLError):
    """A hospital's data cannot be used as declared."""


class RefusedUpdate(MedPFLError):
    """A hospital's update is malformed (wrong keys, shapes, types or non-finite values) and is not mixed."""

    def __init__(self, message: str):
        super().__init__(message, public=message)


class PolicyRefused(MedPFLError):
    """A job wants what a hospital's own policy does not allow. It names the rule, and tells nothing of the data."""

    def __init__(self, message: str):
        super().__init__(message, public=message)


class BudgetSpent(PolicyRefused):
    """What a hospital's policy lets its noise cost is spent: it trains no more, and the job goes on without it."""


class OutOfMemory(MedPFLError):
    """A hospital's machine or GPU has too little memory for what a job trains. It names settings, no data."""

    def __init__(self, message: str):
        super().__init__(message, public=message)


class Stopped(MedPFLError):
    """The job was aborted while a hospital was training."""


class CodecError(MedPFLError):
    """An update cannot be encoded, or an encoded one cannot be decoded. It names entries, no values of patients."""

    def __init__(self, message: str):
        super().__init__(message, public=message)


class ProtocolError(MedPFLError):
    """A message between the server and a hospital does not say what it may. It names places, no values."""

    def __init__(self, message: str):
        super().__init__(message, public=message)


class NotInRound(ProtocolError):
    """A hospital is asked for a further exchange of a round of which it holds nothing, because it has failed in it."""


def meant(name: object, known: Iterable[object]) -> str:
    """For the end of a sentence: "; did you mean 'width'?", or nothing if no known name is near."""
    names = [str(one) for one in known]
    same = [one for one in names if one.casefold() == str(name).casefold()]  # "Age" is as far from "age" as "stage" is
    near = same or difflib.get_close_matches(str(name), names, 1)
    return f"; did you mean '{near[0]}'?" if near else ""


def unreadable(file: object, kind: str, error: BaseException | None = None) -> str:
    """The sentence on a file that a library cannot read: what it should be, and the first words of the library."""
    words = " ".join(str(error or "").split()).split(". ")[0].strip(" .")
    cause = f" ({words[:160]})" if words else ""
    return f"{file}: cannot be read as {kind}: it is damaged, incomplete or something else{cause}"


def counted(number: int, what: str) -> str:
    """ "1 case", "2 cases"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def shown(value: object) -> str:
    """A wrong value for a sentence, as Python writes it; of a long one the beginning."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
