# SPDX-License-Identifier: Apache-2.0
"""The site file: a YAML file, owned by the hospital, that declares the datasets jobs may use by name.

site: hospital-a
datasets:
  organ:                              # the name that jobs use
    kind: volumes
    datalist: datalist.json           # relative to the site file
    labels: {0: background, 1: organ}
  heart:
    kind: table
    files: [processed.cleveland.data]
    columns: [age, sex, cp, num]      # when the file has no header line
    features: {age: number, sex: number, cp: [1, 2, 3, 4]}
    label: {column: num, classes: {absent: [0], present: [1, 2, 3, 4]}}
    split: {seed: 43, fractions: {train: 0.5, validation: 0.16, test: 0.34}, stratify: true}
checkpoints:
  public_lenet: lenet.safetensors     # made by ``medpfl pretrain``
networks:                             # of this hospital's choice, for jobs that leave the network to hospitals
  organ: {path: medpfl.models.unet.UNet, args: {channels: [16, 32, 64]}}
"""

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, PrivateAttr, ValidationError
from torch import Tensor

from medpfl import store
from medpfl.core.errors import MedPFLError, SiteFileError
from medpfl.data.arrays.declare import Arrays
from medpfl.data.declared import Dataset, StorageRule, Strict
from medpfl.data.images.declare import Images
from medpfl.data.series.declare import Series
from medpfl.data.table.declare import Table
from medpfl.data.volumes.declare import Volumes

ENVIRONMENT_VARIABLE = "MEDPFL_SITE_FILE"
Declared = Annotated[Volumes | Table | Images | Arrays | Series, Field(discriminator="kind")]
KINDS: dict[str, type[Dataset]] = {
    get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(get_args(Declared)[0])
}
CHECKPOINT = "checkpoint"
"""What a checkpoint's file says it is."""
Kind = TypeVar("Kind", bound=Dataset)


class SiteFile(Strict):
    """A hospital's declaration of its datasets, of model files (``checkpoints``) that jobs may use by name, and of the
    network it wants for a dataset (``networks``), where a job leaves that to hospitals."""

    site: str | None = None
    storage: StorageRule = StorageRule()
    datasets: dict[str, Declared] = Field(min_length=1)
    checkpoints: dict[str, str] = Field(default={})
    networks: dict[str, dict[str, Any]] = Field(default={})
    _path: Path = PrivateAttr(default=Path())

    def dataset(self, name: str, *kinds: type[Kind]) -> Kind:
        """The declared dataset ``name``, of one of the kinds the task can use.

        Raises:
            SiteFileError: it is not declared, or is of another kind.
        """
        if name not in self.datasets:
            raise SiteFileError(
                f"{self._path}: the job asks for dataset '{name}', which this hospital does not declare; "
                f"declared: {', '.join(sorted(self.datasets))}",
                public=f"dataset '{name}' is not declared at this hospital",
            )
        dataset = self.datasets[name]
        if not isinstance(dataset, kinds):
            wanted = " or ".join(f"'{kind}'" for kind, known in KINDS.items() if known in kinds)
            raise SiteFileError(
                f"{self._path}: dataset '{name}' is of kind '{dataset.kind}', the job's task needs {wanted}",
                public=f"dataset '{name}' is of another kind than the job's task needs",
            )
        return dataset

    def checkpoint(self, name: str) -> dict[str, Tensor]:
        """The tensors of the declared checkpoint ``name``.

        Raises:
            SiteFileError: it is not declared, or its file cannot be read.
        """
        if name not in self.checkpoints:
            raise SiteFileError(
                f"{self._path}: the job asks for checkpoint '{name}', which this hospital does not declare; "
                f"declared: {', '.join(sorted(self.checkpoints)) or 'none'}",
                public=f"checkpoint '{name}' is not declared at this hospital",
            )
        try:
            tensors, meta = store.read(self._path.parent / self.checkpoints[name])
        except MedPFLError as error:
            raise SiteFileError(
                f"{self._path}: checkpoint '{name}': {error}", public=f"checkpoint '{name}' cannot be read"
            ) from error
        if meta.get("kind") != CHECKPOINT:
            raise SiteFileError(
                f"{self._path}: checkpoint '{name}': expected a file made by 'medpfl pretrain', got one of kind "
                f"{meta.get('kind')!r}",
                public=f"checkpoint '{name}' is not one of 'medpfl pretrain'",
            )
        return tensors

    def network(self, dataset: str) -> dict[str, Any]:
        """The configuration of the network that the hospital wants for a dataset.

        Raises:
            SiteFileError: it names none.
        """
        if dataset not in self.networks:
            raise SiteFileError(
                f"{self._path}: the job leaves the network to the hospitals, and 'networks' names none for "
                f"'{dataset}'; named: {', '.join(sorted(self.networks)) or 'none'}",
                public=f"this hospital's site file names no network for '{dataset}'",
            )
        return self.networks[dataset]

    def unusable_network(self, dataset: str, reason: object) -> SiteFileError:
        """For a network that cannot be built, or does not fit the task."""
        return SiteFileError(
            f"{self._path}: 'networks.{dataset}': {reason}",
            public=f"the network that this hospital's site file names for '{dataset}' cannot be used",
        )


def load_site_file(path: Path, site: str | None = None) -> SiteFile:
    """Read and validate a site file.

    Args:
        path: the file, or a folder that holds ``<site>.yaml``.
        site: the hospital's name in the federation; a file that names another hospital is refused.

    Raises:
        SiteFileError: one sentence with the file, the key, expected and got.
    """
    if path.is_dir():
        if not site:
            raise SiteFileError(f"{path} is a folder; name the site file in it")
        path = path / f"{site}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SiteFileError(f"cannot read the site file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, or a date such as 2020-13-01
        where = f" (line {mark.line + 1})" if (mark := getattr(error, "problem_mark", None)) else ""
        raise SiteFileError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(content, dict):
        raise SiteFileError(f"{path}: expected a mapping with the key 'datasets', got {type(content).__name__}")
    try:
        parsed = SiteFile.model_validate(content)
    except ValidationError as error:
        raise SiteFileError(f"{path}: {_first_problem(error)}") from error
    if site and parsed.site and parsed.site != site:
        raise SiteFileError(f"{path}: it is the site file of '{parsed.site}', but this hospital is '{site}'")
    parsed._path = path
    for dataset in parsed.datasets.values():
        dataset._folder = path.parent
        dataset._storage = parsed.storage
    return parsed


def find_site_file(site: str, scope: dict[str, object] | None, kit_local: Path | None) -> SiteFile:
    """Find a hospital's site file: its privacy scope's property, else the environment variable, else the kit's
    ``local/`` folder. A job has no say in it.

    Args:
        site: the hospital's name in the federation.
        scope: the privacy scope's properties; ``site_file`` names the file.
        kit_local: the startup kit's ``local`` folder, where ``site.yaml`` or ``<site>.yaml`` may lie.

    Raises:
        SiteFileError: none was found (says where it was looked for), or it is not valid.
    """
    if scope and scope.get("site_file"):
        return load_site_file(Path(str(scope["site_file"])), site)
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return load_site_file(Path(os.environ[ENVIRONMENT_VARIABLE]), site)
    candidates = [kit_local / f"{site}.yaml", kit_local / "site.yaml"] if kit_local else []
    for candidate in candidates:
        if candidate.is_file():
            return load_site_file(candidate, site)
    raise SiteFileError(
        f"no site file for '{site}': the privacy scope has no 'site_file', {ENVIRONMENT_VARIABLE} is not set, and "
        f"there is no {' or '.join(str(c) for c in candidates) or 'startup kit folder'}",
        public="this hospital has no site file",
    )


_KINDS = " or ".join(f"'{kind}'" for kind in KINDS)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    # pydantic puts the tag of the union of datasets third; it is not a key of the file.
    loc = problem["loc"][:2] + problem["loc"][3:] if problem["loc"][:1] == ("datasets",) else problem["loc"]
    place = ".".join(str(p) for p in loc if p != "[key]") or "the file"
    got = problem.get("input")
    shown = "" if isinstance(got, dict | BaseModel) or problem["type"] == "missing" else f", got {got!r}"
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{place}'"
    if problem["type"] == "missing":
        return f"key '{place}' is missing"
    if problem["type"] == "union_tag_not_found":
        return f"key '{place}.kind' is missing; expected {_KINDS}"
    if problem["type"] == "union_tag_invalid":
        return f"'{place}.kind': expected {_KINDS}, got {problem['ctx']['tag']!r}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"'{place}': {message[0].lower()}{message[1:]}{shown}"
