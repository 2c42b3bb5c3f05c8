# SPDX-License-Identifier: Apache-2.0
"""Packages that only some installations have: the extras of pyproject.toml."""

import importlib.util

from medpfl.core.errors import ConfigError, MedPFLError


def require(package: str, extra: str, what: str, error: type[MedPFLError] = ConfigError) -> None:
    """To be called before a package of an extra is imported.

    Args:
        what: what needs it, the beginning of the sentence.
        error: DataError, where the sentence names a hospital's file and must not leave.

    Raises:
        MedPFLError: the package is not installed; the sentence says how to install it.
    """
    if importlib.util.find_spec(package) is None:
        raise error(f"{what} needs {package}, which is not installed here: pip install 'medpfl[{extra}]'")
