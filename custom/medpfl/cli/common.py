# SPDX-License-Identifier: Apache-2.0
"""What the verbs share: the console and the arguments that several take."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from medpfl.core.errors import MedPFLError

console = Console()

JobArgument = Annotated[str, typer.Argument(help="A job folder, or the name of a shipped job.")]
ModelArgument = Annotated[Path, typer.Argument(help="A deployed model: <model>-<choice>.safetensors at a hospital.")]


def say(text: str) -> None:
    """Print a text as it is, whatever it contains."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def job_sites(sites: Path | None, job: str, scratch: Path) -> dict[str, Path]:
    """Hospital to its site file: those of the folder ``sites``, or the job's demo, written into ``scratch``.

    Raises:
        MedPFLError: ``sites`` is not a folder, or the job has no demo data.
    """
    from medpfl.bundle import DEMOS, demo_of

    if sites is None:
        sites = scratch / "sites"
        DEMOS[demo_of(job)](sites)
    elif not sites.is_dir():
        raise MedPFLError(f"--sites: {sites} is not a folder")
    return {path.stem: path for path in sorted(sites.glob("*.yaml"))}
