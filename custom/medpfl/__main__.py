# SPDX-License-Identifier: Apache-2.0
"""``python -m medpfl``: the command ``medpfl``."""

from medpfl.cli import main

if __name__ == "__main__":  # a job or a model's file may name any module of ours, which is then imported
    main()
