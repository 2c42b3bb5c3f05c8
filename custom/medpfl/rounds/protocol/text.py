# SPDX-License-Identifier: Apache-2.0
"""Requests and replies as text on the wire. Parsing raises a ``ProtocolError`` and nothing else, whatever the bytes."""

from typing import Annotated, TypeVar

from pydantic import Field

from medpfl.core.errors import ProtocolError
from medpfl.results.line import Name
from medpfl.rounds.protocol.bounded import Count, Part
from medpfl.rounds.protocol.replies import Reply
from medpfl.rounds.protocol.requests import Request

LONGEST = 16 * 2**20
"""Characters of a message without its tensors."""


class Coded(Part):
    """What a codec's end says of a message that it has worked on (see ``rounds.coding``).

    Attributes:
        number: of the exchange.
        base: the exchange whose result is the reference; None: the message is whole. Of an answer: the exchange with
            whose answer slots that are answered ``anew`` are compared; None: with what this exchange brought.
        keep: an exchange that the hospital must not forget yet.
        codec: tag of the codec; None: this direction is not encoded.
    """

    number: Count
    base: Count | None = None
    keep: Count | None = None
    codec: Name | None = None


class Asked(Part):
    """A request as text."""

    content: Annotated[Request, Field(discriminator="task")]
    coded: Coded | None = None


class Answered(Part):
    """A reply as text."""

    content: Annotated[Reply, Field(discriminator="task")]
    coded: Coded | None = None


Envelope = TypeVar("Envelope", Asked, Answered)


def parse(kind: type[Envelope], text: object) -> Envelope:
    """Read a request or a reply.

    Raises:
        ProtocolError: it is none; one sentence with the place and what is wrong there, without what was sent.
    """
    if not isinstance(text, str) or len(text) > LONGEST:
        raise ProtocolError(f"the message is no text of at most {LONGEST} characters")
    try:
        return kind.model_validate_json(text)
    except ValueError as error:  # pydantic's ValidationError, or text that is no Unicode
        raise ProtocolError(f"the message is malformed: {_problem(error)}") from None


def _problem(error: ValueError) -> str:
    errors = getattr(error, "errors", None)
    if errors is None:
        return "it is no text"
    first = errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part)[:100] for part in first["loc"][:12])
    told = f"'{where}': {first['msg'][:300].lower()}"
    return "".join(letter if letter.isprintable() else "?" for letter in told)  # keys are what somebody sent
