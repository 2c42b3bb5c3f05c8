# SPDX-License-Identifier: Apache-2.0
"""Which hospitals can train together: those whose first messages are alike."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from medpfl.core.errors import RefusedUpdate
from medpfl.core.mixers import Mixer
from medpfl.results.schema import AboutTraining, ControllerArguments
from medpfl.rounds.answers import Check
from medpfl.rounds.messages import Message, Slots, check_update, digest_of, fingerprint, table
from medpfl.rounds.protocol import InitReply, as_json
from medpfl.rounds.settings import Settings

_ALIKE = {"common", "score", "measures", "classes", "personalised", "plan", "codecs", "adapts"}


@dataclass(frozen=True)
class Joined:
    """``sizes``: joined hospital to its samples by split; ``header`` and ``slots``: what they all said."""

    sizes: dict[str, dict[str, int]]
    header: InitReply
    slots: Slots


def begins_with(travelling: Sequence[str]) -> Check[InitReply]:
    """What checks a first message: slots among these, of finite values."""

    def check(site: str, reply: Message[InitReply]) -> None:
        for slot in reply.slots:
            if slot not in travelling:
                raise RefusedUpdate(f"{site}: slot '{slot}' was not asked for; the job's are: {', '.join(travelling)}")
        check_update(site, reply.slots, table(reply.slots))

    return check


def join(replies: Mapping[str, Message[InitReply]], refuse: Callable[[str, str], None]) -> Joined | None:
    """The largest group of hospitals that start from the same weights and say the same of the job; of equally large
    groups that of the first name. None if nobody answered.

    Args:
        refuse: is told who differs, and how.
    """
    marks = {site: _mark(replies[site]) for site in sorted(replies)}
    if not marks:
        return None
    sizes = Counter(marks.values())
    first = max(marks, key=lambda site: sizes[marks[site]])
    joined = {}
    for site, mark in marks.items():
        if mark == marks[first]:
            joined[site] = replies[site].header.sizes.model_dump()
        else:
            refuse(site, _difference(site, replies[site], first, replies[first]))
    return Joined(joined, replies[first].header, replies[first].slots)


def _mark(reply: Message[InitReply]) -> str:
    return digest_of([fingerprint(reply.slots), reply.header.model_dump(mode="json", include=_ALIKE)])


def about(
    found: Joined, replies: Mapping[str, Message[InitReply]], settings: Settings, mixers: Mapping[str, Mixer]
) -> AboutTraining:
    """What the job says of itself, with what the hospitals that joined told."""
    header = found.header
    return AboutTraining(
        recipe=header.recipe,
        personalised=header.personalised,
        score=header.score,
        metrics=header.measures,
        classes=list(header.classes),
        codecs=None if header.codecs is None else {str(way): codec for way, codec in header.codecs.items()},
        sizes=found.sizes,
        versions={site: replies[site].header.versions for site in found.sizes},
        settings=ControllerArguments.model_validate(as_json(dataclasses.asdict(settings))),
        components={slot: repr(mixer) for slot, mixer in mixers.items()},
    )


def _difference(site: str, theirs: Message[InitReply], first: str, reference: Message[InitReply]) -> str:
    """A sentence on how a hospital's first message differs from that of most."""
    one, other = theirs.header, reference.header
    if one.common != other.common:
        return f"{site} has {_named(one.common)}, {first} has {_named(other.common)}"
    if fingerprint(theirs.slots) != fingerprint(reference.slots):
        return _other_tensors(site, theirs, first, reference)
    if (one.score, one.classes) != (other.score, other.classes):
        here, there = (", ".join(header.classes) or "a number" for header in (one, other))
        return f"{site} learns {here} by {one.score}, {first} learns {there} by {other.score}"
    if (one.codecs, one.adapts) != (other.codecs, other.adapts):
        return (
            f"{site} has other codecs than {first}: the job's configuration there lacks the filter "
            "medpfl.flare.filters.DecodeUpdate, or has another"
        )
    differs = next(name for name in sorted(_ALIKE) if getattr(one, name) != getattr(other, name))
    return f"{site} says another '{differs}' of the job's method than {first}"


def _named(common: dict[str, str]) -> str:
    return ", ".join(f"{name} of SHA-256 {mark[:12]}" for name, mark in common.items()) or "none"


def _other_tensors(site: str, theirs: Message[InitReply], first: str, reference: Message[InitReply]) -> str:
    got, expected = table(theirs.slots), table(reference.slots)
    for slot in {**expected, **got}:
        here, there = got.get(slot, {}), expected.get(slot, {})
        for key in sorted(here.keys() | there.keys()):
            if here.get(key) != there.get(key):
                return (
                    f"{site}: entry '{slot}::{key}' is {here.get(key, 'missing')}, at {first} it is "
                    f"{there.get(key, 'missing')}"
                )
    versions = (theirs.header.versions.get("torch"), reference.header.versions.get("torch"))
    return f"{site} starts from other initial weights than {first} with the same shapes (torch {versions})"
