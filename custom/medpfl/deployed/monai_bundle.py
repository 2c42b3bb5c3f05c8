# SPDX-License-Identifier: Apache-2.0
"""A segmentation model as a MONAI bundle: NIfTI in, label map in the input's geometry out, run by MONAI's own tools.

The network is TorchScript, so the bundle needs no MedPFL. It does what ``medpfl predict`` does, in MONAI's own terms.
"""

import json
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
from medpfl.deployed.torchscript import inference, write_torchscript
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
        MedPFLError: the model does not segment volumes, or takes several channels.
    """
    spec = deployed.task.spec
    preparation = read_preparation(deployed.preparation, spec)
    of_images = preparation.form == "images"
    if spec.target is not Target.MASK or of_images:
        raise MedPFLError(
            "a MONAI bundle is written for models that segment volumes; this one's task is "
            f"{type(deployed.task).__name__}{' of images' if of_images else ''}: export it as torchscript or onnx"
        )
    if not spec.readout.exclusive:
        raise MedPFLError(
            "a MONAI bundle is written for classes of which one holds, and the regions of "
            f"{type(deployed.task).__name__} overlap: export it as torchscript or onnx"
        )
    if not isinstance(spec.readout, ByClass):
        raise MedPFLError("a MONAI bundle is written for one class a voxel; export this model as torchscript or onnx")
    if deployed.input_shape[0] != 1:
        raise MedPFLError(
            f"a MONAI bundle is written for images of one channel, this model takes {deployed.input_shape[0]}: export "
            "it as torchscript or onnx"
        )
    for name in ("configs", "models", "docs"):
        (folder / name).mkdir()
    spec = preparation.spec_with(spec)
    described = _metadata(deployed)
    # MONAI's own loader wants the metadata inside the archive as well.
    more = {"metadata.json": json.dumps(described)}
    write_torchscript(deployed, folder / "models" / "model.ts", more, tuple(getattr(deployed.task, "flips", ())))
    for name, content in (("metadata", described), ("inference", _inference(spec))):
        (folder / "configs" / f"{name}.json").write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
    (folder / "docs" / "license.txt").write_text(LICENCE, encoding="utf-8")


def _metadata(deployed: Deployed) -> dict[str, object]:
    import monai
    import nibabel

    channels, *size = deployed.input_shape
    patches = deployed.task.spec.whole
    history = deployed.meta.history
    tensor: dict[str, object] = {"type": "image", "spatial_shape": size, "dtype": "float32", "value_range": []}
    tensor["is_patch_data"] = patches
    names = dict(enumerate(deployed.class_names))
    image = {"format": "magnitude", "num_channels": channels, "channel_def": {"0": "image"}}
    pred = {"format": "segmentation", "num_channels": len(names), "channel_def": {str(k): v for k, v in names.items()}}
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by MedPFL {medpfl.__version__}"},
        "monai_version": monai.__version__,
        "pytorch_version": str(torch.__version__),
        "numpy_version": np.__version__,
        "required_packages_version": {"nibabel": nibabel.__version__, "pytorch-ignite": IGNITE},
        "task": f"Segmentation of {', '.join(deployed.class_names[1:])}"
        + ("" if len(size) == 3 else ", slice by slice"),
        "description": f"A model of MedPFL's, method {type(deployed.method).__name__}, trained by personalised "
        "federated learning. docs/README.md is its card.",
        "authors": history.site if history else "",
        "copyright": "see docs/license.txt",
        "intended_use": INTENDED_USE,
        "data_type": "nibabel",
        "pred_classes": ", ".join(f"{value}: {name}" for value, name in names.items()),
        "eval_metrics": history.test if history else {},
        "inference": {**inference(deployed), "flips_in_network": True},
        "network_data_format": {"inputs": {"image": {**tensor, **image}}, "outputs": {"pred": {**tensor, **pred}}},
    }


def _inference(spec: Spec) -> dict[str, object]:
    preprocessing: list[dict[str, JsonValue]] = [
        {"_target_": "LoadImaged", "keys": "image", "reader": "NibabelReader"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS", "labels": [["L", "R"], ["P", "A"], ["I", "S"]]},
        {"_target_": "Spacingd", "keys": "image", "pixdim": list(spec.spacing), "mode": "bilinear"},
        {**spec.intensity.as_monai(), "keys": "image"},
    ]
    if not spec.whole:  # as ``medpfl predict``: of at least the training's size, and a multiple for the network
        preprocessing += [
            {"_target_": "SpatialPadd", "keys": "image", "spatial_size": [*spec.size, -1]},
            {"_target_": "DivisiblePadd", "keys": "image", "k": [spec.multiple, spec.multiple, 1]},
        ]
    postprocessing = [
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
    return {
        "imports": ["$import glob", "$import numpy as np", "$import os"],
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
        "preprocessing": {"_target_": "Compose", "transforms": preprocessing},
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': f} for f in sorted(glob.glob(os.path.join(@dataset_dir, '*.nii*')))]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
        "inferer": _inferer(spec),
        "postprocessing": {"_target_": "Compose", "transforms": postprocessing},
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


def _inferer(spec: Spec) -> dict[str, object]:
    """Whole slices, or windows of a volume as the task itself slides them."""
    if spec.whole:
        windows = {"overlap": OVERLAP, "mode": "gaussian", "sw_batch_size": 4, "progress": False}
        if len(spec.size) == 2:
            return {"_target_": "SliceInferer", "roi_size": list(spec.size), "spatial_dim": 2, **windows}
        return {"_target_": "SlidingWindowInferer", "roi_size": list(spec.size), **windows}
    whole = {"roi_size": [-1, -1], "spatial_dim": 2, "sw_batch_size": 16, "progress": False}
    return {"_target_": "SliceInferer", **whole}
