# SPDX-License-Identifier: Apache-2.0
"""FedAP's server: the invariants of its distances (Eq. (6)), weights (Eq. (7), (8)) and mixing (Eq. (2))."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, RoundInfo, StatisticsDistance
from medpfl.core.similarity import distances, inverse_distance_weights

State = dict[str, torch.Tensor]


def statistics(count: int, seed: int = 0) -> list[State]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "1.mean": torch.randn(6, generator=generator, dtype=torch.float64),
            "1.variance": torch.rand(6, generator=generator, dtype=torch.float64),
            "5.mean": torch.randn(16, generator=generator, dtype=torch.float64),
            "5.variance": torch.rand(16, generator=generator, dtype=torch.float64),
        }
        for _ in range(count)
    ]


def about(count: int) -> RoundInfo:
    return RoundInfo(tuple(f"site-{k}" for k in range(count)), np.ones(count), (True,) * count)


def weighted(given_: list[State | None], lam: float = 0.5, **more: object) -> StatisticsDistance:
    mixer = StatisticsDistance(lam=lam, **more)  # type: ignore[arg-type]
    mixer.take_statistics(given_, about(len(given_)))
    return mixer


def weights(given_: list[State | None], lam: float = 0.5) -> np.ndarray:
    return weighted(given_, lam).matrix(about(len(given_)))


def test_distance_by_hand() -> None:
    """Two layers: sqrt(3^2 + (2 - 1)^2 ...) each, added up; the root is inside the sum over the layers."""
    one = {"a.mean": [0.0, 0.0], "a.variance": [1.0, 4.0], "b.mean": [1.0], "b.variance": [9.0]}
    two = {"a.mean": [3.0, 4.0], "a.variance": [4.0, 9.0], "b.mean": [1.0], "b.variance": [25.0]}
    tensors = [{k: torch.tensor(v, dtype=torch.float64) for k, v in entry.items()} for entry in (one, two)]
    expected = np.sqrt(9 + 16 + 1 + 1) + np.sqrt(0 + 4)
    np.testing.assert_allclose(distances(tensors), [[0, expected], [expected, 0]], rtol=1e-15)


def test_distance_is_the_wasserstein_distance_of_eq_4() -> None:
    """With diagonal covariances the general formula, matrix square roots and all, gives the same."""
    found = statistics(2)
    total = 0.0
    for layer in ("1", "5"):
        means = [entry[f"{layer}.mean"].numpy() for entry in found]
        roots = [np.diag(np.sqrt(entry[f"{layer}.variance"].numpy())) for entry in found]
        cross = roots[0] @ roots[1] @ roots[1] @ roots[0]
        values, vectors = np.linalg.eigh(cross)
        root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
        trace = np.trace(roots[0] @ roots[0] + roots[1] @ roots[1] - 2 * root)
        total += np.sqrt(np.square(means[0] - means[1]).sum() + trace)
    assert distances(found)[0, 1] == pytest.approx(total, rel=1e-12)


def test_weights_by_hand() -> None:
    distance = np.array([[0.0, 1.0, 3.0], [1.0, 0.0, 2.0], [3.0, 2.0, 0.0]])
    expected = [[0.4, 0.45, 0.15], [0.4, 0.4, 0.2], [0.24, 0.36, 0.4]]
    np.testing.assert_allclose(inverse_distance_weights(distance, 0.4), expected, rtol=1e-14)


@given(
    count=st.integers(2, 12), lam=st.floats(0, 1), seed=st.integers(0, 10_000), scale=st.floats(1e-300, 1e200),
    twins=st.booleans(),
)  # fmt: skip
@pytest.mark.slow
def test_rows_sum_to_one_and_scale_and_order_do_not_matter(
    count: int, lam: float, seed: int, scale: float, twins: bool
) -> None:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(count, 3))
    if twins:
        points[-1] = points[0]
    distance = np.sqrt(np.square(points[:, None] - points[None]).sum(axis=2))
    found = inverse_distance_weights(distance, lam)
    assert (found >= 0).all() and np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-14)
    np.testing.assert_array_equal(found.diagonal(), lam)
    np.testing.assert_allclose(inverse_distance_weights(scale * distance, lam), found, atol=1e-12)
    order = rng.permutation(count)
    renamed = inverse_distance_weights(distance[np.ix_(order, order)], lam)
    np.testing.assert_allclose(renamed, found[np.ix_(order, order)], atol=1e-14)
    nearest = np.where(np.eye(count, dtype=bool), np.inf, distance)
    for row in range(count):  # the nearer the heavier
        others = np.argsort(nearest[row])[: count - 1]
        assert (np.diff(found[row, others]) <= 1e-15).all()


def test_zero_distances_share_the_weight_as_the_limit_does() -> None:
    distance = np.array([[0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 5.0], [5.0, 5.0, 5.0, 0.0]])
    found = inverse_distance_weights(distance, 0.5)
    np.testing.assert_allclose(found[0], [0.5, 0.25, 0.25, 0])
    np.testing.assert_allclose(found[3], [1 / 6, 1 / 6, 1 / 6, 0.5])
    for tiny in (1e-12, 1e-150, 5e-324):
        near = distance.copy()
        near[:3, :3] = tiny * (1 - np.eye(3))
        np.testing.assert_allclose(inverse_distance_weights(near, 0.5), found, atol=1e-11)


def test_statistics_beyond_all_numbers_leave_their_hospital_far_from_all() -> None:
    """One hospital that told 1e200 made weights that are no numbers, and the job ended with an error."""
    told: list[State | None] = [*statistics(4)]
    told[2] = {key: torch.full_like(values, 1e200) for key, values in statistics(4)[2].items()}
    found = weights(told, lam=0.4)
    np.testing.assert_allclose(found[2], [0.2, 0.2, 0.4, 0.2])
    others = [0, 1, 3]
    np.testing.assert_array_equal(found[np.ix_(others, others)], weights([told[index] for index in others], lam=0.4))
    assert (found[others, 2] == 0).all()


def test_a_lone_hospital_keeps_its_model() -> None:
    np.testing.assert_array_equal(weights([statistics(1)[0]], lam=0.3), [[1.0]])


def test_a_hospital_that_alone_sent_statistics_hears_of_all_others_equally() -> None:
    """There is nothing to compare its own with. It heard of nobody, and its model stayed alone all through the job."""
    found = weights([None, statistics(1)[0], None], lam=0.4)
    np.testing.assert_allclose(found, [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]], rtol=1e-15)


def test_identical_statistics_and_lam_one_over_n_are_fedbn() -> None:
    for count in (2, 4, 7):
        alike: list[State | None] = [statistics(1)[0]] * count
        spread = (1 - 0.6) / (count - 1)
        expected = np.full((count, count), spread) + (0.6 - spread) * np.eye(count)
        np.testing.assert_allclose(weights(alike, lam=0.6), expected, rtol=1e-14)
        uniform = Mean(uniform=True).matrix(about(count))
        np.testing.assert_allclose(weights(alike, lam=1 / count), uniform, rtol=1e-15)
    assert (weights([statistics(1)[0]] * 4, lam=0.25) == Mean(uniform=True).matrix(about(4))).all()


def test_lam_one_is_local_training() -> None:
    np.testing.assert_array_equal(weights([*statistics(5)], lam=1.0), np.eye(5))


def test_until_there_are_statistics_it_is_the_uniform_mean() -> None:
    """f-FedAP's first half, and its only mixing if the statistics never come."""
    mixer = StatisticsDistance(statistics="batch_norm_running", from_round=4)
    assert [mixer.wants(number, 4) for number in (1, 2, 3, 4, 5)] == [None] * 3 + ["batch_norm_running"] * 2
    np.testing.assert_array_equal(mixer.matrix(about(5)), Mean(uniform=True).matrix(about(5)))
    mixer.take_statistics(statistics(5), about(5))
    assert mixer.wants(5, 4) is None
    np.testing.assert_array_equal(mixer.matrix(about(5)), weights([*statistics(5)]))


def test_scaled_features_scale_the_distances() -> None:
    """Inputs c times as large have c times the mean and c^2 times the variance; then d is c times d."""
    found = statistics(4)
    scaled = [{k: v * (3.0 if k.endswith("mean") else 9.0) for k, v in entry.items()} for entry in found]
    np.testing.assert_allclose(distances(scaled), 3 * distances(found), rtol=1e-13)


def test_other_hospitals_do_not_change_a_distance() -> None:
    found = statistics(6)
    np.testing.assert_array_equal(distances(found)[:3, :3], distances(found[:3]))


def test_a_hospital_without_statistics_is_heard_by_nobody() -> None:
    known = statistics(4)
    found = weights([known[0], None, *known[1:]], lam=0.6)
    np.testing.assert_allclose(found[1], [0.1, 0.6, 0.1, 0.1, 0.1])
    rest = np.array([0, 2, 3, 4])
    assert (found[rest, 1] == 0).all()
    np.testing.assert_allclose(found[np.ix_(rest, rest)], weights([*known], lam=0.6), rtol=1e-14)


def test_the_weights_survive_a_checkpoint() -> None:
    mixer = weighted([*statistics(5)])
    again = StatisticsDistance()
    again.load_state({key: tensor.clone() for key, tensor in mixer.state().items()})
    np.testing.assert_array_equal(again.matrix(about(5)), mixer.matrix(about(5)))
    assert again.wants(7, 4) is None
    again.start({})
    assert again.wants(7, 4) == "batch_norm_inputs"


def test_mixing_is_eq_2_and_leaves_the_matrix_alone() -> None:
    mixer = weighted([*statistics(3)])
    matrix = mixer.matrix(about(3))
    generator = torch.Generator().manual_seed(1)
    before = [{"w": torch.randn(7, generator=generator, dtype=torch.float64)} for _ in range(3)]
    after, applied = mixer.mix([{"w": state["w"].clone()} for state in before], about(3))
    np.testing.assert_array_equal(applied, matrix)
    for row in range(3):
        expected = sum(matrix[row, column] * before[column]["w"] for column in range(3))
        torch.testing.assert_close(after[row]["w"], expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"lam": -0.1}, r"lam must be in \[0, 1\], got -0.1"),
        ({"lam": 1.1}, r"lam must be in \[0, 1\], got 1.1"),
        ({"statistics": "batch_norm_running"}, "from_round must be at least 2"),
        ({"from_round": 3}, "from_round must be 1 for 'batch_norm_inputs', got 3"),
    ],
)
def test_arguments_that_make_no_sense(args: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StatisticsDistance(**args)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"1.variance": torch.full((6,), -1.0)}, "statistic '1.variance' holds a negative variance"),
        ({"9.mean": torch.zeros(2)}, "statistic '9.mean': expected '<layer>.mean' and '<layer>.variance'"),
        ({"count": torch.zeros(1)}, "statistic 'count': expected"),
    ],
)
def test_statistics_that_cannot_be(change: State, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StatisticsDistance().check_statistics({**statistics(3)[1], **change})


def test_its_description_does_not_change_with_what_it_learnt() -> None:
    """The description is part of a run's key: a run must be found again after the statistics came."""
    mixer = weighted([*statistics(3)])
    assert repr(mixer) == repr(StatisticsDistance()) and mixer == dataclasses.replace(mixer)
