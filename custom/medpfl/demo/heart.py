# SPDX-License-Identifier: Apache-2.0
"""Site files for the four hospitals of the UCI heart-disease data, which the user downloads.

Columns, row filter, coding and standardisation follow FLamby's Fed-Heart-Disease (Ogier du Terrail et al., NeurIPS
2022): ten of the thirteen features, rows with a missing value in these dropped, chest pain and resting ECG one-hot
without their first category, standardised by hospital. Deviation: a column that is constant in a hospital's training
part is divided by 1 and not by 1e-9, which would make a deviating test row arbitrarily large.
"""

import os
from pathlib import Path

import yaml

from medpfl.core.errors import DataError

ENVIRONMENT_VARIABLE = "MEDPFL_HEART_DATA"
HOSPITALS = {"cleveland": "cleveland", "hungary": "hungarian", "switzerland": "switzerland", "long-beach": "va"}
COLUMNS = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num".split(",")  # noqa: SIM905
FEATURES = {
    "age": "number",
    "sex": "number",
    "cp": [1, 2, 3, 4],
    "trestbps": "number",
    "chol": "number",
    "fbs": "number",
    "restecg": [0, 1, 2],
    "thalach": "number",
    "exang": "number",
    "oldpeak": "number",
}
# The test part of both is FLamby's. FLamby has no validation part, so nothing can be chosen on one.
SPLITS = {
    "flamby": {"train": 0.66, "test": 0.34},
    "validated": {"train": 0.5, "validation": 0.16, "test": 0.34},
}


def write_heart(folder: Path, data: Path | None = None, split: str = "validated") -> list[str]:
    """Write ``<hospital>.yaml`` for the four hospitals into ``folder``; returns their names.

    Args:
        data: folder with the four ``processed.*.data`` files; None: $MEDPFL_HEART_DATA.
        split: "validated", or "flamby" for that project's exact split.

    Raises:
        DataError: the files are not there; says what to download and where to put it.
    """
    data = data or Path(os.environ.get(ENVIRONMENT_VARIABLE, "data/uci_heart"))
    files = {site: data / f"processed.{name}.data" for site, name in HOSPITALS.items()}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise DataError(
            f"the UCI heart-disease data are not in {data} ({', '.join(missing)} missing). Download the dataset 'Heart "
            f"Disease' (id 45) from the UCI Machine Learning Repository, unpack it, and set {ENVIRONMENT_VARIABLE} to "
            "the folder with its processed.cleveland.data, processed.hungarian.data, processed.switzerland.data and "
            "processed.va.data"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for site, file in files.items():
        heart = {
            "kind": "table",
            "files": [str(file.resolve())],
            "columns": COLUMNS,
            "missing": ["?"],
            "missing_rows": "drop",
            "features": FEATURES,
            "label": {"column": "num", "classes": {"healthy": [0], "disease": [1, 2, 3, 4]}},
            "split": {"seed": 43, "stratify": True, "fractions": SPLITS[split]},
        }
        text = yaml.safe_dump({"site": site, "datasets": {"heart": heart}}, sort_keys=False)
        (folder / f"{site}.yaml").write_text(
            "# UCI heart disease (CC BY 4.0): Janosi, Steinbrunn, Pfisterer, Detrano; coded as in FLamby.\n" + text
        )
    return list(HOSPITALS)
