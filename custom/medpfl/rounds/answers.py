# SPDX-License-Identifier: Apache-2.0
"""Which of the hospitals' replies are answers to what they were asked."""

from collections.abc import Callable, Mapping
from typing import Any

from medpfl.core.errors import ProtocolError, RefusedUpdate
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol import Plan, Request, check_answer

Check = Callable[[str, Message[Any]], None]
"""Looks at a hospital's tensors; raises RefusedUpdate."""


def answers(
    asked: Request,
    replies: Mapping[str, Message[Any]],
    plan: Plan | None,
    check: Check,
    refuse: Callable[[str, str], None],
) -> dict[str, Message[Any]]:
    """Those replies, by hospital and sorted, that answer what was asked and pass ``check``.

    Args:
        plan: what the hospitals announced in the beginning; None before that.
        refuse: is told who is left out, and why.
    """
    accepted = {}
    for site in sorted(replies):
        try:
            check_answer(asked, replies[site].header, plan)
            check(site, replies[site])
        except (ProtocolError, RefusedUpdate) as error:
            refuse(site, str(error))
            continue
        accepted[site] = replies[site]
    return accepted


def no_tensors(site: str, reply: Message[Any]) -> None:
    """An answer that is metrics only.

    Raises:
        RefusedUpdate: naming the hospital.
    """
    if reply.slots:
        raise RefusedUpdate(f"{site}: it sent tensors, and metrics only were asked for")
