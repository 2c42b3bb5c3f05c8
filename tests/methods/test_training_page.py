# SPDX-License-Identifier: Apache-2.0
"""The table of docs/training.md has every option of training that a method refuses, and no other."""

import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import medpfl.methods
from medpfl.core.errors import ConfigError
from medpfl.methods.contract import JointModel, Method
from medpfl.methods.optimizers import Sgd

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
OPTIONS: dict[str, dict[str, Any]] = {  # word of the page: what it stands for
    "Adam": {"optimizer": "adam"},
    "momentum": {"optimizer": Sgd(momentum=0.9)},
    "weight decay": {"optimizer": Sgd(weight_decay=0.01)},
    "`clip_gradient`": {"clip_gradient": 1.0},
    "`accumulate`": {"accumulate": 2},
    "a schedule": {"schedule": "cosine"},
    '`optimizer_state: "reset"`': {"optimizer_state": "reset"},
    "`fp16`": {"precision": "fp16"},
    "`bf16`": {"precision": "bf16"},
}


def methods() -> list[Method]:
    made = {}
    for info in pkgutil.walk_packages(medpfl.methods.__path__, "medpfl.methods."):
        for name, kind in vars(importlib.import_module(info.name)).items():
            if isinstance(kind, type) and issubclass(kind, Method) and not issubclass(kind, JointModel):
                needed: dict[str, Any] = (
                    {"public": "shared"} if "public" in {field.name for field in dataclasses.fields(kind)} else {}
                )
                if name not in ("Method", "OnPublicData", "Averaged"):
                    made[name] = kind(**needed)
    assert len(made) > 30
    return list(made.values())


def refuses(method: Method, arguments: dict[str, Any]) -> bool:
    try:
        dataclasses.replace(method, **arguments)
    except ConfigError:
        return True
    return False


def test_the_table_of_what_is_refused_is_what_the_methods_refuse() -> None:
    table = PAGE.split("## What a method refuses")[1].split("All other combinations")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", table, flags=re.MULTILINE)
    told = {
        (name.replace("-", "").lower(), word)
        for names, refused in rows
        for name in names.split(", ")
        for word in OPTIONS
        if word in refused
    }
    found = {
        (type(method).__name__.lower(), word)
        for method in methods()
        for word, arguments in OPTIONS.items()
        if refuses(method, arguments)
    }
    assert told == found
