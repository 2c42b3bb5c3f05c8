# SPDX-License-Identifier: Apache-2.0
"""Hospitals that a job's arguments name, one of which is not there: a name with a slip changes nothing, and says so."""

from pathlib import Path

import pytest

from medpfl.methods.cusfl import CusFL
from medpfl.methods.fedsm.personalised import FedSMPersonalised
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.models.by_hospital import ByHospital
from medpfl.models.unet import FCN, UNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks.segmentation import Segmentation
from small_cusfl import on_tables
from tools import Make


@pytest.mark.slow
def test_a_name_that_no_hospital_has_is_told(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """anna's own ratio was left out, without a word."""
    job = on_tables(make_job, rounds=1, ratios={"ana": 0.0, "berta": 0.0, "oslo": 0.1})
    events = [event.event for event in simulate(job, table_sites, tmp_path / "a", tmp_path / "home").record.events]
    assert events == [
        "CusFL names the hospital 'ana', which is not in this run; did you mean 'anna'?",
        "CusFL names the hospital 'oslo', which is not in this run",
    ]


def test_what_names_hospitals() -> None:
    networks = ByHospital(berlin=UNet(), bonn=FCN(), default=UNet())
    assert set(Segmentation("scans", architecture=networks).named_hospitals) == {"berlin", "bonn"}
    assert set(Segmentation("scans").named_hospitals) == set()
    assert set(MHpFLID(bodies={"berlin": "body", "default": "all"}).named_hospitals) == {"berlin"}
    assert set(CusFL().named_hospitals) == set()
    assert set(FedSMPersonalised(personaliser=CusFL(ratios={"bonn": 0.1})).named_hospitals) == {"bonn"}
