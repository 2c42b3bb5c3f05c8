# SPDX-License-Identifier: Apache-2.0
"""The part of a MONAI bundle that only models for images need: whole photographs in, masks of their own size out.

MONAI resizes with another antialiasing than the training did, so the bundle's network resizes by itself.
"""

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from medpfl.data.pixels import CENTRE, SPREAD


class OnWholeImages(nn.Module):
    """A network as it takes images of any size: brings them to the size it was trained at, and its probabilities back.

    Inputs are N x C x H x W between 0 and 1, outputs N x K x H x W probabilities.
    """

    def __init__(self, network: torch.jit.ScriptModule, size: tuple[int, int]):
        super().__init__()
        self.network, self.size = network, list(size)
        self.centre, self.spread = CENTRE, SPREAD

    def forward(self, images: Tensor) -> Tensor:
        shape = [images.shape[2], images.shape[3]]
        small = images
        if shape != self.size:
            small = nn.functional.interpolate(images, size=self.size, mode="bilinear", antialias=True)
        shares = torch.softmax(self.network((small - self.centre) / self.spread), dim=1)
        if shape != self.size:
            shares = nn.functional.interpolate(shares, size=shape, mode="bilinear", antialias=True)
        return shares


def loading(channels: int) -> list[dict[str, JsonValue]]:
    """MONAI's transforms from an image file to the network's input: turned as it is meant to be seen, what is
    transparent black, 8 bits. Of 16 bits Pillow would make 8 by cutting what is above 255, and of several pictures it
    would take the first."""
    mode = "L" if channels == 1 else "RGB"
    seen = "Image.alpha_composite(Image.new('RGBA', turned.size, 'black'), turned.convert('RGBA'))"
    plain = f"({seen} if turned.has_transparency_data else turned).convert('{mode}')"
    reader: dict[str, JsonValue] = {
        "_target_": "PILReader",
        # Opened anew, not by its path, by which Pillow mixes the pixels of a grey TIFF up that lies on its side.
        "converter": f"$lambda image: (lambda turned: {plain})"
        "(ImageOps.exif_transpose(Image.open(open(image.filename, 'rb'))))",
    }
    # Before the reader, after whose errors MONAI would try others, which see the file otherwise.
    eight = "(lambda image: image.mode[0] not in 'IF' and getattr(image, 'n_frames', 1) == 1)(Image.open(file))"
    check = f"$lambda file: torch._assert({eight}, 'expected one picture of 8 bits: ' + str(file)) or file"
    return [
        {"_target_": "Lambdad", "keys": "image", "func": check},
        {"_target_": "LoadImaged", "keys": "image", "reader": reader},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        {"_target_": "Transposed", "keys": "image", "indices": [0, 2, 1]},  # MONAI's order is width first
        {"_target_": "ScaleIntensityRanged", "keys": "image", "a_min": 0, "a_max": 255, "b_min": 0, "b_max": 1},
    ]


def saving() -> list[dict[str, JsonValue]]:
    """MONAI's transforms from probabilities to a PNG file of class numbers."""
    return [
        {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
        {"_target_": "Transposed", "keys": "pred", "indices": [0, 2, 1]},
        {
            "_target_": "SaveImaged",
            "keys": "pred",
            "output_dir": "@output_dir",
            "output_ext": ".png",
            "output_postfix": "seg",
            "output_dtype": "$np.uint8",
            "writer": "PILWriter",
            "separate_folder": False,
            "resample": False,
        },
    ]
