# SPDX-License-Identifier: Apache-2.0
"""Mixing against a float64 reference, in every form it takes."""

import numpy as np
import pytest
import torch

from medpfl.core import mixing
from medpfl.core.mixing import check_matrix, mix, restrict


def models(count: int, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "weight": torch.randn(7, 5, generator=generator).to(dtype),
            "scale": torch.randn((), generator=generator).to(dtype),
            "empty": torch.empty(0, dtype=dtype),
            "steps": torch.tensor(10 + k),
            "mask": torch.tensor([True, k > 1]),
        }
        for k in range(count)
    ]


def row_stochastic(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(count), count)


def reference(matrix: np.ndarray, states: list[dict[str, torch.Tensor]], key: str) -> torch.Tensor:
    return torch.tensordot(torch.tensor(matrix), torch.stack([s[key].double() for s in states]), dims=1)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", ["general", "mean", "weighted", "pull", "identity", "permutation"])
@pytest.mark.slow
def test_equals_the_matrix_product(kind: str, count: int, in_place: bool) -> None:
    matrix = {
        "general": row_stochastic(count),
        "mean": np.full((count, count), 1 / count),
        "weighted": np.tile(row_stochastic(count)[:1], (count, 1)),
        "pull": 0.6 * np.eye(count) + 0.4 / count,
        "identity": np.eye(count),
        "permutation": np.eye(count)[::-1].copy(),
    }[kind]
    states = models(count)
    expected = {key: reference(matrix, states, key) for key in ("weight", "scale")}
    given = [dict(state) for state in states]
    results = mix(matrix, states, in_place=in_place)
    for k, result in enumerate(results):
        for key, wanted in expected.items():
            torch.testing.assert_close(result[key].double(), wanted[k], atol=1e-6, rtol=0)
            assert result[key].shape == given[k][key].shape
            assert (result[key] is given[k][key]) == in_place
        assert int(result["steps"]) == 10 + k  # integers and flags are every hospital's own
        assert result["mask"].tolist() == [True, k > 1]


@pytest.mark.parametrize("integers", [True, False])
def test_one_model_for_all_is_kept_once(integers: bool) -> None:
    """The bits of K copies; what is not mixed stays every hospital's own."""
    matrix = np.tile(row_stochastic(3)[:1], (3, 1))
    states, others = ([{k: t for k, t in one.items() if integers or t.is_floating_point()} for one in models(3)]
                      for _ in range(2))  # fmt: skip
    shared = mix(matrix, states, in_place=True, may_share=True)
    for k, (one, apart) in enumerate(zip(shared, mix(matrix, others, in_place=True), strict=True)):
        for key, tensor in apart.items():
            assert torch.equal(one[key], tensor)
            assert one[key] is states[0 if tensor.is_floating_point() else k][key]
    pull = 0.6 * np.eye(3) + 0.4 / 3
    assert all(new is old for one, state in zip(mix(pull, states, in_place=True, may_share=True), states, strict=True)
               for new, old in zip(one.values(), state.values(), strict=True))  # fmt: skip


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    for matrix in (row_stochastic(4), np.full((4, 4), 0.25)):
        whole = mix(matrix, models(4))
        monkeypatch.setattr(mixing, "_BLOCK_VALUES", 4 * 3)  # 3 columns a block, 35 values: the last block is short
        for one, other in zip(whole, mix(matrix, models(4)), strict=True):
            torch.testing.assert_close(one["weight"], other["weight"], atol=1e-6, rtol=0)
        monkeypatch.undo()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_keep_their_type(dtype: torch.dtype) -> None:
    matrix = row_stochastic(5)
    states = models(5, dtype)
    result = mix(matrix, states)
    tolerance = 1e-14 if dtype == torch.float64 else torch.finfo(dtype).eps * 4
    for k in range(5):
        assert result[k]["weight"].dtype == dtype
        wanted = reference(matrix, states, "weight")[k]
        torch.testing.assert_close(result[k]["weight"].double(), wanted, atol=tolerance, rtol=0)


def test_not_in_place_leaves_the_inputs_alone() -> None:
    states = models(3)
    before = [{key: value.clone() for key, value in state.items()} for state in states]
    results = mix(row_stochastic(3), states)
    for state, old, new in zip(states, before, results, strict=True):
        for key in state:
            assert torch.equal(state[key], old[key])
            assert new[key] is not state[key]


def test_identity_is_exact() -> None:
    states = models(4)
    for state, result in zip(states, mix(np.eye(4), states), strict=True):
        assert torch.equal(state["weight"], result["weight"])


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (np.array([[0.5, 0.4], [0.5, 0.5]]), "row 0 .* sums to 0.9"),
        (np.ones((2, 3)) / 3, r"K x K; got shape \(2, 3\)"),
        (np.array([[np.nan, 1], [0.5, 0.5]]), "not finite"),
    ],
)
def test_refuses_what_is_no_mixing_matrix(matrix: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_matrix(matrix)


def test_refuses_models_that_differ() -> None:
    states = models(2)
    states[1]["weight"] = states[1]["weight"][:3]
    with pytest.raises(ValueError, match="'weight' does not have one shape"):
        mix(np.eye(2), states)
    with pytest.raises(ValueError, match="3 x 3 matrix cannot mix 2 models"):
        mix(np.eye(3), models(2))


def test_absent_hospitals_keep_their_model() -> None:
    matrix = np.array([[0.6, 0.2, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    result = restrict(matrix, [True, False, True])
    np.testing.assert_allclose(result, [[0.75, 0, 0.25], [0, 1, 0], [3 / 7, 0, 4 / 7]])
    check_matrix(result)


def test_absent_hospitals_get_the_common_model() -> None:
    result = restrict(np.tile([0.5, 0.3, 0.2], (3, 1)), [False, True, True])
    np.testing.assert_allclose(result, np.tile([0, 0.6, 0.4], (3, 1)))


def test_a_row_without_weight_keeps_its_own() -> None:
    matrix = np.array([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.2, 0.4, 0.4]])
    np.testing.assert_allclose(restrict(matrix, [True, False, True])[0], [1, 0, 0])


def test_all_present_changes_nothing() -> None:
    matrix = row_stochastic(4)
    assert restrict(matrix, [True] * 4) is matrix
