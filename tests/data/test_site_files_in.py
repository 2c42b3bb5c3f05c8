# SPDX-License-Identifier: Apache-2.0
"""A folder of site files: no hospital in it is left out without a word."""

from pathlib import Path

import pytest

from medpfl.bundle import job_sites
from medpfl.core.errors import SiteFileError
from medpfl.data.site_file import site_files_in


def test_they_are_named_by_their_hospitals_in_order(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.yaml", "b.csv"):
        (tmp_path / name).write_text("")
    assert list(site_files_in(tmp_path).items()) == [("a", tmp_path / "a.yaml"), ("b", tmp_path / "b.yaml")]
    assert site_files_in(tmp_path / "nothing") == {}


@pytest.mark.parametrize("ending", ["yml", "YAML", "YML"])
def test_a_site_file_with_another_ending_is_not_passed_over(tmp_path: Path, ending: str) -> None:
    for name in ("a.yaml", "b.yaml", f"c.{ending}"):
        (tmp_path / name).write_text("")
    with pytest.raises(SiteFileError) as refused:
        site_files_in(tmp_path)
    assert f"c.{ending}: site files are called <hospital>.yaml; rename it to c.yaml" in str(refused.value)


def test_a_job_refuses_such_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("")
    (tmp_path / "b.yml").write_text("")
    with pytest.raises(SiteFileError, match=r"b\.yml"):
        job_sites(tmp_path, "softpull_heart", tmp_path / "scratch")
