# SPDX-License-Identifier: Apache-2.0
"""``benchmarks caching``: loading data whose prepared cases are kept on disk, beside loading them without.

One process on one core with one thread. Each turn loads a dataset without a cache, with an empty one, and once more
with what that left.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
import yaml

from benchmarks.common import OutOption, machine, markdown, write_json
from benchmarks.reading import SIZE, write_images
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.data.preparation import Spec
from medpfl.data.site_file import load_site_file
from medpfl.data.target import Target
from medpfl.demo.hippocampus import write_hippocampus

WITHOUT, COLD, WARM = "without", "first time", "afterwards"
IMAGES = 300
SHAPE, VOXEL = (256, 256, 60), (0.8, 0.8, 3.0)


def measure(data: Path | None, volumes: int, repeats: int) -> dict[str, Any]:
    """Seconds (medians) of loading each dataset, and the ratios to loading it without a cache.

    Args:
        data: as for ``medpfl demo hippocampus``.
        volumes: how many of its largest source.
        repeats: turns; one more warms up.
    """
    for name, value, least in (("volumes", volumes, 4), ("repeats", repeats, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as folder:
            rows = [_measured(*setting, repeats) for setting in _settings(Path(folder), data, volumes)]
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)
    return {"repeats": repeats, "settings": rows}


def _settings(folder: Path, data: Path | None, volumes: int) -> list[tuple[str, Path, Spec]]:
    """What is loaded, the folder with its declaration, and as what."""
    hippocampus, large, images = folder / "hippocampus", folder / "large", folder / "images"
    sites = write_hippocampus(hippocampus, data)
    lists = [hippocampus / site / "datalist.json" for site in sites]
    items = max((json.loads(path.read_text())["training"] for path in lists), key=len)[:volumes]
    site = next(site for site in sites if (hippocampus / site / items[0]["image"]).exists())
    _declare(hippocampus, f"{site}/datalist.json", {"training": items}, {0: "none", 1: "anterior", 2: "posterior"})
    _write_large(large)
    write_images(images, IMAGES)
    dataset = {"kind": "images", "files": "{split}/{class}/*.jpg", "split": {"column": "split"}}
    label = {"column": "class", "classes": {"a": ["a"], "b": ["b"]}}
    (images / "declared.yaml").write_text(yaml.safe_dump({**dataset, "label": label}))
    photographs = Spec(Target.CLASS, ("images",), SIZE)
    whole = Spec(Target.MASK, ("volumes",), (40, 56, 40))
    slices = Spec(Target.MASK, ("volumes",), (64, 64))
    thick = Spec(Target.MASK, ("volumes",), (128, 128, 32), (1.0, 1.0, 3.0))
    return [
        (f"{len(items)} hippocampus volumes, whole, 1 mm", hippocampus, whole),
        (f"{len(items)} hippocampus volumes, slices of 64 x 64", hippocampus, slices),
        ("2 volumes of 256 x 256 x 60 from 0.8 to 1 mm", large, thick),
        (f"{IMAGES} JPEG files of 200 x 150 pixels at {SIZE[1]} x {SIZE[0]}", images, photographs),
    ]


def _declare(folder: Path, name: str, listed: dict[str, Any], labels: dict[int, str]) -> None:
    (folder / name).write_text(json.dumps(listed))
    (folder / "declared.yaml").write_text(yaml.safe_dump({"kind": "volumes", "datalist": name, "labels": labels}))


def _write_large(folder: Path) -> None:
    import nibabel as nib

    folder.mkdir()
    rng = np.random.default_rng(0)
    items = []
    for number in range(2):
        values = rng.normal(size=SHAPE).astype(np.float32)
        for kind, array in (("image", values), ("label", (values > 1).astype(np.uint8))):
            nib.save(nib.Nifti1Image(array, np.diag([*VOXEL, 1.0])), folder / f"{number}_{kind}.nii.gz")
        items.append({kind: f"{number}_{kind}.nii.gz" for kind in ("image", "label")})
    _declare(folder, "list.json", {"training": items[:1], "test": items[1:]}, {0: "none", 1: "organ"})


def _measured(name: str, folder: Path, spec: Spec, repeats: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {WITHOUT: [], COLD: [], WARM: []}
    kept = 0
    for turn in range(repeats + 1):
        storage = {"cache": f"cache-{turn}"}
        for step, stored in ((WITHOUT, {}), (COLD, storage), (WARM, storage)):
            found[step].append(_loading(folder, stored, spec))
        kept = sum(path.stat().st_size for path in (folder / f"cache-{turn}").rglob("*.case"))
    seconds = {step: round(float(np.median(taken[1:])), 4) for step, taken in found.items()}
    ratios = {step: round(seconds[step] / seconds[WITHOUT], 3) for step in (COLD, WARM)}
    return {"data": name, "seconds": seconds, "to_without": ratios, "kept_mb": round(kept / 1e6, 1)}


def _loading(folder: Path, storage: dict[str, str], spec: Spec) -> float:
    dataset = yaml.safe_load((folder / "declared.yaml").read_text())
    (folder / "measured.yaml").write_text(yaml.safe_dump({"storage": storage, "datasets": {"a": dataset}}))
    site_file = load_site_file(folder / "measured.yaml")
    started = time.perf_counter()
    site_file.load("a", spec)
    return time.perf_counter() - started


def table_of(results: dict[str, Any]) -> str:
    """Seconds and ratios, dataset by dataset."""
    rows = []
    for row in results["settings"]:
        seconds, ratios = row["seconds"], row["to_without"]
        each = [f"{seconds[step]:.2f}" for step in (WITHOUT, COLD, WARM)]
        rows.append([row["data"], *each, f"{ratios[COLD]:.2f}", f"{ratios[WARM]:.3f}", f"{row['kept_mb']:.1f}"])
    headings = ["seconds to load", WITHOUT, COLD, WARM, f"{COLD} to {WITHOUT}", f"{WARM} to {WITHOUT}", "kept, MB"]
    return f"One core and thread, medians of {results['repeats']} turns:\n\n" + markdown(headings, rows)


def command(
    data: Annotated[Path | None, typer.Option(help="As for 'medpfl demo hippocampus'.")] = None,
    volumes: Annotated[int, typer.Option(help="Hippocampus volumes.")] = 40,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    out: OutOption = None,
) -> None:
    """Loading data whose prepared cases are kept on disk, as a multiple of loading them without."""
    facts = machine()
    results = measure(data, volumes, repeats)
    write_json(out, "caching", facts, results)
    say(table_of(results))
