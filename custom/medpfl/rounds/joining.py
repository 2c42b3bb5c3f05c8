# SPDX-License-Identifier: Apache-2.0
"""Which hospitals can train together: those whose first message fits the first hospital's."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from medpfl.core.errors import RefusedUpdate
from medpfl.core.mixers import Mixer
from medpfl.results.schema import AboutTraining
from medpfl.rounds.messages import Message, Slots, fingerprint, table
from medpfl.rounds.settings import Settings

_KEYS = {"sizes", "config", "personalised", "score", "direction", "classes", "versions", "common"}


@dataclass
class Joined:
    """``sizes``: joined hospital to its samples by split; ``header`` and ``slots``: the first one's message."""

    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    header: dict[str, Any] | None = None
    slots: Slots = field(default_factory=dict)


def join(replies: Mapping[str, Message], refuse: Callable[[str, str], None]) -> Joined:
    """Compare every hospital with the first in the order of their names; ``refuse`` is told who differs and how."""
    found = Joined()
    first, mark = "", ""
    for site in sorted(replies):
        header, slots = replies[site].header, replies[site].slots
        missing = sorted(_KEYS - header.keys())
        if missing:
            refuse(site, f"{site} did not say its '{missing[0]}'")
            continue
        if found.header is None:
            found.header, found.slots, first, mark = header, slots, site, fingerprint(slots)
        elif header["common"] != found.header["common"]:
            refuse(site, f"{site} has {_named(header['common'])}, {first} has {_named(found.header['common'])}")
            continue
        elif fingerprint(slots) != mark:
            refuse(site, _difference(site, replies[site], first, replies[first]))
            continue
        elif header["score"] != found.header["score"] or header["classes"] != found.header["classes"]:
            refuse(
                site,
                f"{site} learns {header['classes']} by {header['score']}, {first} learns "
                f"{found.header['classes']} by {found.header['score']}",
            )
            continue
        found.sizes[site] = header["sizes"]
    return found


def about(
    found: Joined, replies: Mapping[str, Message], settings: Settings, mixers: Mapping[str, Mixer]
) -> AboutTraining:
    """What the job says of itself, with what the hospitals that joined told.

    Raises:
        RefusedUpdate: one of them told it in another form.
    """
    header = found.header or {}
    content = {
        **{key: header.get(key) for key in ("recipe", "personalised", "score", "classes", "codecs")},
        "sizes": found.sizes,
        "versions": {site: replies[site].header["versions"] for site in found.sizes},
        "settings": dataclasses.asdict(settings),
        "components": {slot: repr(mixer) for slot, mixer in mixers.items()},
    }
    try:
        return AboutTraining.model_validate_json(json.dumps(content))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise RefusedUpdate(f"a hospital's first answer is malformed: '{where}': {problem['msg'].lower()}") from error


def _named(common: dict[str, str]) -> str:
    return ", ".join(f"{name} of SHA-256 {mark[:12]}" for name, mark in common.items()) or "none"


def _difference(site: str, theirs: Message, first: str, reference: Message) -> str:
    """A sentence on how a hospital's first message differs from the first hospital's."""
    got, expected = table(theirs.slots), table(reference.slots)
    for slot in {**expected, **got}:
        here, there = got.get(slot, {}), expected.get(slot, {})
        for key in sorted(here.keys() | there.keys()):
            if here.get(key) != there.get(key):
                return (
                    f"{site}: entry '{slot}::{key}' is {here.get(key, 'missing')}, at {first} it is "
                    f"{there.get(key, 'missing')}"
                )
    versions = (theirs.header["versions"].get("torch"), reference.header["versions"].get("torch"))
    return f"{site} starts from other initial weights than {first} with the same shapes (torch {versions})"
