# SPDX-License-Identifier: Apache-2.0
"""Verbs that plan a 3-D network from what the hospitals' volumes are like."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medpfl.cli.terminal import say
from medpfl.core.errors import ConfigError, SiteFileError

if TYPE_CHECKING:
    from medpfl.data.fingerprint import Fingerprint

app = typer.Typer()


@app.command()
def fingerprint(
    site_file: Annotated[Path, typer.Argument(help="A site file that declares volumes.")],
    dataset: Annotated[str | None, typer.Option(help="Which dataset, if it declares several.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: print it.")] = None,
) -> None:
    """Median shape and spacing of a hospital's training volumes, for 'medpfl plan': six entries, nothing of a case."""
    from medpfl.data.site_file import load_site_file
    from medpfl.data.volumes.declare import Volumes
    from medpfl.deployed.evaluate import write_text
    from medpfl.rounds.hospital.policy import check_statistic

    site = load_site_file(site_file)
    if dataset is None and len(site.datasets) > 1:
        raise SiteFileError(f"{site_file}: it declares {', '.join(sorted(site.datasets))}; name one with --dataset")
    found = site.dataset(dataset or next(iter(site.datasets)), Volumes).fingerprint()
    check_statistic(site.policy, found.cases)
    text = found.model_dump_json(indent=2)
    if output is None:
        say(text)
    elif output.exists():
        raise SiteFileError(f"{output} is there already and is not overwritten; name another with -o")
    else:
        write_text(output, text + "\n")
        say(f"wrote {output}")


@app.command()
def plan(
    dataset: Annotated[str, typer.Argument(help="Name of the dataset in the job.")],
    fingerprints: Annotated[list[Path], typer.Argument(help="A file of 'medpfl fingerprint' for each hospital.")],
    features: Annotated[int, typer.Option(help="Channels of the first level; 32 is nnU-Net's, for a GPU.")] = 32,
) -> None:
    """Patch size, spacing, network and batch for a job, by nnU-Net's rules: what its task and method must say."""
    from medpfl.component import spec_of
    from medpfl.tasks.planning import plan as make
    from medpfl.tasks.segmentation import Segmentation

    found = make([_read(path) for path in fingerprints])
    task = Segmentation(dataset, found.size, found.spacing, found.architecture(features))
    say(json.dumps({"task": spec_of(task), "batch_size": found.batch_size}, indent=2))


def _read(path: Path) -> "Fingerprint":
    from pydantic import ValidationError

    from medpfl.data.fingerprint import Fingerprint

    try:
        return Fingerprint.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it is no text; expected a file of 'medpfl fingerprint'") from error
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"])) or "the file"
        raise ConfigError(
            f"{path}: '{place}': {problem['msg'].lower()}; expected a file of 'medpfl fingerprint'"
        ) from error
