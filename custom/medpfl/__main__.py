# SPDX-License-Identifier: Apache-2.0
"""``python -m medpfl``: the command ``medpfl``."""

from medpfl.cli import main

main()
