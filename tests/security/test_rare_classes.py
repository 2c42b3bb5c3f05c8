# SPDX-License-Identifier: Apache-2.0
"""What tells of the few patients who have a rare class, or a rare category: its share, which the number of samples
turns into a number of patients."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from nvflare.apis.dxo import from_shareable
from nvflare.apis.shareable import Shareable

from hostile import attacked
from medpfl.core.errors import PolicyRefused
from medpfl.core.mixers import Mean, NetworkProx
from medpfl.data.policy import Policy
from medpfl.methods.pfednet import PFedNet
from medpfl.rounds.hospital import withholding
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import StatisticsReply
from small_jobs import small_job

ROWS = 60
KINDS = ("new", "old")


def hospitals(folder: Path, anna: dict[str, int], kinds: tuple[str, ...] = KINDS, **policy: int) -> dict[str, Path]:
    """Three of them; at anna's so many of the ``ROWS`` training rows are "sick", or have the category "old" or "odd";
    the others are "new"."""
    folder.mkdir()
    files = {}
    for number, site in enumerate(("anna", "berta", "carla")):
        few = anna if site == "anna" else {"sick": 20, "old": 20}
        rows = np.random.default_rng(number).normal(size=ROWS + 8)
        lines = ["a,kind,sick,part"]
        for row, value in enumerate(rows):
            odd = few.get("odd", 0)
            kind = "old" if row < few["old"] else "odd" if row < few["old"] + odd else "new"
            sick = int(row >= ROWS - few["sick"])
            part = "train" if row < ROWS else ("validation", "test")[row % 2]
            lines.append(f"{value:.6f},{kind},{sick},{part}")
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n")
        dataset = {
            "kind": "table",
            "files": [f"{site}.csv"],
            "features": {"a": "number", "kind": list(kinds)},
            "label": {"column": "sick", "classes": {"no": [0], "yes": [1]}},
            "split": {"column": "part"},
        }
        files[site] = folder / f"{site}.yaml"
        files[site].write_text(yaml.safe_dump({"site": site, "datasets": {"blood": dataset}, "policy": policy}))
    return files


def told(sites: dict[str, Path], folder: Path, sketch: Literal["labels", "moments", "covariance"]) -> dict[str, Any]:
    """What anna's hospital tells the server of its data."""
    prox = NetworkProx(tau=0.1, neighbours=1, sketch=sketch)
    job = small_job(rounds=1, method=PFedNet(lr=0.05, steps=1), mixers={"shared": Mean(), "personal": prox})
    found: dict[str, Any] = {}

    def heard(site: str, asked: Message[Any], honest: Shareable) -> Shareable:
        if site == "anna" and asked.header.task == "statistics":
            found.update(from_shareable(honest).data)
        return honest

    attacked(job, sites, folder, heard)
    return {name.rpartition("::")[2]: values for name, values in found.items()}


@pytest.mark.parametrize(
    ("few", "policy", "shares"),
    [
        (4, {}, [1.0, 0.0]),
        pytest.param(56, {}, [0.0, 1.0], marks=pytest.mark.slow),
        (5, {}, [55 / 60, 5 / 60]),
        pytest.param(4, {"least_count": 4}, [56 / 60, 4 / 60], marks=pytest.mark.slow),
        pytest.param(9, {"least_count": 10}, [1.0, 0.0], marks=pytest.mark.slow),
    ],
)
def test_the_share_of_a_class_that_few_have(
    few: int, policy: dict[str, int], shares: list[float], tmp_path: Path
) -> None:
    sites = hospitals(tmp_path / "sites", {"sick": few, "old": 20}, **policy)
    np.testing.assert_allclose(told(sites, tmp_path, "labels")["histogram"], shares)


@pytest.mark.parametrize(("few", "share"), [(4, 0.0), (5, 5 / 60), (57, 1.0)])
@pytest.mark.slow
def test_the_mean_of_a_category_that_few_have(few: int, share: float, tmp_path: Path) -> None:
    sites = hospitals(tmp_path / "sites", {"sick": 20, "old": few})
    found = told(sites, tmp_path, "covariance")
    np.testing.assert_allclose(found["mean"][1], share, atol=1e-6)
    np.testing.assert_allclose(found["covariance"][1, 1], share * (1 - share), atol=1e-6)
    assert (abs(found["covariance"][0, 1]) < 1e-9) == (few != 5) and abs(found["mean"][0]) > 1e-3


@pytest.mark.parametrize("kinds", [("odd", "new", "old"), ("new", "odd", "old"), ("old", "new", "odd")])
@pytest.mark.parametrize(("odd", "told_as"), [(4, 0.0), (5, 5 / 60)])
def test_the_share_of_a_category_that_few_have_is_not_what_the_others_leave(
    kinds: tuple[str, ...], odd: int, told_as: float, tmp_path: Path
) -> None:
    """Each category but the first has a column. What their means leave of 1 is the share of the first."""
    sites = hospitals(tmp_path / "sites", {"sick": 20, "old": 20, "odd": odd}, kinds)
    found = told(sites, tmp_path, "covariance")
    means = found["mean"][1:]
    shares = dict(zip(kinds, [1 - means.sum(), *means], strict=True))
    expected = {"old": 20 / 60, "odd": told_as, "new": 40 / 60 - told_as}
    np.testing.assert_allclose([shares[kind] for kind in kinds], [expected[kind] for kind in kinds], atol=1e-6)
    between = -np.prod([expected[kind] for kind in kinds[1:]])
    np.testing.assert_allclose(found["covariance"][1, 2], between, atol=1e-6)


def test_a_covariance_tells_of_a_single_patient_who_has_two_things(tmp_path: Path) -> None:
    """What the pages say is not protected: each of the two categories has twenty patients, one of whom has both."""
    sites = hospitals(tmp_path / "sites", {"sick": 20, "old": 20})
    for file in sites.values():
        declared = yaml.safe_load(file.read_text())
        declared["datasets"]["blood"]["features"]["sex"] = ["m", "f"]
        file.write_text(yaml.safe_dump(declared))
        first, *rows = file.with_suffix(".csv").read_text().splitlines()
        sexes = ["f" if 19 <= row < 39 else "m" for row in range(len(rows))]  # the first twenty rows are "old"
        lines = [f"{first},sex", *(f"{row},{sex}" for row, sex in zip(rows, sexes, strict=True))]
        file.with_suffix(".csv").write_text("\n".join(lines) + "\n")
    found = told(sites, tmp_path, "covariance")
    old, female = found["mean"][1:]
    np.testing.assert_allclose([old, female], 20 / ROWS, atol=1e-6)
    assert ROWS * (found["covariance"][1, 2] + old * female) == pytest.approx(1, abs=1e-4)
    kept = Policy(kept_here=("statistics tensors of 'covariance'",))
    withholding.check_known(kept)
    with pytest.raises(PolicyRefused, match="keeps 'statistics tensors of 'covariance'' here"):
        withholding.without(kept, Message(StatisticsReply(), {"covariance": {}}), ["covariance"])
