# SPDX-License-Identifier: Apache-2.0
"""A job takes a hospital's own patients for public data: what networks say of each of them would leave, row by row."""

from pathlib import Path

import pytest
import yaml

from baselines import begin
from medpfl.core.errors import SiteFileError
from medpfl.data.site_file import load_site_file
from medpfl.methods.dsfl import DSFL
from medpfl.methods.feddf import FedDF
from medpfl.methods.fedmd import FedMD
from medpfl.methods.kt_pfl import KTpFL
from medpfl.methods.on_public_data import OnPublicData
from small_jobs import small_job, write_table_sites

METHODS: list[type[OnPublicData]] = [DSFL, FedMD, FedDF, KTpFL]


@pytest.mark.parametrize("method", METHODS)
def test_private_data_named_as_public_are_refused(method: type[OnPublicData], tmp_path: Path) -> None:
    files = write_table_sites(tmp_path / "sites")
    job = small_job(mixers={"public": method(public="blood").components()["public"]}, method=method(public="blood"))
    with pytest.raises(SiteFileError, match=r"'datasets\.blood' does not say 'public: true'") as refused:
        begin(job, files, tmp_path / "run")
    assert refused.value.public == "dataset 'blood' is not marked as public at this hospital"


def test_only_the_hospital_marks_data_as_public(tmp_path: Path) -> None:
    files = write_table_sites(tmp_path / "sites")
    for file in files.values():
        content = yaml.safe_load(file.read_text())
        content["datasets"]["shared"] = {**content["datasets"]["blood"], "files": ["anna.csv"], "public": True}
        file.write_text(yaml.safe_dump(content))
    method = DSFL(public="shared", batch_size=8)
    coordinator, _ = begin(small_job(mixers=method.components(), method=method), files, tmp_path / "run")
    assert coordinator.joined == sorted(files)


@pytest.mark.parametrize("word", ["'true'", "1", "maybe"])
def test_public_is_true_or_false(tmp_path: Path, word: str) -> None:
    file = write_table_sites(tmp_path, ["anna"])["anna"]
    file.write_text(file.read_text().replace("kind: table", f"kind: table\n    public: {word}"))
    with pytest.raises(SiteFileError, match=r"'datasets\.blood\.public': input should be a valid boolean"):
        load_site_file(file)
