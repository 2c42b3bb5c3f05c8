# SPDX-License-Identifier: Apache-2.0
"""The allow list of a site that runs installed code only: every component class by its full name, never a prefix.

FLARE builds a component by ``getattr(module, name)(**args)``: a prefix such as "medpfl." would let a job call anything
that a module of this package has imported.
"""

import importlib
import inspect
import json
import os
import pkgutil
from pathlib import Path

import medpfl
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mixer
from medpfl.job import CONTROLLER, EVALUATION_CONTROLLER, EXECUTOR
from medpfl.methods.base import Method
from medpfl.models.base import Architecture
from medpfl.tasks.base import Task


def component_classes() -> list[str]:
    """Full names of the classes a job may name: those defined in this package's component folders."""
    names = {CONTROLLER, EVALUATION_CONTROLLER, EXECUTOR}
    for package, base in (("core.mixers", Mixer), ("methods", Method), ("models", Architecture), ("tasks", Task)):
        folder = importlib.import_module(f"medpfl.{package}")
        for module_info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            module = importlib.import_module(module_info.name)
            for kind in vars(module).values():
                if (
                    isinstance(kind, type)
                    and issubclass(kind, base)
                    and kind.__module__ == module.__name__
                    and not inspect.isabstract(kind)
                ):
                    names.add(f"{module.__name__}.{kind.__name__}")
                    if getattr(folder, kind.__name__, None) is kind:  # the package offers it by a shorter name
                        names.add(f"{folder.__name__}.{kind.__name__}")
    return sorted(names)


def allow(kit: Path, extra: list[str] | None = None) -> Path:
    """Add this package's classes to a startup kit's allow list; safe to repeat.

    Args:
        kit: a server's or client's startup kit (the folder that holds ``startup`` and ``local``).
        extra: full class names from other installed packages that the site has reviewed.

    Returns:
        The file written: ``local/resources.json``.

    Raises:
        MedPFLError: not a startup kit, or a name is a prefix or does not name a class.
    """
    local = kit / "local"
    target, default = local / "resources.json", local / "resources.json.default"
    source = target if target.exists() else default
    try:
        resources = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise MedPFLError(f"{kit} is not a server's or hospital's startup kit: {source}: {error}") from error
    for name in extra or []:
        module, _, attribute = name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise MedPFLError(f"'{name}' cannot be allowed: there is no such class ({error})") from error
        if not isinstance(found, type):
            raise MedPFLError(f"'{name}' cannot be allowed: it is not a class")
    old = resources.get("class_allow_list", [])
    kept = [name for name in old if not name.startswith(f"{medpfl.__name__}.")]
    resources["class_allow_list"] = sorted({*kept, *component_classes(), *(extra or [])})
    resources["class_list_enforcement_mode"] = "enforce"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(json.dumps(resources, indent=2), encoding="utf-8")
    os.replace(temporary, target)
    return target
