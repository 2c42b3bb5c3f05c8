# SPDX-License-Identifier: Apache-2.0
"""Verbs for a model that a job left at a hospital."""

import math
from pathlib import Path
from typing import Annotated

import typer

from medpfl.cli.terminal import ModelArgument, console, say
from medpfl.core.errors import MedPFLError, counted

app = typer.Typer()


@app.command()
def predict(
    model: ModelArgument,
    source: Annotated[Path, typer.Argument(help="A file, a folder, a DICOM series or a datalist to predict.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder for the predictions.")],
    probabilities: Annotated[bool, typer.Option(help="Segmentations: write each class's probability too.")] = False,
    labels: Annotated[Path | None, typer.Option(help="Segmentations: a folder of label maps, for Dice.")] = None,
    dicom_seg: Annotated[bool, typer.Option("--dicom-seg", help="Of DICOM images: write DICOM-SEG, too.")] = False,
) -> None:
    """Predict new cases: segmentations in the input's geometry, classes with their probabilities as CSV."""
    from medpfl.deployed.model_file import load_deployed
    from medpfl.deployed.predict import predict as run

    deployed = load_deployed(model)
    with console.status("reading") as status:

        def told(name: str) -> None:
            status.update(f"{name} is done")

        done = run(deployed, source, output, probabilities, told, labels, dicom_seg)
    say(f"{counted(len(done.rows), 'case')}: {done.file}\n{done.note}")


@app.command()
def evaluate(
    model: ModelArgument,
    site_file: Annotated[Path, typer.Argument(help="Site file that declares the dataset the model was trained on.")],
    split: Annotated[str, typer.Option(help="train, validation or test")] = "test",
    cases: Annotated[Path | None, typer.Option(help="New CSV file for one row a case.")] = None,
) -> None:
    """Test a model on a hospital's own declared data, without a federation."""
    from medpfl.data.declared import SPLITS
    from medpfl.data.site_file import load_site_file
    from medpfl.deployed.evaluate import write_cases
    from medpfl.deployed.model_file import load_deployed
    from medpfl.deployed.predict import evaluate_on, other_split
    from medpfl.tasks.metrics.digits import digits
    from medpfl.tasks.metrics.measure import Measure

    if split not in SPLITS:
        raise MedPFLError(f"--split must be {', '.join(SPLITS)}, got '{split}'")
    if cases and cases.exists():  # it may be the table that the site file declares
        raise MedPFLError(f"--cases: {cases} exists already; remove it or name another file")
    deployed, declared = load_deployed(model), load_site_file(site_file)
    data = deployed.task.load(declared)
    found = evaluate_on(deployed, data, split)
    history = deployed.meta.history
    made = f", {history.choice} round ({history.round}) of job {history.job} at {history.site}" if history else ""
    name = history.model if history else deployed.name
    say(f"{name}{made}: {counted(len(found.cases), 'case')} of the {split} split")
    for metric, value in found.metrics.items():
        measure = deployed.task.measures.get(metric, Measure())
        worse = ", lower is better" if measure.direction == "lower" else ""
        say(f"{metric} {'n/a' if math.isnan(value) else measure.text(value, 1 + digits([value])) + worse}")
    if split != "train" and (differs := other_split(deployed, data, declared)):
        say(differs)
    if cases:
        write_cases(cases, found)
        say(str(cases))


@app.command()
def export(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder to write into.")],
    form: Annotated[str, typer.Option("--format", help="torchscript, onnx or monai (a MONAI bundle).")],
) -> None:
    """Write a model for software that does not know MedPFL."""
    from medpfl.deployed.export import export as write

    say(str(write(model, output, form)))
