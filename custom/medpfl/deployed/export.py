# SPDX-License-Identifier: Apache-2.0
"""Export a deployed model for software that does not know MedPFL: TorchScript, ONNX, or a MONAI bundle.

What is written is read back and must give the model's own outputs, else nothing is left behind.
"""

import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medpfl.core.errors import MedPFLError
from medpfl.data.target import Target
from medpfl.deployed.card import INTENDED_USE, card
from medpfl.deployed.model_file import Deployed, load_deployed

TOLERANCE = 1e-5
"""Largest difference of an exported model's outputs from the model's; of the largest output where that is above 1."""
METADATA = "medpfl.json"
"""Name of the metadata: a file inside the TorchScript archive, a property of the ONNX model."""


def export(model: Path, target: Path, kind: str) -> Path:
    """Write a deployed model into the new folder ``target``, with its card as README.md.

    Args:
        model: the deployed model's file.
        kind: "torchscript" (model.ts), "onnx" (model.onnx) or "monai" (a MONAI bundle).

    Raises:
        MedPFLError: the model cannot be read or exported so, a package is missing, or the folder exists already or
            cannot be written.
    """
    from medpfl.deployed.monai_bundle import write_bundle

    writers: dict[str, Callable[[Deployed, Path], None]] = {
        "torchscript": lambda deployed, folder: write_torchscript(deployed, folder / "model.ts"),
        "onnx": lambda deployed, folder: _write_onnx(deployed, folder / "model.onnx"),
        "monai": write_bundle,
    }
    if kind not in writers:
        raise MedPFLError(f"--format must be {', '.join(writers)}; got '{kind}'")
    if target.exists():
        raise MedPFLError(f"{target} exists already; remove it or export into another folder")
    deployed = load_deployed(model)
    if deployed.method.by_case:
        raise MedPFLError(
            f"{model}: {type(deployed.method).__name__} chooses a network case by case, which no export format can hold"
        )
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        writers[kind](deployed, unfinished)
        if deployed.meta.history:
            readme = unfinished / ("docs/README.md" if kind == "monai" else "README.md")
            readme.parent.mkdir(exist_ok=True)
            readme.write_text(card(deployed.meta, model.name, deployed.task.measures), encoding="utf-8")
        unfinished.rename(target)
    except OSError as error:
        raise MedPFLError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def metadata(deployed: Deployed) -> dict[str, Any]:
    """What a user of the exported network must know, as JSON values."""
    outputs = deployed(torch.zeros(1, *deployed.input_shape))
    return {
        "classes": deployed.class_names,
        "input": {"dtype": "float32", "shape": ["batch", *deployed.input_shape]},
        "output": {
            "dtype": str(outputs.dtype).removeprefix("torch."),
            "shape": ["batch", *outputs.shape[1:]],
            **_meaning(deployed.task.spec.target, outputs),
        },
        "task": deployed.meta.recipe.task,
        "preparation": deployed.preparation,
        "intended_use": INTENDED_USE,
        "sha256": deployed.meta.sha256,
    }


def _meaning(target: Target, outputs: Tensor) -> dict[str, str]:
    """How the outputs become the answer, where that does not depend on the task."""
    if target is Target.VALUE:
        return {"answer": f"{target.told}, of which only the task knows how it follows from the outputs"}
    if target is Target.LABELS:
        return {"probabilities": "sigmoid of each label's output"}
    return {"probabilities": "sigmoid: of the second class" if outputs.shape[1] == 1 else "softmax over axis 1"}


def write_torchscript(deployed: Deployed, path: Path, more: dict[str, str] | None = None) -> None:
    """Trace the model; the metadata, and what ``more`` names, lie inside the archive.

    Raises:
        MedPFLError: the traced model gives other outputs.
    """
    with _quiet():
        inputs = torch.randn(2, *deployed.input_shape)
        traced = torch.jit.trace(deployed.module(), inputs, check_trace=False)  # type: ignore[no-untyped-call]
        extra = {METADATA: json.dumps(metadata(deployed)), **(more or {})}
        torch.jit.save(traced, str(path), _extra_files=extra)
        again = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    _check_same(deployed, again)


def _write_onnx(deployed: Deployed, path: Path) -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise MedPFLError(
            f"the export to ONNX needs {' and '.join(missing)}, not installed here: pip install {' '.join(missing)}"
        )
    import onnx
    from onnx.reference import ReferenceEvaluator

    try:
        with _quiet():
            program = torch.onnx.export(
                deployed.module(),
                (torch.randn(2, *deployed.input_shape),),
                dynamo=True,
                input_names=["input"],
                output_names=["output"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise MedPFLError(f"this model cannot be exported to ONNX: {_which(deployed)}: {cause}") from error
    assert program is not None
    content = program.model_proto
    content.metadata_props.add(key=METADATA, value=json.dumps(metadata(deployed)))
    onnx.save(content, str(path))
    onnx.checker.check_model(str(path), full_check=True)
    session = ReferenceEvaluator(str(path))
    _check_same(deployed, lambda inputs: torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0]))


def _check_same(deployed: Deployed, exported: Callable[[Tensor], Tensor]) -> None:
    """Compare outputs on random inputs of two batch sizes, neither of them the one that was traced."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 5):
        inputs = torch.randn(size, *deployed.input_shape, generator=generator)
        expected = deployed(inputs)
        with torch.inference_mode():
            found = exported(inputs)
        scale = max(1.0, float(expected.abs().max()))
        if found.shape != expected.shape or not (found - expected).abs().max() <= TOLERANCE * scale:
            raise MedPFLError(
                f"this model cannot be exported so: {_which(deployed)}: with {size} inputs the exported network gives "
                "other outputs than the model"
            )


def _which(deployed: Deployed) -> str:
    return f"model '{deployed.name}' of {type(deployed.method).__name__}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own news: deprecations, and optional packages that they look for."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
