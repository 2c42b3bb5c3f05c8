# SPDX-License-Identifier: Apache-2.0
"""What somebody may have meant by a name that is not known."""

import pytest

from medpfl.core.errors import meant


@pytest.mark.parametrize(
    ("name", "known", "words"),
    [
        ("age", ["pid", "Age", "stage"], "; did you mean 'Age'?"),
        ("SEX", ["sex", "SEXT"], "; did you mean 'sex'?"),
        ("acuracy", ["auc", "accuracy"], "; did you mean 'accuracy'?"),
        ("age", ["pressure"], ""),
    ],
)
def test_the_nearest_name_is_the_one_that_differs_least(name: object, known: list[str], words: str) -> None:
    """One that differs in small and capital letters alone is meant before all others."""
    assert meant(name, known) == words
