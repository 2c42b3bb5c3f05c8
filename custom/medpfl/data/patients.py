# SPDX-License-Identifier: Apache-2.0
"""Names that say whose a row or a case is, in English and German: of columns, fields and folders."""

import re
from collections.abc import Collection

_WHO = r"patient(en|in)?|subject|person|participant|proband(en)?"
_WHICH = r"(id|no|nr|number|nummer|code|key|kennung|pseudonym)"
_SIGNS = r"[ ._-]*"
PATIENT = re.compile(
    rf"({_WHO}|pid|mrn)({_SIGNS}{_WHICH}\.?)?|pat{_SIGNS}{_WHICH}\.?|{_WHICH}{_SIGNS}({_WHO}|pat)|id", re.IGNORECASE
)
_PERSON = re.compile(rf"(p|pat|sub|case|fall|{_WHO}|pid|mrn)[ ._-]*\d+", re.IGNORECASE)


def are_patients(names: Collection[str]) -> bool:
    """Whether folders are called as patients are, p01 or patient-1, and so are no classes."""
    return bool(names) and all(map(_PERSON.fullmatch, names))
