# SPDX-License-Identifier: Apache-2.0
"""The verb ``medpfl demo``."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError

app = typer.Typer(no_args_is_help=True, help="Write demo hospitals: their site files, and data where generated.")

FolderArgument = Annotated[Path, typer.Argument(help="Folder to write into.")]


def _tell(folder: Path, write: Callable[[], list[str]]) -> None:
    """Write a demo into ``folder``, and say which hospitals it has."""
    try:
        sites = write()
    except OSError as error:
        which = f"{error.filename}: " if error.filename else ""  # an error in the middle of a file does not name it
        raise MedPFLError(f"cannot write the demo into {folder}: {which}{error.strerror}") from error
    say(f"{folder}: {', '.join(sites)}")


@app.command("phantom")
def demo_phantom(
    folder: FolderArgument,
    seed: int = 0,
    channels: Annotated[bool, typer.Option(help="Five hospitals with two sequences, two of which lack one.")] = False,
) -> None:
    """Four hospitals with generated MR-like phantoms (NIfTI)."""
    from medpfl.demo.phantom import write_phantoms, write_two_channels

    write = write_two_channels if channels else write_phantoms
    _tell(folder, lambda: write(folder, seed))


@app.command("heart")
def demo_heart(
    folder: FolderArgument,
    data: Annotated[Path | None, typer.Option(help="Folder with the processed.*.data files.")] = None,
    split: Annotated[str, typer.Option(help="validated or flamby")] = "validated",
) -> None:
    """The four hospitals of the UCI heart-disease data."""
    from medpfl.demo.heart import SPLITS, write_heart

    if split not in SPLITS:
        raise MedPFLError(f"--split must be {' or '.join(SPLITS)}, got '{split}'")
    _tell(folder, lambda: write_heart(folder, data, split))


@app.command("skin")
def demo_skin(
    folder: FolderArgument,
    data: Annotated[Path | None, typer.Option(help="HAM10000 as ZIP or folder; default: $MEDPFL_HAM10000.")] = None,
    hospitals: Annotated[str, typer.Option(help="sources, hospitals (two) or resolutions (same images)")] = "sources",
    size: Annotated[str, typer.Option(help="Pixels of the copies, WIDTHxHEIGHT, or original.")] = "64x48",
    fold: Annotated[int, typer.Option(min=0, max=4, help="Which fifth of the lesions is the test part.")] = 0,
    parts: Annotated[int, typer.Option(min=1, max=99, help="Sites made of each, with its whole test part.")] = 1,
    images: Annotated[int | None, typer.Option(min=1, help="At most so many a site, rare diagnoses first.")] = None,
    public: Annotated[int, typer.Option(min=0, help="Images kept apart as a public set that all declare.")] = 0,
) -> None:
    """The four sources of HAM10000's dermatoscopic images: diagnosis, malignant or not, lesion masks."""
    from medpfl.demo.skin import SITES, write_skin

    if hospitals not in SITES:
        raise MedPFLError(f"--hospitals must be {', '.join(SITES)}; got '{hospitals}'")
    lengths = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", size)
    if size != "original" and lengths is None:
        raise MedPFLError(f"--size must be WIDTHxHEIGHT, such as 64x48, or original; got '{size}'")
    pixels = (int(lengths[1]), int(lengths[2])) if lengths else None
    _tell(folder, lambda: write_skin(folder, data, hospitals, pixels, fold, parts, images, public))


@app.command("skin-imbalance")
def demo_skin_imbalance(
    folder: FolderArgument,
    data: Annotated[Path | None, typer.Option(help="HAM10000 as ZIP or folder; default: $MEDPFL_HAM10000.")] = None,
    delta: Annotated[
        float, typer.Option(help="Benign images a malignant one at three hospitals; at two the reverse.")
    ] = 4,
) -> None:
    """Five simulated hospitals of 300 images of HAM10000 with unlike shares of malignant lesions."""
    from medpfl.demo.skin_imbalance import write_imbalance

    _tell(folder, lambda: write_imbalance(folder, data, delta))


@app.command("patterns")
def demo_patterns(
    folder: FolderArgument,
    kind: Annotated[str, typer.Option(help="none, feature_shift, label_skew, concept_shift or quantity_skew")] = "none",
    seed: int = 0,
) -> None:
    """Six hospitals with generated images (.npz) that differ in one chosen way."""
    from medpfl.demo.patterns import write_patterns

    _tell(folder, lambda: write_patterns(folder, kind, seed))


@app.command("organc")
def demo_organc(
    folder: FolderArgument,
    data: Annotated[Path | None, typer.Option(help="organcmnist.npz; default: in $MEDPFL_ORGANC_DATA.")] = None,
    lists: Annotated[Path | None, typer.Option(help="The official index lists; default: beside the data.")] = None,
    md5: Annotated[str | None, typer.Option(help="Another MD5 that the file shall have: not Table 4 then.")] = None,
) -> None:
    """The 20 clients of FedAP's Table 4 (OrganCMNIST of MedMNIST v2); another file than the protocol's is refused."""
    from medpfl.demo.organc import MD5, write_organc

    _tell(folder, lambda: write_organc(folder, data, lists, md5 or MD5))


@app.command("hippocampus")
def demo_hippocampus(
    folder: FolderArgument,
    data: Annotated[
        Path | None, typer.Option(help="Task04_Hippocampus as folder or ZIP; default: $MEDPFL_HIPPOCAMPUS.")
    ] = None,
    hospitals: Annotated[int, typer.Option(min=3, max=4, help="3, by source; 4: the largest source is divided.")] = 3,
) -> None:
    """MR volumes of the hippocampus from three sources (Medical Segmentation Decathlon), for 3-D segmentation."""
    from medpfl.demo.hippocampus import write_hippocampus

    _tell(folder, lambda: write_hippocampus(folder, data, hospitals))


@app.command("har")
def demo_har(
    folder: FolderArgument,
    data: Annotated[Path | None, typer.Option(help="The unpacked folder 'UCI HAR Dataset'.")] = None,
    hospitals: Annotated[int | None, typer.Option(min=1, help="So many hospitals that share the subjects.")] = None,
) -> None:
    """UCI HAR, one hospital for each subject; no sample of a signal is in two splits."""
    from medpfl.demo.har import write_har

    _tell(folder, lambda: write_har(folder, data, hospitals))
