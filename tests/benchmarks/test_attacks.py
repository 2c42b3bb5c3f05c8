# SPDX-License-Identifier: Apache-2.0
"""The attacks succeed where nothing is protected, and not where there is nothing to be found or noise hides it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import attacked_skin, attacks, inversion, membership
from benchmarks.inversion import Arm
from medpfl.core.errors import MedPFLError
from medpfl.privacy import DPSGD


def quiet(text: str) -> None:
    """No progress."""


def test_lira_tells_members_apart_where_difficulty_hides_them_from_the_loss() -> None:
    """Candidates differ much more than membership moves them; without an effect of membership both attacks guess."""
    rng = np.random.default_rng(0)
    member = np.stack([rng.permutation(16) < 8 for _ in range(300)], axis=1)
    difficulty = rng.normal(0, 10, 300)
    noise = rng.normal(0, 1, member.shape)
    found = membership.attacked(difficulty + 3 * member + noise, member)
    assert np.mean(found["lira"]) > 0.95 and found["lira_found"] > 0.5
    assert 0.5 < np.mean(found["loss"]) < 0.7 and found["loss_found"] < 0.1
    nothing = membership.attacked(difficulty + noise, member)
    assert abs(np.mean(nothing["lira"]) - 0.5) < 0.05 and abs(np.mean(nothing["loss"]) - 0.5) < 0.05


def test_a_run_s_score_does_not_use_its_own_membership() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(1)
    member = np.stack([rng.permutation(8) < 4 for _ in range(50)], axis=1)
    values = rng.normal(size=member.shape) + member
    scores = membership.likelihood_ratios(values, member)
    other = member.copy()
    other[3] = ~other[3]
    assert np.array_equal(membership.likelihood_ratios(values, other)[3], scores[3])
    assert roc_auc_score(member.ravel(), scores.ravel()) > 0.6


def test_likeness_is_that_of_the_best_match_whatever_its_scale() -> None:
    images = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(inversion.alike(images, 5 * images.flatten(1)[[2, 0, 1]] - 7), torch.ones(3).double())
    assert float(inversion.alike(images[:1], -images[:1].flatten(1))[0]) == pytest.approx(-1)


@pytest.mark.slow
def test_one_image_is_read_off_a_hospital_s_update_and_noise_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of messages of the real round loop. The policy that a site file has by default refuses to train on one image."""
    monkeypatch.setattr(inversion, "NETWORKS", {"logistic regression": inversion.NETWORKS["logistic regression"]})
    (left,) = [arm for arm in inversion.ARMS if "leaves one" in arm.name]
    noised = Arm("noise", 1, {"privacy": DPSGD(noise_multiplier=1.0)})
    plain, four, eight, one, noise = inversion.measure(
        1, quiet, [Arm("plain", 1), Arm("plain", 4), Arm("plain", 8), left, noised]
    )["rows"]
    assert plain["own"][0] > 0.9999 and plain["found"] == [1.0] and abs(plain["others"][0]) < 0.5
    assert plain["refused"] == four["refused"] == one["refused"] == "least_update" and eight["refused"] is None
    assert one["images"] == 8 and one["found"] == [0.125]  # the first of the eight, exactly
    assert eight["found"] == [0.0]
    assert noise["own"][0] < 0.5 and noise["found"] == [0.0]


@pytest.mark.slow
def test_members_are_found_in_what_a_hospital_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server got is attacked as it came: it is not what mixing made of it, which the hospital keeps."""
    monkeypatch.setattr(membership, "METHODS", {"FedAvg": membership.METHODS["FedAvg"]})
    found = membership.measure(4, quiet, {"none": None})["found"]
    sent, kept = found["FedAvg; none; sent"], found["FedAvg; none; kept"]
    assert np.mean(sent["loss"]) > 0.8 and np.mean(sent["lira"]) > 0.8
    assert np.mean(sent["loss"]) > np.mean(kept["loss"]) > 0.6


def test_skin_lesions_in_place_of_generated_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in HAM10000's layout: another lesion in every place, of each diagnosis as many as are asked for."""
    monkeypatch.setattr(attacked_skin, "SPLITS", {"train": 2, "val": 1, "test": 2})
    rng = np.random.default_rng(0)
    lines = ["image_id,lesion_id,dx,dataset"]
    for source in ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias"):
        for diagnosis in attacked_skin.DIAGNOSES:
            for number in range(2 * 5 if source in attacked_skin.SOURCES else 1):
                name = f"{source}_{diagnosis}_{number}"
                lines.append(f"{name},{source} {diagnosis} {number // 2},{diagnosis},{source}")
                if source in attacked_skin.SOURCES:
                    Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(tmp_path / f"{name}.jpg")
    (tmp_path / "HAM10000_metadata.csv").write_text("\n".join(lines))
    for one in attacked_skin.skin_pools(tmp_path):
        assert {key: len(value) for key, value in one.items() if key.endswith("images")} == {
            "train_images": 8, "val_images": 4, "test_images": 8,
        }  # fmt: skip
        images = np.concatenate([one[f"{split}_images"] for split in attacked_skin.SPLITS]).reshape(20, -1)
        assert len(np.unique(images, axis=0)) == 20
        assert np.bincount(one["train_labels"][:, 0]).tolist() == [2] * 4
    (tmp_path / "HAM10000_metadata.csv").write_text("\n".join(lines[:30]))
    with pytest.raises(MedPFLError, match="has no row of the source"):
        attacked_skin.skin_pools(tmp_path)


@pytest.mark.parametrize(
    ("part", "runs", "updates", "words"),
    [
        ("both", 4, 1, "got 'both'"),
        ("all", 5, 1, "even and at least 4"),
        ("all", 2, 1, "even"),
        ("all", 4, 0, "1, got"),
    ],
)
def test_arguments_that_make_no_sense(part: str, runs: int, updates: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(MedPFLError, match=words):
        attacks.measure(part, runs, updates, tmp_path / "a.json")
