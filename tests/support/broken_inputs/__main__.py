# SPDX-License-Identifier: Apache-2.0
"""Prints the page: ``./tests/broken-inputs`` writes it."""

import sys
import tempfile
from pathlib import Path

from broken_inputs.listing import page

with tempfile.TemporaryDirectory() as scratch:
    sys.stdout.write(page(Path(scratch)))
