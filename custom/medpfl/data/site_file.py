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
  shared:
    kind: arrays
    file: shared.npz
    classes: {benign: [0], malignant: [1]}
    public: true                      # methods may exchange what networks say of every image
checkpoints:
  public_lenet: lenet.safetensors     # made by ``medpfl pretrain``
keys: hospitals.key                   # of ``medpfl keys make``, for jobs that encrypt models
networks:                             # of this hospital's choice, for jobs that leave the network to hospitals
  organ: {path: medpfl.models.unet.UNet, args: {channels: [16, 32, 64]}}
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, Field, InstanceOf, PrivateAttr, ValidationError

from medpfl.component import import_named
from medpfl.core.errors import ConfigError, MedPFLError, SiteFileError
from medpfl.data.contract import Dataset
from medpfl.data.declared import GpuRule, StorageRule, Strict, check_name
from medpfl.data.kinds import KINDS, kind_named
from medpfl.data.policy import STUDY, Policy
from medpfl.data.preparation import Spec
from medpfl.data.problem import first_problem
from medpfl.data.samples import SiteData
from medpfl.data.subgroups import Described, groupings
from medpfl.data.untrusted import load_yaml

if TYPE_CHECKING:
    from torch import Tensor

ENVIRONMENT_VARIABLE = "MEDPFL_SITE_FILE"
CHECKPOINT = "checkpoint"
DEPLOYED = "model"
"""What a checkpoint's file says it is."""
Kind = TypeVar("Kind", bound=Dataset)


class SiteFile(Strict):
    """A hospital's declaration of its datasets, of model files (``checkpoints``) that jobs may use by name, and of the
    network it wants for a dataset (``networks``), where a job leaves that to hospitals; the file of the hospitals'
    common key (``keys``); what it wants of its ``gpu``; and its ``policy`` for jobs."""

    site: str | None = None
    storage: StorageRule = StorageRule()
    gpu: GpuRule = GpuRule()
    policy: Policy = Policy()
    datasets: dict[str, InstanceOf[Dataset]] = Field(min_length=1)
    checkpoints: dict[str, str] = Field(default={})
    networks: dict[str, dict[str, object]] = Field(default={})
    keys: str | None = None
    _path: Path = PrivateAttr(default=Path())

    def dataset(self, name: str, *kinds: type[Kind]) -> Kind:
        """The declared dataset ``name``, of one of the kinds.

        Raises:
            SiteFileError: it is not declared, or is of another kind.
        """
        dataset = self._declared(name)
        if not isinstance(dataset, kinds):
            raise self._of_another_kind(name, [kind for kind, known in KINDS.items() if known in kinds])
        return dataset

    def load(self, name: str, spec: Spec) -> SiteData:
        """All cases of the declared dataset ``name`` as a task wants them.

        Raises:
            SiteFileError: it is not declared, or of a kind that has no such cases.
            DataError: the data are not as declared.
        """
        dataset = self._declared(name)
        if not dataset.gives(spec):
            kinds = [kind for kind, known in KINDS.items() if known.gives(spec)]
            raise self._of_another_kind(name, kinds, _lacks(spec, dataset))
        data = dataset.load(spec)
        return replace(data, groupings=groupings(dataset)) if isinstance(dataset, Described) else data

    def _declared(self, name: str) -> Dataset:
        if name not in self.datasets:
            raise SiteFileError(
                f"{self._path}: the job asks for dataset '{name}', which this hospital does not declare; "
                f"declared: {', '.join(sorted(self.datasets))}",
                public=f"dataset '{name}' is not declared at this hospital",
            )
        return self.datasets[name]

    def check_public(self, name: str) -> None:
        """Refuse a dataset of which a job wants to exchange what networks say of every single sample.

        Raises:
            SiteFileError: it is not declared, or not marked ``public: true``.
        """
        if not self._declared(name).public:
            raise SiteFileError(
                f"{self._path}: the job takes dataset '{name}' for public data, and 'datasets.{name}' does not say "
                "'public: true'",
                public=f"dataset '{name}' is not marked as public at this hospital",
            )

    def _of_another_kind(self, name: str, kinds: Sequence[str], mend: str = "") -> SiteFileError:
        wanted = (" or ".join(f"'{kind}'" for kind in kinds) or "another") + mend
        return SiteFileError(
            f"{self._path}: dataset '{name}' is of kind '{self.datasets[name].kind}', the job's task needs {wanted}",
            public=f"dataset '{name}' is of another kind than the job's task needs{mend}",
        )

    def checkpoint(self, name: str) -> dict[str, Tensor]:
        """The tensors of the declared checkpoint ``name``.

        Raises:
            SiteFileError: it is not declared, or its file cannot be read.
        """
        from medpfl import store

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
        broken = next((key for key, tensor in tensors.items() if not bool(tensor.isfinite().all())), None)
        if broken is not None:
            raise SiteFileError(
                f"{self._path}: checkpoint '{name}': its entry '{broken}' holds values that are not numbers (NaN or "
                "infinite); training cannot begin from it",
                public=f"checkpoint '{name}' holds values that are not numbers",
            )
        if meta.get("kind") == DEPLOYED:
            return self._only_network(name, tensors)
        if meta.get("kind") != CHECKPOINT:
            raise SiteFileError(
                f"{self._path}: checkpoint '{name}': expected a file made by 'medpfl pretrain' or 'medpfl bundle "
                f"import', or a job's model, got one of kind {meta.get('kind')!r}",
                public=f"checkpoint '{name}' is not one of 'medpfl pretrain'",
            )
        return tensors

    def trained_on(self, name: str) -> dict[str, list[str]]:
        """Of the checkpoint ``name``, which can be read, the ``meaning`` of its inputs and its ``classes``, where the
        file tells them."""
        told = self._told(name)
        return {key: told[key] for key in ("meaning", "classes") if told.get(key)}

    def network_of(self, name: str) -> object:
        """Of the checkpoint ``name``, which can be read, what its file says of its network: the configuration of an
        architecture, or None."""
        told = self._told(name)
        try:
            return told["network"] if "network" in told else told["task"]["args"]["architecture"]
        except (KeyError, TypeError):  # of a task without one
            return None

    def _told(self, name: str) -> Any:
        from medpfl import store

        meta: Any = store.read_meta(self._path.parent / self.checkpoints[name])
        return meta.get("recipe", meta)

    def _only_network(self, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of a job's model, whose entries begin with the network's name."""
        networks = sorted({key.partition(".")[0] for key in tensors})
        if len(networks) != 1:
            raise SiteFileError(
                f"{self._path}: checkpoint '{name}': expected a model of one network, this one has: "
                f"{', '.join(networks) or 'none'}",
                public=f"checkpoint '{name}' is a model of several networks",
            )
        return {key.partition(".")[2]: tensor for key, tensor in tensors.items()}

    def key_file(self) -> Path:
        """The file of the key that all hospitals share.

        Raises:
            SiteFileError: none is named.
        """
        if self.keys is None:
            raise SiteFileError(
                f"{self._path}: the job encrypts models, and 'keys' names no file of 'medpfl keys make'",
                public="the job encrypts models, and this hospital's site file names no key ('keys')",
            )
        return self._path.parent / self.keys

    def network(self, dataset: str) -> dict[str, object]:
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


def _lacks(spec: Spec, dataset: Dataset) -> str:
    """What a task that takes rows and windows alike, and images by their size, lacks for images."""
    images = dataset.form == "images" and {"rows", "windows"} <= set(spec.forms)
    return "; to learn from images it lacks their 'size' in the job, such as [64, 64]" if images else ""


def site_files_in(folder: Path) -> dict[str, Path]:
    """Hospital to its site file, of a folder of them.

    Raises:
        SiteFileError: one has another ending than .yaml: its hospital would be left out without a word.
    """
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in (".yaml", ".yml"))
    for path in found:
        if path.suffix != ".yaml":
            raise SiteFileError(f"{path}: site files are called <hospital>.yaml; rename it to {path.stem}.yaml")
    return {path.stem: path for path in found}


def load_site_file(path: str | os.PathLike[str], site: str | None = None) -> SiteFile:
    """Read and validate a site file.

    Args:
        path: the file, or a folder that holds ``<site>.yaml``.
        site: the hospital's name in the federation; a file that names another hospital is refused.

    Raises:
        SiteFileError: one sentence with the file, the key, expected and got.
    """
    path = Path(path)
    if path.is_dir():
        if not site:
            raise SiteFileError(f"{path} is a folder; name the site file in it")
        path = path / f"{site}.yaml"
    try:
        content = load_yaml(path)
    except OSError as error:
        raise SiteFileError(f"cannot read the site file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SiteFileError(f"{path}: expected YAML as text in UTF-8, got other bytes (at {error.start})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2020-13-01
        where = f" (line {mark.line + 1})" if (mark := getattr(error, "problem_mark", None)) else ""
        raise SiteFileError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(content, dict):
        raise SiteFileError(f"{path}: expected a mapping with the key 'datasets', got {type(content).__name__}")
    try:
        parsed = SiteFile.model_validate(_with_datasets(path, content))
    except ValidationError as error:
        raise SiteFileError(f"{path}: {first_problem(error, SiteFile)}") from error
    if site and parsed.site and parsed.site != site:
        raise SiteFileError(f"{path}: it is the site file of '{parsed.site}', but this hospital is '{site}'")
    _check_names(parsed, path)
    parsed._path = path
    for dataset in parsed.datasets.values():
        dataset._folder = path.parent
        if dataset.split.file:
            dataset.split._folder = path.parent
        dataset._storage = parsed.storage
    return parsed


def read_for_study(path: Path, site: str | None = None) -> SiteFile:
    """A site file for a study in this process, which no policy of a hospital's concerns: nothing leaves.

    Raises:
        SiteFileError: as ``load_site_file``.
    """
    return load_site_file(path, site).model_copy(update={"policy": STUDY})


def find_site_file(site: str, scope: Mapping[str, object] | None, kit_local: Path | None) -> SiteFile:
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


def _with_datasets(path: Path, content: dict[str, object]) -> dict[str, object]:
    """The content with each dataset read by its kind."""
    declared = content.get("datasets")
    if not isinstance(declared, dict):
        return content
    return {**content, "datasets": {name: _dataset(path, str(name), each) for name, each in declared.items()}}


def _dataset(path: Path, name: str, content: object) -> BaseModel:
    if not isinstance(content, dict):
        raise SiteFileError(f"{path}: 'datasets.{name}': expected a mapping, got {content!r}")
    if "kind" not in content:
        raise SiteFileError(f"{path}: key 'datasets.{name}.kind' is missing; expected {_KINDS}")
    import_named({"path": content["kind"]})
    found: type[BaseModel] = SiteFile
    try:
        found = kind_named(str(content["kind"]))
        return found.model_validate(content)
    except ConfigError as error:
        got = f"got {content['kind']!r}" + (f" ({error})" if "." in str(content["kind"]) else "")
        raise SiteFileError(f"{path}: 'datasets.{name}.kind': expected {_KINDS}, {got}") from error
    except ValidationError as error:
        raise SiteFileError(f"{path}: {first_problem(error, found, ('datasets', name))}") from error


def _check_names(parsed: SiteFile, path: Path) -> None:
    """Names travel: into messages, pages and folders."""
    named = [(key, name) for key in ("datasets", "checkpoints", "networks") for name in getattr(parsed, key)]
    for key, name in named:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise SiteFileError(f"{path}: '{key}': a name is letters, digits, '.', '_' or '-', got {name!r}")
    for name, dataset in parsed.datasets.items():
        try:
            for kind in dataset.class_names():
                check_name(kind)
        except ValueError as error:
            raise SiteFileError(f"{path}: 'datasets.{name}': {error}") from error


_KINDS = " or ".join(f"'{kind}'" for kind in KINDS)
