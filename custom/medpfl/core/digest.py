# SPDX-License-Identifier: Apache-2.0
"""Whether two JSON values are the same, said in a few characters."""

import hashlib
import json
from typing import Any


def digest_of(value: Any) -> str:
    """Short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
