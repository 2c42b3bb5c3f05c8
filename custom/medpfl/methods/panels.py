# SPDX-License-Identifier: Apache-2.0
"""What a method shows of its own in a job's report (``Method.report_panels``), as data: the report draws every kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Panel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class GraphPanel(_Panel):
    """The graph of similar hospitals of a slot; its edges are drawn as thick as the last round's mixing says.

    Attributes:
        edges: pairs of hospitals, each once.
    """

    kind: Literal["graph"] = "graph"
    slot: str
    edges: list[tuple[str, str]]


class CurvesPanel(_Panel):
    """Numbers that the method's ``diagnose`` gave, by round and hospital; a picture each.

    Attributes:
        names: of those numbers.
    """

    kind: Literal["curves"] = "curves"
    title: str
    names: list[str]


class SharesPanel(_Panel):
    """A table of shares in [0, 1], how often each model served say: rows are hospitals.

    Attributes:
        shares: hospital to column to share.
        note: a sentence on what they are.
    """

    kind: Literal["shares"] = "shares"
    title: str
    shares: dict[str, dict[str, float]]
    note: str


Panel = Annotated[GraphPanel | CurvesPanel | SharesPanel, Field(discriminator="kind")]


@dataclass(frozen=True)
class AtServer:
    """What the server knows at the end of a job.

    Attributes:
        links: slot to the pairs of hospitals that its component connects, where it connects any.
        studies: hospital to what it told in an evaluation job, as ``Method.read_study`` returned it.
    """

    links: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    studies: Mapping[str, BaseModel] = field(default_factory=dict)
