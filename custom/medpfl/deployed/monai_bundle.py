# SPDX-License-Identifier: Apache-2.0
"""A segmentation model as a MONAI bundle, run by MONAI's own tools: NIfTI in, label map in the input's geometry out; or
images in, PNG masks of their size out.

The network is TorchScript, so the bundle needs no MedPFL. It does what ``medpfl predict`` does, in MONAI's own terms.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue

import medpfl
from medpfl.core.errors import MedPFLError
from medpfl.data.kinds import read_preparation
from medpfl.data.preparation import Spec
from medpfl.data.readout import ByClass
from medpfl.data.target import Target
from medpfl.deployed.card import INTENDED_USE
from medpfl.deployed.model_file import Deployed
from medpfl.deployed.monai_images import OnWholeImages, loading, saving
from medpfl.deployed.torchscript import TOLERANCE, inference, quiet, save_script, tiled, which, write_torchscript
from medpfl.tasks.flips import flipped
from medpfl.tasks.patches import OVERLAP

IGNITE = "0.5.5"
"""MONAI's engines need pytorch-ignite to run the bundle; the version it was tested with."""
SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
LICENCE = """The files under configs/ were written by MedPFL and are under the Apache License 2.0.
The model was trained on a hospital's data: that hospital decides on its licence, and whether it may be given to others.
"""


def write_bundle(deployed: Deployed, folder: Path) -> None:
    """Write configs/, models/model.ts and docs/license.txt.

    Raises:
        MedPFLError: the model segments nothing, segments volumes of several channels, or patches of images; or it
            takes slices of one size alone.
    """
    spec = deployed.task.spec
    preparation = read_preparation(deployed.preparation, spec)
    of_images = preparation.form == "images"
    of_patches = of_images and spec.target is Target.MASK and spec.whole
    if spec.target is not Target.MASK or of_patches:
        cases = " of patches of images" if of_patches else " of images" if of_images else ""
        raise MedPFLError(
            "a MONAI bundle is written for models that segment volumes, or whole images; this one's task is "
            f"{type(deployed.task).__name__}{cases}: export it as torchscript or onnx"
        )
    if not spec.readout.exclusive:
        raise MedPFLError(
            "a MONAI bundle is written for classes of which one holds, and the regions of "
            f"{type(deployed.task).__name__} overlap: export it as torchscript or onnx"
        )
    if not isinstance(spec.readout, ByClass):
        raise MedPFLError("a MONAI bundle is written for one class a voxel; export this model as torchscript or onnx")
    if deployed.input_shape[0] != 1 and not of_images:
        raise MedPFLError(
            f"a MONAI bundle is written for volumes of one channel, this model takes {deployed.input_shape[0]}: export "
            "it as torchscript or onnx"
        )
    for name in ("configs", "models", "docs"):
        (folder / name).mkdir()
    spec = preparation.spec_with(spec)
    described = _metadata(deployed, of_images)
    # MONAI's own loader wants the metadata inside the archive as well.
    more = {"metadata.json": json.dumps(described)}
    model, flips = folder / "models" / "model.ts", tuple(getattr(deployed.task, "flips", ()))
    write_torchscript(deployed, model, more, flips)
    if not of_images and not tiled(deployed.task):
        _check_larger(deployed, model, flips)
    if of_images:
        network = OnWholeImages(torch.jit.load(str(model)), spec.plane())  # type: ignore[no-untyped-call]
        save_script(torch.jit.script(network), model, more)
    configuration = _run(_of_images(deployed.input_shape[0]) if of_images else _of_volumes(spec, tiled(deployed.task)))
    for name, content in (("metadata", described), ("inference", configuration)):
        (folder / "configs" / f"{name}.json").write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
    (folder / "docs" / "license.txt").write_text(LICENCE, encoding="utf-8")


def _check_larger(deployed: Deployed, file: Path, flips: tuple[int, ...]) -> None:
    """Slices come as large as they are, and what was written down is what the network did at the training's size.

    Raises:
        MedPFLError: at a larger one it gives other outputs, or none.
    """
    channels, *size = deployed.input_shape
    step = deployed.task.spec.multiple
    inputs = torch.randn(1, channels, size[0] + step, size[1] + 2 * step, generator=torch.Generator().manual_seed(0))
    expected = flipped(deployed, inputs, flips, back=True)
    traced = torch.jit.load(str(file), map_location="cpu")  # type: ignore[no-untyped-call]
    try:
        with quiet(), torch.inference_mode():
            same = torch.allclose(traced(inputs), expected, atol=TOLERANCE * max(1.0, float(expected.abs().max())))
    except RuntimeError:
        same = False
    if not same:
        raise MedPFLError(
            f"this model cannot be exported as a MONAI bundle: {which(deployed)}: its network, written down, takes "
            f"slices of {' x '.join(map(str, size))} alone, and new ones have other sizes: export it as torchscript or "
            "onnx"
        )


def _metadata(deployed: Deployed, of_images: bool) -> dict[str, object]:
    import monai
    import nibabel

    channels, *size = deployed.input_shape
    patches = deployed.task.spec.whole
    per = {2: "" if of_images else ", slice by slice", 3: ""}
    history = deployed.meta.history
    tensor: dict[str, object] = {"type": "image", "spatial_shape": size, "dtype": "float32", "value_range": []}
    tensor["is_patch_data"] = patches
    names = dict(enumerate(deployed.class_names))
    colours = {3: {"0": "red", "1": "green", "2": "blue"}}.get(channels, {"0": "image"})
    image = {"format": "magnitude", "num_channels": channels, "channel_def": colours}
    pred = {"format": "segmentation", "num_channels": len(names), "channel_def": {str(k): v for k, v in names.items()}}
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by MedPFL {medpfl.__version__}"},
        "monai_version": monai.__version__,
        "pytorch_version": str(torch.__version__),
        "numpy_version": np.__version__,
        "required_packages_version": {"nibabel": nibabel.__version__, "pytorch-ignite": IGNITE},
        "task": f"Segmentation of {', '.join(deployed.class_names[1:])}" + per[len(size)],
        "description": f"A model of MedPFL's, method {type(deployed.method).__name__}, trained by personalised "
        "federated learning. docs/README.md is its card.",
        "authors": history.site if history else "",
        "copyright": "see docs/license.txt",
        "intended_use": INTENDED_USE,
        "data_type": "image files of 8 bits" if of_images else "nibabel",
        "pred_classes": ", ".join(f"{value}: {name}" for value, name in names.items()),
        "eval_metrics": history.test if history else {},
        "inference": {**inference(deployed), "flips_in_network": True},
        "network_data_format": {"inputs": {"image": {**tensor, **image}}, "outputs": {"pred": {**tensor, **pred}}},
    }


@dataclass(frozen=True)
class _Steps:
    """What differs between volumes and images: MONAI's transforms before and after the network, and what slides it."""

    before: list[dict[str, JsonValue]]
    after: list[dict[str, JsonValue]]
    inferer: dict[str, object]
    files: str


def _of_images(channels: int) -> _Steps:
    return _Steps(loading(channels), saving(), {"_target_": "SimpleInferer"}, "*")


def _of_volumes(spec: Spec, windows: bool) -> _Steps:
    preprocessing: list[dict[str, JsonValue]] = [
        {"_target_": "LoadImaged", "keys": "image", "reader": "NibabelReader"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS", "labels": [["L", "R"], ["P", "A"], ["I", "S"]]},
        {"_target_": "Spacingd", "keys": "image", "pixdim": list(spec.spacing), "mode": "bilinear"},
        *({**step, "keys": "image"} for step in spec.intensity.as_monai()),
    ]
    if not spec.whole:  # as ``medpfl predict``: of at least the training's size, and a multiple for the network
        preprocessing += [
            {"_target_": "SpatialPadd", "keys": "image", "spatial_size": [*spec.size, -1]},
            {"_target_": "DivisiblePadd", "keys": "image", "k": [spec.multiple, spec.multiple, 1]},
        ]
    postprocessing: list[dict[str, JsonValue]] = [
        {"_target_": "Activationsd", "keys": "pred", "softmax": True},
        {
            "_target_": "Invertd",
            "keys": "pred",
            "transform": "@preprocessing",
            "orig_keys": "image",
            "nearest_interp": False,
            "to_tensor": True,
        },
        {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
        {
            "_target_": "SaveImaged",
            "keys": "pred",
            "output_dir": "@output_dir",
            "output_postfix": "seg",
            "output_dtype": "$np.uint8",
            "separate_folder": False,
            "resample": False,
        },
    ]
    return _Steps(preprocessing, postprocessing, _inferer(spec, windows), "*.nii*")


_NUMBERS: dict[str, JsonValue] = {
    "_target_": "Lambdad",
    "keys": "pred",
    "func": "$lambda outputs: torch._assert(bool(outputs.isfinite().all()), 'the outputs are not numbers (NaN or "
    "infinite): the input holds such values, or ones far beyond those of training') or outputs",
}
"""Of a volume with a single NaN all outputs are NaN, of which the first class counts as the largest: no lesion."""


def _run(steps: _Steps) -> dict[str, object]:
    """configs/inference.json."""
    return {
        "imports": [
            "$import glob",
            "$import numpy as np",
            "$import os",
            "$from PIL import Image",
            "$from PIL import ImageOps",
        ],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/input'",
        "output_dir": "$@bundle_root + '/output'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": {
            "_target_": "torch.jit.load",
            "f": "$@bundle_root + '/models/model.ts'",
            "map_location": "@device",
        },
        "network": "$@network_def.eval()",
        "preprocessing": {"_target_": "Compose", "transforms": steps.before},
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': f} for f in sorted(glob.glob(os.path.join(glob.escape(@dataset_dir), "
            f"'{steps.files}')))]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
        "inferer": steps.inferer,
        "postprocessing": {"_target_": "Compose", "transforms": [_NUMBERS, *steps.after]},
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
        },
        "run": ["$@evaluator.run()"],
    }


def _inferer(spec: Spec, windows: bool) -> dict[str, object]:
    """Whole slices, or windows of a slice or a volume as the task itself slides them."""
    if windows:
        how = {"overlap": OVERLAP, "mode": "gaussian", "sw_batch_size": 4, "progress": False}
        if len(spec.size) == 2:
            return {"_target_": "SliceInferer", "roi_size": list(spec.size), "spatial_dim": 2, **how}
        return {"_target_": "SlidingWindowInferer", "roi_size": list(spec.size), **how}
    whole = {"roi_size": [-1, -1], "spatial_dim": 2, "sw_batch_size": 16, "progress": False}
    return {"_target_": "SliceInferer", **whole}
