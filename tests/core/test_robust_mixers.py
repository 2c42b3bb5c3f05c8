# SPDX-License-Identifier: Apache-2.0
"""Invariants of the coordinate-wise median and trimmed mean (Yin et al., ICML 2018)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import CoordinateMedian, Mean, Mixer, RoundInfo, TrimmedMean
from medpfl.core.mixers.trimmed_mean import _BLOCK_VALUES

MIXERS = [CoordinateMedian(), TrimmedMean(0.2), TrimmedMean(0.4)]


def info(count: int, present: list[bool] | None = None) -> RoundInfo:
    sizes = np.arange(1.0, count + 1) ** 9  # which must not matter
    return RoundInfo(tuple(f"site-{k}" for k in range(count)), sizes, tuple(present or [True] * count))


def run(mixer: Mixer, rows: torch.Tensor, present: list[bool] | None = None) -> torch.Tensor:
    states, matrix = mixer.mix([{"w": row.clone()} for row in rows], info(len(rows), present))
    assert matrix is None
    return torch.stack([state["w"] for state in states])


def models(count: int, width: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_the_median_is_numpys(count: int) -> None:
    rows = models(count)
    np.testing.assert_allclose(run(CoordinateMedian(), rows), np.tile(np.median(rows.numpy(), axis=0), (count, 1)))


@pytest.mark.parametrize(("count", "trim"), [(5, 0.2), (10, 0.3), (7, 0.4), (4, 0.25)])
def test_the_trimmed_mean_is_scipys(count: int, trim: float) -> None:
    from scipy.stats import trim_mean

    rows = models(count)
    expected = trim_mean(rows.numpy(), int(trim * count + 1e-9) / count + 1e-12, axis=0)
    np.testing.assert_allclose(run(TrimmedMean(trim), rows)[0], expected, atol=1e-15)


@given(st.sampled_from(MIXERS), st.integers(5, 9), st.integers(0, 9), st.floats(-1e30, 1e30))
def test_one_hospital_cannot_leave_the_others_range(mixer: Mixer, count: int, seed: int, factor: float) -> None:
    rows = models(count, seed=seed)
    others = rows[1:].clone()
    rows[0] *= factor
    mixed = run(mixer, rows)[0]
    assert (mixed >= others.min(dim=0).values).all() and (mixed <= others.max(dim=0).values).all()


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_everybody_gets_the_same_in_tensors_of_their_own(mixer: Mixer) -> None:
    rows = models(5).float()
    states, _ = mixer.mix([{"w": row.clone()} for row in rows], info(5))
    assert all(torch.equal(state["w"], states[0]["w"]) for state in states)
    assert len({state["w"].data_ptr() for state in states}) == 5 and states[0]["w"].dtype == torch.float32


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_the_order_of_hospitals_does_not_matter(mixer: Mixer) -> None:
    rows = models(6)
    assert torch.equal(run(mixer, rows), run(mixer, rows[torch.tensor([3, 0, 5, 1, 4, 2])]))


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_equal_models_stay_and_shifts_pass_through(mixer: Mixer) -> None:
    rows = models(1).expand(5, -1)
    torch.testing.assert_close(run(mixer, rows), rows, atol=1e-15, rtol=0)
    torch.testing.assert_close(run(mixer, models(5) + 3), run(mixer, models(5)) + 3, atol=1e-14, rtol=0)


def test_absent_hospitals_do_not_count_and_get_the_result() -> None:
    rows = models(5)
    rows[4] = 1e9
    mixed = run(CoordinateMedian(), rows, [True, True, True, False, False])
    np.testing.assert_allclose(mixed, np.tile(np.median(rows[:3].numpy(), axis=0), (5, 1)))
    alone = run(TrimmedMean(0.4), rows, [False, True, False, False, False])
    assert torch.equal(alone, rows[1].expand(5, -1))


@pytest.mark.parametrize(("count", "trim", "absent"), [(4, 0.25, 1), (10, 0.1, 5), (10, 0.3, 7)])
def test_a_trimmed_mean_leaves_out_one_where_three_and_more_answered(count: int, trim: float, absent: int) -> None:
    """Of three that answered floor(0.25 x 3) is none: one of four hospitals was away, or a round asked five of ten, and
    the fourth moved the mean as far as it liked."""
    TrimmedMean(trim).check([str(site) for site in range(count)])
    rows, here = models(count), count - absent
    rows[0] = 1e9
    mixed = run(TrimmedMean(trim), rows, [True] * here + [False] * absent)[0]
    others = rows[1:here]
    assert (mixed >= others.min(dim=0).values).all() and (mixed <= others.max(dim=0).values).all()


def test_large_tensors_go_block_by_block_and_integers_stay() -> None:
    rows = models(3, _BLOCK_VALUES // 3 * 2 + 5)
    states = [{"w": row.clone().view(1, -1), "n": torch.tensor(k)} for k, row in enumerate(rows)]
    mixed, _ = CoordinateMedian().mix(states, info(3))
    assert torch.equal(mixed[1]["w"][0], rows.median(dim=0).values)
    assert [int(state["n"]) for state in mixed] == [0, 1, 2]


def test_refusals() -> None:
    for trim in (0.0, 0.5, -1.0):
        with pytest.raises(ConfigError, match=r"TrimmedMean's trim must be above 0 and below 0\.5"):
            TrimmedMean(trim)
    with pytest.raises(ConfigError, match=r"at least 1 / 4 with 4 hospitals .* got 0\.2"):
        TrimmedMean(0.2).check("abcd")
    with pytest.raises(ConfigError, match="needs at least 3 hospitals, got 2"):
        CoordinateMedian().check("ab")
    TrimmedMean(0.25).check("abcd")
    assert CoordinateMedian().check("abc") is None and Mean() != CoordinateMedian()
