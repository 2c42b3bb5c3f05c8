# SPDX-License-Identifier: Apache-2.0
"""Export a deployed model for software that does not know MedPFL: TorchScript, ONNX, or a MONAI bundle.

What is written is read back and must give the model's own outputs, else nothing is left behind.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from medpfl.core.errors import MedPFLError
from medpfl.core.extras import require
from medpfl.deployed import reference
from medpfl.deployed.card import card
from medpfl.deployed.model_file import Deployed, load_deployed
from medpfl.deployed.monai_bundle import write_bundle
from medpfl.deployed.torchscript import METADATA, check_same, example, metadata, quiet, which, write_torchscript

if TYPE_CHECKING:
    from onnx import NodeProto


def export(model: Path, target: Path, kind: str) -> Path:
    """Write a deployed model into the new folder ``target``, with its card as README.md.

    Args:
        model: the deployed model's file.
        kind: "torchscript" (model.ts), "onnx" (model.onnx) or "monai" (a MONAI bundle); the first two with medpfl.json
            and, for what it can prepare, prepare.py.

    Raises:
        MedPFLError: the model cannot be read or exported so, a package is missing, or the folder exists already or
            cannot be written.
    """
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
        if kind != "monai":
            _write_reference(deployed, unfinished)
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


def _write_reference(deployed: Deployed, folder: Path) -> None:
    """What prepares inputs without MedPFL: the numbers, and the program where it knows the kind of data."""
    (folder / METADATA).write_text(json.dumps(metadata(deployed), indent=1) + "\n", encoding="utf-8")
    if deployed.preparation.get("kind") in reference.KINDS:
        shutil.copyfile(reference.__file__, folder / "prepare.py")


def _write_onnx(deployed: Deployed, path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        require(package, "export", "the export to ONNX")
    import onnx
    from onnx.reference import ReferenceEvaluator

    try:
        with quiet():
            program = torch.onnx.export(
                deployed.module(),
                (example(deployed),),
                dynamo=True,
                input_names=["input"],
                output_names=["output"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise MedPFLError(f"this model cannot be exported to ONNX: {which(deployed)}: {cause}") from error
    assert program is not None
    content = program.model_proto
    _forget_calls(content.graph.node)
    for function in content.functions:
        _forget_calls(function.node)
    content.metadata_props.add(key=METADATA, value=json.dumps(metadata(deployed)))
    onnx.save(content, str(path))
    onnx.checker.check_model(str(path), full_check=True)
    session = ReferenceEvaluator(str(path))
    check_same(deployed, lambda inputs: torch.from_numpy(session.run(None, {"input": inputs.numpy()})[0]))


def _forget_calls(nodes: "Iterable[NodeProto]") -> None:
    """Leave out where in Python each node comes from: that names folders of this machine, and with them the account."""
    for node in nodes:
        del node.metadata_props[:]
        for attribute in node.attribute:  # the branches of a condition
            for graph in (attribute.g, *attribute.graphs):
                _forget_calls(graph.node)
