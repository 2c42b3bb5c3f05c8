# SPDX-License-Identifier: Apache-2.0
"""Under which licences the packages are that MedPFL needs, as they are installed here."""

from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

UNKNOWN = "not stated"


@dataclass(frozen=True)
class Licensed:
    """An installed package; ``licence`` is its own statement: SPDX's expression, else its classifiers or its text."""

    name: str
    version: str
    licence: str


def licences(package: str = "medpfl", extras: frozenset[str] | None = None) -> list[Licensed]:
    """The package and everything that it needs, directly or not, so far as it is installed, by name.

    Args:
        extras: of ``package``; None: all of them.
    """
    found: dict[str, Licensed] = {}
    looked_at: set[tuple[str, str]] = set()
    root = distribution(package)
    waiting = [(root, extras if extras is not None else frozenset(root.metadata.get_all("Provides-Extra") or []))]
    while waiting:
        one, wanted = waiting.pop()
        name = canonicalize_name(one.metadata["Name"])
        found[name] = Licensed(one.metadata["Name"], one.version, _licence(one))
        for extra in {"", *wanted}:
            if (name, extra) in looked_at:
                continue
            looked_at.add((name, extra))
            for needed in map(Requirement, one.requires or []):
                if needed.marker is None and extra:
                    continue
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    try:
                        waiting.append((distribution(needed.name), frozenset(needed.extras)))
                    except PackageNotFoundError:  # of an extra that is not installed
                        continue
    return [found[name] for name in sorted(found)]


def _licence(one: Distribution) -> str:
    stated = one.metadata
    # Not [...]: where a package has imported importlib_metadata, what is not stated raises KeyError there.
    if expression := stated.get_all("License-Expression"):
        return str(expression[0])
    classifiers = [text.rpartition(" :: ")[2] for text in stated.get_all("Classifier") or [] if "License ::" in text]
    if classifiers:
        return ", ".join(classifiers)
    text = (stated.get_all("License") or [""])[0].strip()
    return text.splitlines()[0][:80] if text else UNKNOWN
