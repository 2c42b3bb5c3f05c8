# SPDX-License-Identifier: Apache-2.0
"""``benchmarks attacks``: what an attacker finds out about patients from what hospitals send, and what noise and a
hospital's policy change in that: membership inference (``benchmarks.membership``) and gradient inversion
(``benchmarks.inversion``), against messages of the real round loop."""

from pathlib import Path
from typing import Annotated, Any

import typer

from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError

PARTS = ("membership", "inversion")


def measure(part: str, runs: int, updates: int, out: Path | None, skin: Path | None = None) -> dict[str, Any]:
    """One of the ``PARTS``, or all; the other's numbers in ``out`` stay.

    Args:
        skin: HAM10000, whose images are attacked in place of generated ones; without the arms of little noise and
            of Adam.

    Raises:
        MedPFLError: there is no such part, or too few of something; or the images are not there.
    """
    from benchmarks import inversion, membership
    from benchmarks.attacked_skin import skin_pools
    from medpfl.results.compact import read_compact

    if part not in (*PARTS, "all"):
        raise MedPFLError(f"--part must be membership, inversion or all, got '{part}'")
    if runs < membership.LEAST_RUNS or runs % 2 or updates < 1:
        raise MedPFLError(f"--runs must be even and at least 4, and --updates at least 1, got {runs} and {updates}")
    data = skin_pools(skin) if skin else None
    made: dict[str, Any] = {}
    if part != "inversion":
        arms = {name: one for name, one in membership.ARMS.items() if not (skin and "little" in name)}
        made["membership"] = membership.measure(runs, say, arms, data)
    if part != "membership":
        some = [arm for arm in inversion.ARMS if not (skin and ("0.01" in arm.name or "Adam" in arm.name))]
        made["inversion"] = inversion.measure(updates, say, some, data=data)
    if out is not None and out.exists():
        before = read_compact(out)
        made = {**{name: before[name] for name in PARTS if name in before}, **made}
    return made


def table_of(results: dict[str, Any]) -> str:
    """The tables of the parts that were measured."""
    from benchmarks import inversion, membership

    tables = {"membership": membership.table_of, "inversion": inversion.table_of}
    return "\n\n".join(tables[name](results[name]) for name in PARTS if name in results)


def command(
    part: Annotated[str, typer.Option(help="membership, inversion or all.")] = "all",
    runs: Annotated[int, typer.Option(help="Federations of each arm, shadow models of each other; even.")] = 8,
    updates: Annotated[int, typer.Option(help="Updates of each kind to be inverted.")] = 4,
    skin: Annotated[Path | None, typer.Option(help="HAM10000 as ZIP or folder: attack its images.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file; the other part's numbers in it stay.")] = None,
) -> None:
    """Membership inference and gradient inversion against what hospitals send: without noise, and with it."""
    from benchmarks import common

    facts = common.machine()
    results = measure(part, runs, updates, out, skin)
    common.write_json(out, "attacks_skin" if skin else "attacks", facts, results)
    say(table_of(results))
