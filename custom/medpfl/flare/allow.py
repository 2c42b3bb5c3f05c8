# SPDX-License-Identifier: Apache-2.0
"""What a site that runs installed code only allows: every component class by its full name, never a prefix, and no
code inside jobs.

FLARE builds a component by ``getattr(module, name)(**args)``: a prefix such as "medpfl." would let a job call anything
that a module of this package has imported.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import medpfl
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mixer
from medpfl.flare.kits import keep_storage, local_json, write_json
from medpfl.job import CONTROLLER, EVALUATION_CONTROLLER, EXECUTOR
from medpfl.methods.base import Method
from medpfl.models.base import Architecture
from medpfl.tasks.base import Task

CODE_RIGHT = "byoc"  # FLARE: "bring your own code"
_OTHER_RIGHTS = (
    "submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "shell_commands",
    "server-predeployed-flwr",
)  # fmt: skip


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


def allow(kit: Path, extra: Sequence[str] = ()) -> Path:
    """Add this package's classes to a startup kit's allow list; safe to repeat. A server's kit is also told to keep its
    jobs in its own folder instead of FLARE's default in /tmp.

    Args:
        kit: a server's or client's startup kit (the folder that holds ``startup`` and ``local``).
        extra: full class names from other installed packages that the site has reviewed.

    Returns:
        The file written: ``local/resources.json``.

    Raises:
        MedPFLError: not a startup kit, or a name is a prefix or does not name a class.
    """
    _, resources = local_json(kit, "resources.json")
    for name in extra:
        if problem := why_no_class(name):
            raise MedPFLError(f"'{name}' cannot be allowed: {problem}")
    old = resources.get("class_allow_list", [])
    kept = [name for name in old if not name.startswith(f"{medpfl.__name__}.")]
    resources["class_allow_list"] = sorted({*kept, *component_classes(), *extra})
    resources["class_list_enforcement_mode"] = "enforce"
    keep_storage(kit, resources)
    target = kit / "local" / "resources.json"
    write_json(target, resources)
    return target


def why_no_class(name: str) -> str | None:
    """Why a name may not stand on an allow list: it is a prefix or is not the full name of a class; None if it may."""
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        return f"there is no such class ({error})"
    return None if isinstance(found, type) else "it is not a class"


def senders_of_code(kit: Path) -> list[str]:
    """The roles whose jobs may bring code to this site (FLARE's right "byoc").

    Raises:
        MedPFLError: the kit has no ``local/authorization.json`` or ``.default``, or it cannot be read.
    """
    _, policy = local_json(kit, "authorization.json")
    rights = policy.get("permissions", {}).items()
    return sorted(role for role, granted in rights if _grants(granted, CODE_RIGHT))


def forbid_code(kit: Path) -> Path:
    """Refuse every job that brings code, whoever submits it; other rights stay as they are. Safe to repeat.

    Returns:
        The file written: ``local/authorization.json``.

    Raises:
        MedPFLError: not a server's or hospital's startup kit.
    """
    _, policy = local_json(kit, "authorization.json")
    permissions = policy.get("permissions", {})
    for role, granted in permissions.items():
        if _grants(granted, CODE_RIGHT):  # a role may be granted everything by one word: it is spelled out first
            others = granted if isinstance(granted, dict) else dict.fromkeys(_OTHER_RIGHTS, granted)
            permissions[role] = {**others, CODE_RIGHT: "none"}
    target = kit / "local" / "authorization.json"
    write_json(target, policy)
    return target


def _grants(granted: Any, right: str) -> bool:
    word = granted.get(right, "none") if isinstance(granted, dict) else granted
    return word not in ("none", "no")
