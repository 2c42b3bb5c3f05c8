# SPDX-License-Identifier: Apache-2.0
"""Jobs in which a hospital answers what it likes: the server's real way from FLARE's serialised message to the
coordinator, and honest hospitals around."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import from_shareable
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize

from medpfl.core.errors import MedPFLError
from medpfl.flare.wire import read_reply, read_request, to_shareable
from medpfl.job import Job
from medpfl.rounds.loop import Exchange, carry, training
from medpfl.rounds.messages import Message
from medpfl.rounds.server.coordinator import Coordinator, Replies
from small_jobs import write_table_sites
from tools import pieces

Attack = Callable[[str, Message[Any], Shareable], Shareable]
"""(hospital, what it was asked, its honest answer) to what it sends."""


def hospital_for_each(kinds: Collection[str], folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Two honest hospitals, and one for each kind of attack: site files, and dishonest hospital to its kind."""
    kind_of = {f"odd-{number:02d}": kind for number, kind in enumerate(kinds)}
    return write_table_sites(folder, [*kind_of, "yves", "zoe"], rows=280), kind_of


def attacked(job: Job, sites: dict[str, Path], folder: Path, attack: Attack) -> tuple[Coordinator, list[Exchange]]:
    """A whole job; also returns all that the server asked."""
    nvflare_fobs_initialize()
    coordinator, runners = pieces(job, sites, folder)
    asked: list[Exchange] = []

    def deliver(exchange: Exchange) -> Replies:
        asked.append(exchange)
        replies = {}
        for site, message in exchange.messages.items():
            request = read_request(_carried(to_shareable(message)))
            sent = attack(site, message, to_shareable(runners[site].handle(request)))
            try:
                replies[site] = coordinator.arrived(site, read_reply(_carried(sent), message.slots))
            except MedPFLError as error:  # as ``flare.exchange`` does
                coordinator.refuse(site, message.header.round, f"failed: {error}")
        return replies

    try:
        carry(training(coordinator), deliver)
    finally:
        coordinator.close()
    return coordinator, asked


def _carried(shareable: Shareable) -> Shareable:
    """Through FLARE's serialiser; what it cannot write, somebody may write by hand."""
    try:
        written = fobs.dumps(shareable)
    except (RuntimeError, OverflowError):
        return shareable
    found: Shareable = fobs.loads(written)
    return found


def saying(honest: Shareable, **change: Any) -> Shareable:
    """The honest answer with other content; None takes a key away."""
    dxo = from_shareable(honest)
    said = json.loads(dxo.meta["medpfl"])
    said["content"].update(change)
    said["content"] = {key: value for key, value in said["content"].items() if value is not None}
    return saying_text(honest, json.dumps(said))


def saying_text(honest: Shareable, text: object) -> Shareable:
    """The honest tensors with another text, or with none."""
    dxo = from_shareable(honest)
    if text is None:
        del dxo.meta["medpfl"]
    else:
        dxo.meta["medpfl"] = text
    return dxo.update_shareable(honest)


def content(honest: Shareable) -> dict[str, Any]:
    """What it says."""
    found: dict[str, Any] = json.loads(from_shareable(honest).meta["medpfl"])["content"]
    return found


def with_arrays(honest: Shareable, change: Callable[[str, Any], Any]) -> Shareable:
    """The honest answer with other arrays; ``change``: of the name and the array."""
    dxo = from_shareable(honest)
    dxo.data = {name: change(name, array.copy()) for name, array in dxo.data.items()}
    return dxo.update_shareable(honest)


def told_of(coordinator: Coordinator, site: str) -> list[str]:
    """The events about a hospital, but for the one that says at the end which rounds it trained in."""
    events = [event.event for event in coordinator.record.events if event.site == site]
    return [event for event in events if not event.startswith("trained in ")]
