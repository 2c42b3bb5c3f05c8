# SPDX-License-Identifier: Apache-2.0
"""What a site allows: every component class by its full name, never a prefix; no files read from outside; and, if it
likes, no code inside jobs.

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
from medpfl.core.codecs import Codec
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mixer
from medpfl.flare.kits import keep_storage, local_json, write_json
from medpfl.job.names import CONTROLLER, DECODE, ENCODE, EVALUATION_CONTROLLER, EXECUTOR
from medpfl.methods.base import Method
from medpfl.models.base import Architecture
from medpfl.tasks.base import Task

CODE_RIGHT = "byoc"  # FLARE: "bring your own code"
READ_RIGHT = "shell_commands"  # FLARE's console: cat, head, grep ... of .csv, .json, .txt and .log files in the kit
LOG_STREAMING = "allow_log_streaming"  # FLARE sends a hospital's error log, paths and all, to the server by default
_RIGHTS = (
    "submit_job", "clone_job", "manage_job", "download_job", "view", "operate", READ_RIGHT, CODE_RIGHT,
    "server-predeployed-flwr",
)  # fmt: skip


def component_classes() -> list[str]:
    """Full names of the classes a job may name: those defined in this package's component folders."""
    names = {CONTROLLER, EVALUATION_CONTROLLER, EXECUTOR, ENCODE, DECODE}
    for package, base in (
        ("core.codecs", Codec), ("core.mixers", Mixer), ("methods", Method), ("models", Architecture), ("tasks", Task),
    ):  # fmt: skip
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
                    name = kind.__name__
                    names.add(f"{module.__name__}.{name}")
                    if vars(folder).get(name) is kind:  # the package offers it by a shorter name
                        names.add(f"medpfl.{package}.{name}")
    return sorted(names)


def allow(kit: Path, extra: Sequence[str] = ()) -> Path:
    """Add this package's classes to a startup kit's allow list; safe to repeat.

    A hospital's kit is also closed where FLARE's default lets patient data or paths out: the upload of its error log to
    the server, and the console's commands that show files (a model's test cases lie in the kit's folder). A server's
    kit is told to keep its jobs in its own folder instead of FLARE's default in /tmp.

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
    if (kit / "startup" / "fed_client.json").is_file():
        resources[LOG_STREAMING] = False
        _deny(kit, READ_RIGHT)
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


def roles_with(kit: Path, right: str) -> list[str]:
    """The roles that have a right of FLARE's at this site, perhaps under a condition.

    Raises:
        MedPFLError: the kit has no ``local/authorization.json`` or ``.default``, or it cannot be read.
    """
    _, policy = local_json(kit, "authorization.json")
    return sorted(role for role, granted in policy.get("permissions", {}).items() if _grants(granted, right))


def forbid_code(kit: Path) -> Path:
    """Refuse every job that brings code, whoever submits it; other rights stay as they are. Safe to repeat.

    Returns:
        The file written: ``local/authorization.json``.

    Raises:
        MedPFLError: not a server's or hospital's startup kit.
    """
    return _deny(kit, CODE_RIGHT)


def _deny(kit: Path, right: str) -> Path:
    _, policy = local_json(kit, "authorization.json")
    permissions = policy.get("permissions", {})
    for role, granted in permissions.items():
        if _grants(granted, right):  # a role may be granted everything by one word: it is spelled out first
            others = granted if isinstance(granted, dict) else dict.fromkeys(_RIGHTS, granted)
            permissions[role] = {**others, right: "none"}
    target = kit / "local" / "authorization.json"
    write_json(target, policy)
    return target


def _grants(granted: Any, right: str) -> bool:
    word = granted.get(right, "none") if isinstance(granted, dict) else granted
    return word not in ("none", "no")
