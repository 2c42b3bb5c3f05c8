# SPDX-License-Identifier: Apache-2.0
"""Hospitals that share a key."""

from pathlib import Path

from hospitals import change_yaml
from medpfl.privacy.keys import make_key


def share_key(sites: dict[str, Path]) -> dict[str, Path]:
    """The same hospitals, with a new key that every site file names."""
    path, _ = make_key(next(iter(sites.values())).parent / "keys")
    for file in sites.values():
        change_yaml(file, lambda content: content.update(keys=str(path)))
    return sites
