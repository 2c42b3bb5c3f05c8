# SPDX-License-Identifier: Apache-2.0
"""The lines of ``medpfl leaves`` that a hospital's policy keeps here (``kept_here``): replies go without them where
they can, and else the hospital takes no part."""

from collections.abc import Collection, Iterator, Mapping
from typing import get_args

from medpfl.core.errors import PolicyRefused, meant
from medpfl.data.policy import Policy
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import Reply
from medpfl.rounds.protocol.requests import InitRequest

_LACKING: Mapping[str, object] = {"loss": {}, "notes": (), "seconds": 0.0, "chosen": None}
"""Fields that a reply can be without, and what they then hold."""
_ALWAYS = ("init", "train", "validate", "finish")
_TENSORS = "tensors of "


def refused(policy: Policy, when: str, what: str) -> str:
    """Why this line does not leave; "" if it does."""
    if f"{when} {what}" not in policy.kept_here:
        return ""
    return f"this hospital's policy ('kept_here') keeps '{when} {what}' here"


def can_lack(what: str) -> bool:
    """Whether a reply can be without this line, so that the hospital takes part all the same."""
    return what in _LACKING


def check_known(policy: Policy) -> None:
    """Raises PolicyRefused: the policy names a line that no job has."""
    known = [f"{task} {field}" for task, field in _fields()]
    tasks = {line.partition(" ")[0] for line in known}
    for line in policy.kept_here:
        task, _, what = line.partition(" ")
        if line not in known and not (task in tasks and what.startswith(_TENSORS)):
            raise PolicyRefused(
                f"this hospital's policy ('kept_here') names the line '{line}', which 'medpfl leaves' does not have"
                f"{meant(line, known)}"
            )


def check_job(policy: Policy, header: InitRequest) -> None:
    """Whether the hospital can take part without what it keeps here; before anything is trained.

    Raises:
        PolicyRefused: it cannot, or the policy names a line that no job has.
    """
    check_known(policy)
    lines = [(task, field) for task, field in _fields() if task in _ALWAYS and not can_lack(field)]
    slots = [slot for slot, travels in header.slots.items() if travels]
    lines += [(task, f"{_TENSORS}slot '{slot}'") for task in ("init", "train") for slot in slots]
    for when, what in lines:
        if told := refused(policy, when, what):
            raise PolicyRefused(told)


def without(policy: Policy, reply: Message[Reply], statistics: Collection[str] = ()) -> Message[Reply]:
    """The reply as it may leave.

    Args:
        statistics: names of the statistics that it holds.

    Raises:
        PolicyRefused: it holds what is kept here, and cannot be without.
    """
    header = reply.header
    names = [*type(header).model_fields, *(f"{_TENSORS}'{name}'" for name in statistics)]
    names += [f"{_TENSORS}slot '{slot}'" for slot in reply.slots if slot not in statistics]
    kept = [what for what in names if f"{header.task} {what}" in policy.kept_here]
    for what in kept:
        if not can_lack(what):
            raise PolicyRefused(refused(policy, header.task, what))
    return Message(header.model_copy(update={what: _LACKING[what] for what in kept}), reply.slots) if kept else reply


def _fields() -> Iterator[tuple[str, str]]:
    for kind in get_args(Reply):
        for field in kind.model_fields:
            yield str(kind.model_fields["task"].default), field
