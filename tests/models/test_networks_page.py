# SPDX-License-Identifier: Apache-2.0
"""The table of docs/networks.md has every architecture that a job may name, with its options and their defaults."""

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from test_architectures import ALL, IDS

import medpfl.models
from medpfl.core.errors import ConfigError
from medpfl.core.groups import head_of
from medpfl.models.contract import Architecture
from medpfl.models.monai_net import _OPTIONS, Name
from medpfl.models.unet import UNet

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")
NOT_OF_TASKS = {
    "by_hospital.OwnChoice",
    "selector.Signature",
    "selector.SmallCnn",
    "selector.Vgg11",
}  # FedSM's model selector


def architectures() -> dict[str, type[Architecture]]:
    found = {}
    for info in pkgutil.iter_modules(medpfl.models.__path__, "medpfl.models."):
        for name, kind in vars(importlib.import_module(info.name)).items():
            if isinstance(kind, type) and issubclass(kind, Architecture) and kind.__module__ == info.name:
                found[f"{info.name.removeprefix('medpfl.models.')}.{name}"] = kind
    return {
        name: kind
        for name, kind in found.items()
        if dataclasses.is_dataclass(kind) and not inspect.isabstract(kind) and name not in NOT_OF_TASKS
    }


def options(kind: type[Architecture]) -> str:
    cells = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = field.default_factory() if callable(field.default_factory) else field.default
        cells.append(f"`{field.name}`" + ("" if value is dataclasses.MISSING else f" {json.dumps(value)}"))
    return ", ".join(cells) or "none"


def test_the_table_is_what_the_code_has() -> None:
    rows = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", PAGE, flags=re.MULTILINE))
    assert rows == {name: options(kind) for name, kind in architectures().items()}


def test_the_names_and_options_of_monais_classifiers() -> None:
    told = PAGE[PAGE.index("`MonaiNet` knows") :].split("\n\n")[0].replace("\n", " ")
    for option in {option for known in _OPTIONS.values() for option in known}:
        assert f"`{option}`" in told
    named = {
        *(f"DenseNet{number}" for number in (121, 169, 201, 264)),
        *(f"ResNet{number}" for number in (10, 18, 34, 50, 101, 152)),
        *(f"SEResNet{number}" for number in (50, 101, 152)),
        *(f"SEResNext{number}" for number in (50, 101)),
        *(f"EfficientNetB{number}" for number in range(5)),
    }
    assert named == set(get_args(Name))
    assert "DenseNet121, 169, 201, 264; ResNet10, 18, 34, 50, 101, 152; SEResNet50, 101, 152; SEResNext50, 101;" in told


ROW = re.compile(r"^\| `([\w.]+)` \| [^|]+ \| (classes|series)[^|]* \| ([^|]+) \|", flags=re.MULTILINE)
AT_DEFAULTS = {
    "at least 2 ^ levels": 16,
    "at least 2 ^ (blocks - 1)": 4,
    "`patch_size`, and the training's size alone": 16,
    "at least 2 `patch`es": 16,
    "at least 2 `stride`s": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "answers", "lengths"), ROW.findall(PAGE))
def test_inputs_as_small_as_the_table_says_are_taken_and_smaller_ones_refused(
    name: str, answers: str, lengths: str
) -> None:
    kind = architectures()[name]
    built = kind("ResNet10") if name == "monai_net.MonaiNet" else kind()  # type: ignore[call-arg]
    number = re.match(r"at least (\d+)$", lengths)
    least = AT_DEFAULTS.get(lengths) or int(number[1] if number else 1)
    axes = 1 if answers == "series" else 2
    assert built.build((3, *(least,) * axes), 2)(torch.zeros(2, 3, *(least,) * axes)).shape == (2, 2)
    if least > 1:
        with pytest.raises(ConfigError):
            built.build((3, *(least - 1,) * axes), 2)


def test_all_networks_for_classes_and_series_have_such_a_row() -> None:
    assert len(ROW.findall(PAGE)) == 16


@pytest.mark.parametrize("architecture", [case[0] for case in ALL], ids=IDS)
@pytest.mark.slow
def test_all_goes_through_the_head_but_where_the_page_names_another(architecture: Architecture) -> None:
    """What a method keeps at home or shares as the head decides all that a network says: with a head of zeros it says
    nothing."""
    shape = next(shape for other, shape, _ in ALL if other is architecture)
    torch.manual_seed(1)
    network, inputs = architecture.build(shape, 5).eval(), torch.randn(2, *shape)
    named = {"FCN": "scores"}.get(type(architecture).__name__, "")
    if isinstance(architecture, UNet) and architecture.residual_units:
        named = "model.2"
    assert not named or (f'"head": "{named}"' in PAGE and f'"personal": ["{named}"]' in PAGE)
    _zero(network, head_of(network))
    assert network(inputs).any() == bool(named)
    if named:
        _zero(network, named)
        assert not network(inputs).any()


def _zero(network: torch.nn.Module, path: str) -> None:
    for weight in network.get_submodule(path).parameters():
        torch.nn.init.zeros_(weight)
