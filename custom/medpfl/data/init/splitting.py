# SPDX-License-Identifier: Apache-2.0
"""What the data say of whose a case is and in which split it belongs, and the ``split`` that follows them."""

import re
from collections.abc import Collection, Mapping, Sequence

from medpfl.core.errors import SiteFileError
from medpfl.data.init.answers import Answers, Entry
from medpfl.data.patients import PATIENT
from medpfl.data.split_file import SPELLINGS

FRACTIONS = {"train": 0.6, "validation": 0.2, "test": 0.2}
SPLIT = re.compile(r"split|set|subset|partition", re.IGNORECASE)


def split_entry(column: str, group: str, comment: str = "", **others: bool) -> Entry:
    """``split``: by the column that says it, else drawn; in either case with what names the patient ("" for none)."""
    grouped = {"group": group} if group else {}
    if column:
        said = f"the data say it; no {group} may be in two splits" if group else "the data say it"
        return Entry("split", {"column": column, **grouped}, comment or said)
    return Entry("split", {**grouped, **others, "seed": 0, "fractions": FRACTIONS}, comment)


def only_splits(texts: Collection[str]) -> bool:
    """Whether there are texts, and all are names of splits."""
    return bool(texts) and {text.strip().lower() for text in texts} <= set(SPELLINGS)


def are_splits(texts: Collection[str]) -> bool:
    """Whether texts are names of splits, of training and of test at the least."""
    named = {SPELLINGS.get(text.strip().lower()) for text in texts}
    return only_splits(texts) and {"train", "test"} <= named


def split_column(known: Mapping[str, Collection[str]], label: str = "") -> str:
    """The column that says in which split a row is: its texts are names of splits, and its own name says so or training
    and test are among them; "" for none."""
    for column, cells in known.items():
        called = SPLIT.fullmatch(column) and only_splits(cells)
        if column != label and (called or are_splits(cells)):
            return column
    return ""


def patient_columns(columns: Collection[str], label: str) -> list[str]:
    """Those that may name the patient, a plain "id" last: beside another one it counts rows, visits or centres."""
    found = [column for column in columns if column != label and PATIENT.fullmatch(column)]
    return sorted(found, key=lambda column: column.lower() == "id")


def patient_column(known: Mapping[str, Sequence[str]], label: str, answers: Answers) -> str:
    """The column that names the patient; "" for none.

    Args:
        known: of each column the cells that are not missing.

    Raises:
        SiteFileError: --group names no column.
    """
    candidates = patient_columns(known, label)
    repeated = [column for column in candidates if len(set(known[column])) < len(known[column])]
    if "group" not in answers.given and not candidates and not answers.prompt:
        return ""
    question = "Which column names the patient ('none' if every row is another patient)?"
    chosen = answers.get("group", question, repeated[0] if repeated else "none", [*known, "none"])
    return "" if chosen == "none" else chosen


def given_group(answers: Answers, found: str, known: Collection[str] = ()) -> str:
    """What names the patient: what --group says, else what was found; "" for nothing.

    Args:
        known: what else could name it.

    Raises:
        SiteFileError: --group names what is not there.
    """
    given = answers.given.get("group", found)
    allowed = [*dict.fromkeys([*([found] if found else []), *known, "none"])]
    if given and given not in allowed:
        raise SiteFileError(
            f"--group: '{given}' is not there; expected one of: {', '.join(allowed)} (or write the site file's 'split' "
            "by hand, with the patient in braces in 'files')"
        )
    return "" if given == "none" else given
