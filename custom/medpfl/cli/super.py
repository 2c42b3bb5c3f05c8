# SPDX-License-Identifier: Apache-2.0
"""The verb ``medpfl super``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from medpfl.cli.terminal import console, say
from medpfl.core.errors import MedPFLError


def super_(
    source: Annotated[Path, typer.Argument(help="A results folder of FedSM, or a super model's file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The super model's file to write (.safetensors).")],
    gamma: Annotated[float | None, typer.Option(help="The threshold, in [0, 1]; 1: always the global model.")] = None,
    sites: Annotated[Path | None, typer.Option(help="Choose gamma here: a folder with <hospital>.yaml files.")] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="Choose gamma by the results folder of an evaluation job of SOURCE.")
    ] = None,
) -> None:
    """Put FedSM's super model together: global, personal models and selector in one file for 'medpfl predict'.

    Gamma is chosen on the hospitals' pooled validation cases; the table shows their test cases. Beside the file lies
    the same table as Markdown."""
    from medpfl.data.site_file import site_files_in
    from medpfl.deployed.evaluate import write_text
    from medpfl.deployed.joint_table import markdown, table
    from medpfl.deployed.model_file import load_deployed
    from medpfl.rounds.server.joint import chosen, from_file, read_result, studies_of, study_here
    from medpfl.tasks.metrics.digits import digits

    if sum(given is not None for given in (gamma, sites, evaluation)) > 1:
        raise MedPFLError("give one of --gamma, --sites and --evaluation: each says where gamma comes from")
    if output.suffix != ".safetensors":
        raise MedPFLError(f"-o: the file's name must end in .safetensors, got {output.name}")
    deployed = None if source.is_dir() else load_deployed(source)
    model = from_file(deployed, source) if deployed else read_result(source)
    for site in model.untrained:
        say(f"{site} trained in no round of the job, so it has no model of its own: the common one stands in its place")
    found = None
    if gamma is not None:
        model = model.with_gamma(gamma)
    elif sites is not None:
        files = site_files_in(sites)
        if not files:
            raise MedPFLError(f"--sites: {sites} holds no <hospital>.yaml")
        with console.status("testing the super model at every hospital"):
            model, found = chosen(model, study_here(model, files))
    elif evaluation is not None:
        if deployed is None:
            raise MedPFLError("--evaluation needs the super model's file that was evaluated, not a results folder")
        model, found = chosen(model, studies_of(deployed, evaluation))
    meta = model.write(output, found)
    how = "given" if gamma is not None else "the usual one; choose it with --sites or an evaluation job"
    if found:
        validation = f"{found.validation:.{1 + digits([found.validation])}f}"
        how = f"chosen on validation, where the super model has {model.task.score} {validation}"
        head, rows = table(found, model.method.hospitals)
        score = model.task.measure.label(model.task.score)
        shown = Table(title=f"test {score} with gamma {found.gamma}")
        for number, heading in enumerate(head):
            shown.add_column(heading, justify="right" if number else "left", no_wrap=not number)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
        text = f"# Super model of job {model.job}, round {model.round}: test {score}, gamma {found.gamma} ({how})\n\n"
        write_text(output.with_suffix(".md"), f"{text}{markdown(head, rows)}\n\nSHA-256: {meta.sha256}\n")
    say(f"{output}: {len(model.method.hospitals)} personal models, the global one, a selector; gamma "
        f"{model.method.gamma} ({how})")  # fmt: skip
