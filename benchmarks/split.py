# SPDX-License-Identifier: Apache-2.0
"""The verb ``split``: simulated hospitals for studies."""

from pathlib import Path
from typing import Annotated

import typer

from medpfl.cli.terminal import say

app = typer.Typer(no_args_is_help=True, help="Cut one data set into simulated hospitals for a study: their site files.")

FileArgument = Annotated[Path, typer.Argument(help="An .npz file in MedMNIST's format.")]
OutOption = Annotated[Path, typer.Option("-o", "--output", help="Folder for the site files.")]
DatasetOption = Annotated[str, typer.Option(help="The dataset's name in the site files, as jobs call it.")]
ClientsOption = Annotated[int, typer.Option(help="Number of hospitals.")]
AlphaOption = Annotated[float, typer.Option(help="Concentration; the smaller the more unlike.")]
TestOption = Annotated[float, typer.Option(help="Share of every hospital's rows for testing.")]
ValidationOption = Annotated[float, typer.Option(help="Share for validation; 0: none.")]


@app.command("dirichlet")
def split_dirichlet(
    file: FileArgument, output: OutOption, dataset: DatasetOption, clients: ClientsOption = 20,
    alpha: AlphaOption = 0.1, test: TestOption = 0.4, validation: ValidationOption = 0.2, seed: int = 0,
) -> None:  # fmt: skip
    """Every class shared among all hospitals by Dirichlet proportions: sizes and labels differ."""
    _cut("dirichlet", file, output, dataset, clients, alpha, test, validation, seed)


@app.command("pairwise")
def split_pairwise(
    file: FileArgument, output: OutOption, dataset: DatasetOption, clients: ClientsOption = 20,
    alpha: AlphaOption = 0.1, test: TestOption = 0.5, validation: ValidationOption = 0.0, seed: int = 0,
) -> None:  # fmt: skip
    """The cut of FedAP's experiments: equal sizes, partners with unlike labels, and hospitals that share theirs."""
    _cut("pairwise", file, output, dataset, clients, alpha, test, validation, seed)


def _cut(
    how: str, file: Path, output: Path, dataset: str, clients: int, alpha: float, test: float, validation: float,
    seed: int,
) -> None:  # fmt: skip
    from benchmarks.studies import write_cut
    from medpfl.core.errors import MedPFLError

    train = 1 - test - validation
    if not (0 < test < 1 and 0 <= validation < 1 and train > 1e-9):
        raise MedPFLError(f"--test must be above 0 and leave a training part beside it, got {test} and {validation}")
    fractions = {"train": train, **({"validation": validation} if validation else {}), "test": test}
    sites = write_cut(file, output, dataset, how, clients, alpha, fractions, seed)
    say(f"{output}: {len(sites)} hospitals, {sites[0]} to {sites[-1]}; who has which labels: {output / 'labels.svg'}")


@app.command("lists")
def split_lists(
    file: FileArgument,
    lists: Annotated[Path, typer.Argument(help="JSON file: a list of lists of row numbers, hospital by hospital.")],
    output: OutOption,
    dataset: DatasetOption,
    order: Annotated[str, typer.Option(help="A hospital's lists in their order.")] = "train,test,validation",
) -> None:
    """Hospitals by explicit index lists, such as those of published benchmarks."""
    from medpfl.core.errors import MedPFLError
    from medpfl.demo.index_lists import labels_of, read_lists, write_splits

    parts = order.split(",")
    if len(set(parts)) < len(parts) or not {"train", "test"} <= set(parts) <= {"train", "test", "validation"}:
        raise MedPFLError(f"--order must name train, test and perhaps validation, once each; got '{order}'")
    splits = read_lists(lists, parts)
    write_splits(output, file, dataset, splits, labels_of(file))
    say(f"{output}: {len(splits)} hospitals; who has which labels: {output / 'labels.svg'}")
