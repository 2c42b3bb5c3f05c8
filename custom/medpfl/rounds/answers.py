# SPDX-License-Identifier: Apache-2.0
"""Which of the hospitals' replies are answers to what they were asked."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from medpfl.core.errors import ProtocolError, RefusedUpdate
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol import Part, Plan, Reply, Request, check_answer

A = TypeVar("A", bound=Part)
Check = Callable[[str, Message[A]], None]
"""Looks at a hospital's tensors; raises RefusedUpdate."""


def answers(
    asked: Request,
    kind: type[A],
    replies: Mapping[str, Message[Reply]],
    plan: Plan | None,
    check: Check[A],
    refuse: Callable[[str, str], None],
) -> dict[str, Message[A]]:
    """Those replies, by hospital and sorted, that answer what was asked and pass ``check``.

    Args:
        kind: what answers it.
        plan: what the hospitals announced in the beginning; None before that.
        refuse: is told who is left out, and why.
    """
    accepted = {}
    for site in sorted(replies):
        try:
            check_answer(asked, replies[site].header, plan)
            reply = replies[site].of(kind)
            check(site, reply)
        except (ProtocolError, RefusedUpdate) as error:
            refuse(site, str(error))
            continue
        accepted[site] = reply
    return accepted


def no_tensors(site: str, reply: Message[Part]) -> None:
    """An answer that is metrics only.

    Raises:
        RefusedUpdate: naming the hospital.
    """
    if reply.slots:
        raise RefusedUpdate(f"{site}: it sent tensors, and metrics only were asked for")
