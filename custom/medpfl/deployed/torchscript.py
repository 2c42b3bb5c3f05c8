# SPDX-License-Identifier: Apache-2.0
"""A deployed model as TorchScript; what every export says of the model, and how it is compared with it."""

import contextlib
import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from medpfl.core.errors import MedPFLError
from medpfl.data.pixels import CENTRE, SPREAD
from medpfl.data.readout import ByRegion
from medpfl.data.target import Target
from medpfl.deployed.card import INTENDED_USE
from medpfl.deployed.model_file import Deployed
from medpfl.tasks.contract import Task
from medpfl.tasks.flips import flipped
from medpfl.tasks.patches import OVERLAP

TOLERANCE = 1e-5
"""Largest difference of an exported model's outputs from the model's; of the largest output where that is above 1."""
METADATA = "medpfl.json"
"""Name of the metadata: a file inside the TorchScript archive, a property of the ONNX model."""


def metadata(deployed: Deployed) -> dict[str, object]:
    """What a user of the exported network must know, as JSON values."""
    outputs = deployed(torch.zeros(1, *deployed.input_shape))
    return {
        "classes": deployed.class_names,
        "input": {"dtype": "float32", "shape": ["batch", *deployed.input_shape]},
        "output": {
            "dtype": str(outputs.dtype).removeprefix("torch."),
            "shape": ["batch", *outputs.shape[1:]],
            **_meaning(deployed.task, outputs),
        },
        "task": deployed.meta.recipe.task,
        "inference": inference(deployed),
        "preparation": deployed.preparation,
        "grid": grid(deployed),
        "intended_use": INTENDED_USE,
        "sha256": deployed.meta.sha256,
    }


def grid(deployed: Deployed) -> dict[str, object] | None:
    """The size to which pixels or whole volumes are brought and how, and the scaling of pixels, in numbers; None of
    other inputs."""
    spec, form = deployed.task.spec, deployed.preparation.get("kind")
    if form == "volumes" and spec.target is Target.CLASS:  # the intensities are changed after it
        return {"orientation": "RAS", "size": list(spec.size), "interpolation": "area"}
    if form not in ("images", "arrays"):
        return None
    found: dict[str, object] = {
        "size": None if spec.whole else list(spec.size),
        "interpolation": "bilinear",
        "antialias": True,
        "align_corners": False,
    }
    if form == "images":
        found["scaling"] = {"maximum": {"uint8": 255, "uint16": 65535}, "centre": CENTRE, "spread": SPREAD}
    return found


def tiled(task: Task) -> bool:
    """Whether the task predicts a case window by window; one of another package says so by its spec."""
    return bool(getattr(task, "tiled", task.spec.whole))


def inference(deployed: Deployed) -> dict[str, object]:
    """What ``medpfl predict`` does around the network, and an export to TorchScript or ONNX does not: windows and
    flips, in numbers. Where there are windows, each is flipped by itself."""
    task = deployed.task
    spec = task.spec
    flips = list(getattr(task, "flips", ()))
    if not tiled(task):
        return {"windows": None, "flips": flips}
    windows = {"size": list(spec.size), "overlap": OVERLAP, "weights": "gaussian", "sigma_scale": 0.125, "padding": 0}
    return {"windows": windows, "flips": flips, "flipped": "each window"}


def _meaning(task: Task, outputs: Tensor) -> dict[str, object]:
    """How the outputs become the answer."""
    target, readout = task.spec.target, task.spec.readout
    if target in (Target.VALUE, Target.SURVIVAL):
        return {"answer": f"{target.told}: {task.reading}"}
    if isinstance(readout, ByRegion):
        return {"probabilities": task.reading, "written": list(readout.order)}
    if target is Target.LABELS:
        return {"probabilities": "sigmoid of each label's output"}
    return {"probabilities": "sigmoid: of the second class" if outputs.shape[1] == 1 else "softmax over axis 1"}


def write_torchscript(
    deployed: Deployed, path: Path, more: dict[str, str] | None = None, flips: tuple[int, ...] = ()
) -> None:
    """Trace the model; the metadata, and what ``more`` names, lie inside the archive.

    Args:
        flips: axes of images along which what is written mirrors them itself; its outputs are the means.

    Raises:
        MedPFLError: torch cannot trace the model or read what it wrote, or the traced model gives other outputs.
    """
    with quiet():
        inputs = example(deployed)
        module = Mirrored(deployed.module(), flips) if flips else deployed.module()
        extra = {METADATA: json.dumps(metadata(deployed)), **(more or {})}
        try:
            traced = torch.jit.trace(module, inputs, check_trace=False)  # type: ignore[no-untyped-call]
            _check_recurrent(deployed, module, inputs, traced)
            save_script(traced, path, extra)
            again = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # torch's, of names with other letters than ASCII's, say
            why = str(error).strip().splitlines()[0]
            raise MedPFLError(f"this model cannot be exported to TorchScript: {which(deployed)}: {why}") from error
    check_same(deployed, again, flips)


def _check_recurrent(deployed: Deployed, module: nn.Module, inputs: Tensor, traced: torch.jit.ScriptModule) -> None:
    """Torch's recurrent layers, once traced, do not look whether their first state is of as many inputs as are given:
    of another number they read beyond it and end the process. So they are not run where a number of inputs is written
    down, as from ``len``; in another trace it is another constant.

    Raises:
        MedPFLError: it is.
    """
    if not any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
        return
    more = torch.cat([inputs, inputs[:1]])
    again = torch.jit.trace(module, more, check_trace=False)  # type: ignore[no-untyped-call]
    if _constants(traced) != _constants(again):
        raise MedPFLError(
            f"this model cannot be exported to TorchScript: {which(deployed)}: its recurrent layers are written down "
            f"for {len(inputs)} inputs alone; a network that uses the number of its inputs must take it from their "
            "'shape' (not from 'len')"
        )


def _constants(traced: torch.jit.ScriptModule) -> list[str]:
    return re.findall(r"prim::Constant\[value=([^\]]*)\]", str(traced.inlined_graph))


def save_script(module: torch.jit.ScriptModule, path: Path, more: Mapping[str, str]) -> None:
    """Write a module that asks for no gradients, without the stack of Python's calls that torch keeps of every
    operation: it names folders of this machine, and with them the account, to whoever is given the file.

    Args:
        more: name to text of what lies inside the archive beside it.
    """
    whole = io.BytesIO()
    learnt = [weight for weight in module.parameters() if weight.requires_grad]
    try:
        for weight in learnt:  # the module's weights are the model's own; in the file nothing is to be learnt
            weight.requires_grad_(False)
        torch.jit.save(module, whole, _extra_files=dict(more))
    finally:
        for weight in learnt:
            weight.requires_grad_(True)
    with zipfile.ZipFile(whole) as made, zipfile.ZipFile(path, "w") as kept:
        for one in made.infolist():
            if not one.filename.endswith(".debug_pkl"):
                kept.writestr(one, made.read(one))


class Mirrored(nn.Module):
    """A network for images with its test-time flips."""

    def __init__(self, network: nn.Module, flips: tuple[int, ...]):
        super().__init__()
        self.network, self._flips = network, flips

    def forward(self, inputs: Tensor) -> Tensor:
        return flipped(self.network, inputs, self._flips, back=True)


def example(deployed: Deployed) -> Tensor:
    """What tracers are shown: two random inputs, the same at every call (2 x input shape)."""
    return torch.randn(2, *deployed.input_shape, generator=torch.Generator().manual_seed(1))


def check_same(deployed: Deployed, exported: Callable[[Tensor], Tensor], flips: tuple[int, ...] = ()) -> None:
    """Compare outputs on random inputs of two batch sizes, neither of them the one that was traced, and on their
    negatives: a rule that asks for a sign takes the branch that the tracer did not see at one of them.

    Raises:
        MedPFLError: they differ, or the exported network takes no such number of inputs.
    """
    generator = torch.Generator().manual_seed(0)
    for size in (1, 5):
        drawn = torch.randn(size, *deployed.input_shape, generator=generator)
        for inputs in (drawn, -drawn):
            expected = flipped(deployed, inputs, flips, back=True)
            try:
                with torch.inference_mode():
                    found = exported(inputs)
            except RuntimeError as error:  # torch's, of a program for as many inputs as it was traced with
                raise MedPFLError(
                    f"this model cannot be exported so: {which(deployed)}: with {size} inputs the exported network "
                    "ends with an error; a network that uses the number of its inputs must take it from their 'shape' "
                    "(not from 'len')"
                ) from error
            scale = max(1.0, float(expected.abs().max()))
            if found.shape != expected.shape or not (found - expected).abs().max() <= TOLERANCE * scale:
                raise MedPFLError(
                    f"this model cannot be exported so: {which(deployed)}: with {size} inputs the exported network "
                    "gives other outputs than the model"
                )


def which(deployed: Deployed) -> str:
    """For messages."""
    return f"model '{deployed.name}' of {type(deployed.method).__name__}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
