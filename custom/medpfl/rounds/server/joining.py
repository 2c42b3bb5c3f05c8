# SPDX-License-Identifier: Apache-2.0
"""Which hospitals can train together: those that say of the job what the server knows of it, and whose first messages
are alike."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from medpfl.core.digest import digest_of
from medpfl.core.errors import RefusedUpdate
from medpfl.core.mixers import Mixer
from medpfl.data.meaning import other_inputs
from medpfl.job.settings import Settings
from medpfl.results.schema import AboutTraining, ControllerArguments, Rebuild
from medpfl.rounds.messages import Message, Slots, fingerprint, table
from medpfl.rounds.protocol.bounded import as_json
from medpfl.rounds.protocol.replies import InitReply
from medpfl.rounds.server.answers import Check
from medpfl.rounds.server.checks import check_values
from medpfl.rounds.terms import Terms

_ALIKE = {"common", "classes", "buffers", "encryption"}
_GREAT_SHARE = 0.8
"""A hospital with a larger share of all training samples has more than four times those of all others together."""


@dataclass(frozen=True)
class Joined:
    """``sizes``: joined hospital to its samples by split; ``header`` and ``slots``: what they all said."""

    sizes: dict[str, dict[str, int]]
    header: InitReply
    slots: Slots


def begins_with(travelling: Sequence[str]) -> Check[InitReply]:
    """What checks a first message: slots among these, and their values."""

    def check(site: str, reply: Message[InitReply]) -> None:
        for slot in reply.slots:
            if slot not in travelling:
                raise RefusedUpdate(f"{site}: slot '{slot}' was not asked for; the job's are: {', '.join(travelling)}")
        check_values(site, reply.slots, reply.header.buffers)

    return check


def join(
    replies: Mapping[str, Message[InitReply]], terms: Terms, most_samples: int, refuse: Callable[[str, str], None]
) -> Joined | None:
    """Of the hospitals that say the server's ``terms`` of the job, the largest group that starts from the same weights
    and says the same of the rest; of equally large groups that of the first name. None if nobody answered.

    Args:
        most_samples: who says that it has more training samples takes no part.
        refuse: is told who differs, and how.
    """
    marks = {}
    for site in sorted(replies):
        if objection := _objection(site, replies[site].header, terms, most_samples):
            refuse(site, objection)
        else:
            marks[site] = _mark(replies[site])
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


def _objection(site: str, header: InitReply, terms: Terms, most_samples: int) -> str | None:
    """A sentence on why a hospital takes no part, whatever the others say."""
    if header.sizes.train > most_samples:
        return f"{site} says that it has {header.sizes.train} training samples; the job allows {most_samples}"
    if header.agreed != terms.agreed:
        return (
            f"{site}'s declaration of the dataset does not follow the schema that the job names (its digest is "
            f"{(header.agreed or 'none')[:12]}, the job's {(terms.agreed or 'none')[:12]}): 'medpfl check-data "
            "SITE_FILE --schema FILE' says there what differs"
        )
    differs = terms.difference(header)
    if differs in ("codecs", "adapts"):
        return (
            f"{site} has other codecs than the server's copy of the job: its configuration there lacks the filter "
            "medpfl.flare.filters.DecodeUpdate, or has another"
        )
    return None if differs is None else f"{site} says another '{differs}' of the job than the server's copy of it"


def _mark(reply: Message[InitReply]) -> str:
    alike = reply.header.model_dump(mode="json", include=_ALIKE)
    return digest_of([fingerprint(reply.slots), alike, reply.header.recipe.meaning])


def about(
    found: Joined,
    replies: Mapping[str, Message[InitReply]],
    terms: Terms,
    settings: Settings,
    mixers: Mapping[str, Mixer],
) -> AboutTraining:
    """What the job says of itself, with what the hospitals that joined told.

    Its method and task are the server's own: the recipe is built into networks where the results are read. The shape of
    an input and its preparation are those that most hospitals have.
    """
    recipes = [replies[site].header.recipe for site in found.sizes]
    inputs = [(recipe.input_shape, recipe.preparation) for recipe in recipes]
    shape, preparation = max(inputs, key=inputs.count)
    return AboutTraining(
        recipe=Rebuild(
            method=terms.method,
            task=terms.task,
            input_shape=shape,
            preparation=preparation,
            meaning=found.header.recipe.meaning,
        ),
        personalised=terms.personalised,
        score=terms.score,
        scored=dict(terms.scored),
        metrics=dict(terms.measures),
        classes=list(found.header.classes),
        codecs=None if terms.codecs is None else dict(terms.codecs),
        sizes=found.sizes,
        versions={site: replies[site].header.versions for site in found.sizes},
        settings=ControllerArguments.model_validate(as_json(dataclasses.asdict(settings))),
        components={slot: repr(mixer) for slot, mixer in mixers.items()},
    )


def _difference(site: str, theirs: Message[InitReply], first: str, reference: Message[InitReply]) -> str:
    """A sentence on how a hospital's first message differs from that of most."""
    one, other = theirs.header, reference.header
    if one.encryption != other.encryption:
        return (
            f"{site} has another encryption key (fingerprint {one.encryption}) than {first} ({other.encryption}): "
            "all hospitals need the file of one 'medpfl keys make'"
        )
    if one.common != other.common:
        return f"{site} has {_named(one.common)}, {first} has {_named(other.common)}"
    if differs := other_inputs(one.recipe.meaning, f"{site}'s", other.recipe.meaning, f"{first}'s"):
        return differs
    if fingerprint(theirs.slots) != fingerprint(reference.slots):
        return _other_tensors(site, theirs, first, reference)
    if one.classes != other.classes:
        here, there = (", ".join(header.classes) or "a number" for header in (one, other))
        return f"{site} learns {here}, {first} learns {there}"
    return f"{site} says that other entries are buffers than {first}"


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


def oddities(found: Joined, replies: Mapping[str, Message[InitReply]], here: Mapping[str, str]) -> dict[str, list[str]]:
    """Hospital to sentences about what is no reason to leave it out and should be known.

    Args:
        here: package to version, at the server.
    """
    told: dict[str, list[str]] = {}
    everything = sum(sizes["train"] for sizes in found.sizes.values())
    usual, _ = Counter(replies[site].header.config for site in found.sizes).most_common(1)[0]
    for site, sizes in found.sizes.items():
        theirs = replies[site].header.versions
        sentences = [
            f"it has {package} {theirs.get(package, 'of a version that it does not tell')}, the server has {version}"
            for package, version in here.items()
            if theirs.get(package) != version
        ]
        if len(found.sizes) > 1 and sizes["train"] > _GREAT_SHARE * everything:
            sentences.append(
                f"it says that it has {sizes['train']} of all {everything} training samples: where a mean weighs by "
                "samples, it decides"
            )
        if replies[site].header.config != usual:  # what else it is made of was compared
            sentences.append(
                "it has other code of the packages beside MedPFL whose classes the job names than most hospitals: it "
                "may train by other rules"
            )
        told[site] = sentences
    return told
