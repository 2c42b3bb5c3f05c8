# SPDX-License-Identifier: Apache-2.0
"""The 20 simulated hospitals of FedAP's Table 4: OrganCMNIST under the official index lists; both files are the user's.

MedMNIST v2 (Yang et al., Scientific Data 2023, CC BY 4.0); the lists are those of jindongwang/tlbook-code,
chap19_fl/split/organcmnist/partion_0.05.npy, as JSON: 40 lists of rows, train and test of each client.
"""

import hashlib
import os
from pathlib import Path

from medpfl.core.errors import DataError
from medpfl.data.arrays.npz import Npz
from medpfl.demo.index_lists import declare_checkpoint, labels_of, read_lists, write_splits

ENVIRONMENT_VARIABLE = "MEDPFL_ORGANC_DATA"
FILE, LISTS, PRETRAINED = "organcmnist.npz", "organc_alpha0.05.json", "organc_lenet5.safetensors"
MD5 = (
    "0afa5834fb105f7705a7d93372119a21"  # MedMNIST v2 (record 5208230); v3 has fewer images, which the lists do not fit
)
ROWS = {"train": 13_000, "val": 2_392, "test": 8_268}
CLIENTS = 20
CLASSES = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right",
    "liver", "lung-left", "lung-right", "pancreas", "spleen",
)  # fmt: skip


def write_organc(folder: Path, data: Path | None = None, lists: Path | None = None, md5: str = MD5) -> list[str]:
    """Write the site files of the 20 clients; returns their names.

    Args:
        data: the .npz file; None: organcmnist.npz in $MEDPFL_ORGANC_DATA.
        lists: the JSON file of index lists; None: organc_alpha0.05.json beside ``data``.
        md5: what the file's MD5 must be.

    Raises:
        DataError: a file is not there, or is another one than the protocol's; says what to download.
    """
    data = data or Path(os.environ.get(ENVIRONMENT_VARIABLE, "data/organc")) / FILE
    lists = lists or data.with_name(LISTS)
    missing = [str(file) for file in (data, lists) if not file.is_file()]
    if missing:
        raise DataError(
            f"{' and '.join(missing)}: no such file. Download OrganCMNIST (28 x 28) of MedMNIST v2 (Zenodo record "
            f"5208230), put it beside the index lists as {FILE} and {LISTS}, and set {ENVIRONMENT_VARIABLE} to their "
            "folder"
        )
    _check_file(data, md5)
    splits = read_lists(lists, ["train", "test"])
    if len(splits) != CLIENTS:
        raise DataError(f"{lists}: expected the lists of {CLIENTS} clients, got {len(splits)}")
    write_splits(folder, data, "organc", splits, labels_of(data), CLASSES)
    if (pretrained := data.with_name(PRETRAINED)).is_file():
        declare_checkpoint([folder / f"{site}.yaml" for site in splits], "organc_lenet5", pretrained)
    return list(splits)


def _check_file(data: Path, md5: str) -> None:
    archive = Npz(data)
    for part, count in ROWS.items():
        for key, shapes in ((f"{part}_images", [(count, 28, 28)]), (f"{part}_labels", [(count, 1), (count,)])):
            shape, dtype = archive.header(key)
            if shape not in shapes or dtype != "uint8":
                raise DataError(f"{data}: array '{key}': expected uint8 {shapes[0]}, got {dtype} {shape}")
    with open(data, "rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != md5:
        raise DataError(f"{data}: it is not the file of the protocol: expected MD5 {md5}, got {found}")
