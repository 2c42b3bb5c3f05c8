# SPDX-License-Identifier: Apache-2.0
"""What is exported is there to be given away: it names no folder of the hospital's machine, in which its account's name
stands."""

import io
import zipfile
from pathlib import Path

import pytest
import torch

import medpfl
from medpfl.core.mixers import SoftPull
from medpfl.deployed.export import export
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods import softpull
from medpfl.models.unet import UNet
from medpfl.tasks.contract import Task
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular
from pictures import TABLE, declare, write_images
from small_jobs import write_table_sites
from tools import run


def deployed(task: Task, sites: dict[str, Path], folder: Path) -> Path:
    job = Job("t", 2, Settings(rounds=1, references=()), {"model": SoftPull(lam=0.5)}, softpull.SoftPull(steps=1), task)
    run(job, sites, folder)
    return folder / "home" / "berta" / "t" / "models" / "personal-best.safetensors"


def read(file: Path) -> bytes:
    """With all that an archive holds, which may lie in it compressed."""
    content = file.read_bytes()
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            content = b"".join(archive.read(name) for name in archive.namelist())
    return content


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torchscript", "onnx", "monai"])
def test_what_is_exported_names_no_folder(form: str, tmp_path: Path) -> None:
    if form == "monai":
        task: Task = Segmentation(dataset="skin", size=(16, 16), architecture=UNet((4, 8), residual_units=1))
        for site in ("anna", "berta"):
            write_images(tmp_path / site, 16, (40, 30))
        model = deployed(task, {site: declare(tmp_path / site, TABLE) for site in ("anna", "berta")}, tmp_path)
    else:
        model = deployed(Tabular("blood", (4,)), write_table_sites(tmp_path / "sites", ["anna", "berta"]), tmp_path)
    folder = export(model, tmp_path / "out", form)
    code = {Path(module.__file__ or "").parents[1] for module in (medpfl, torch)}
    for file in (file for file in folder.rglob("*") if file.is_file()):
        content = read(file)
        for place in (*code, tmp_path, Path(__file__).parent):
            assert str(place).encode() not in content, f"{file.relative_to(folder)} names {place}"
