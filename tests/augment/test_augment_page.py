# SPDX-License-Identifier: Apache-2.0
"""docs/augmentation.md lists the components, their arguments and limits, and the presets that there are."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

from medpfl.augment import intensity, spatial, values
from medpfl.augment.contract import Augmentation
from medpfl.augment.presets import PRESETS
from medpfl.tasks.classification import Classification
from medpfl.tasks.segmentation import Segmentation

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "augmentation.md").read_text(encoding="utf-8")


def row(kind: Any) -> str:
    arguments = [f"`{field.name}` {json.dumps(field.default)}" for field in dataclasses.fields(kind)]
    limits = [f"`{name}` {least:g} to {most:g}" for name, (least, most) in kind.limits.items()]
    return f"| `{kind.__module__}.{kind.__name__}` | {', '.join(arguments)} | {', '.join(limits)} |"


def test_the_page_has_every_component_with_its_arguments_and_limits() -> None:
    kinds = [
        kind
        for module in (spatial, intensity, values)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Augmentation) and not inspect.isabstract(kind)
    ]
    assert re.findall(r"^\| `medpfl\..*$", PAGE, flags=re.MULTILINE) == [row(kind) for kind in kinds]


def test_the_page_has_every_preset_and_its_examples_are_taken() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE) == list(PRESETS)
    task, listed = (json.loads(f"{{{text}}}") for text in re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL))
    assert Classification(**task["task"]["args"]).augment
    assert len(Segmentation("organ", **listed).augment) == 3
