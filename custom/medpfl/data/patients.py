# SPDX-License-Identifier: Apache-2.0
"""Names of columns and fields that say whose a row or a case is, in English and German."""

import re

_WHO = r"patient(en|in)?|subject|person|participant|proband(en)?"
_WHICH = r"(id|no|nr|number|nummer|code|key|kennung|pseudonym)"
_SIGNS = r"[ ._-]*"
PATIENT = re.compile(
    rf"({_WHO}|pid|mrn)({_SIGNS}{_WHICH}\.?)?|pat{_SIGNS}{_WHICH}\.?|{_WHICH}{_SIGNS}({_WHO}|pat)|id", re.IGNORECASE
)
