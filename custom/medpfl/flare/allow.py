# SPDX-License-Identifier: Apache-2.0
"""What a site allows: every component class by its full name, never a prefix; no files read from outside; and, if it
likes, no code inside jobs.

FLARE builds a component by ``getattr(module, name)(**args)``: a prefix such as "medpfl." would let a job call anything
that a module of this package has imported.
"""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

import medpfl
from medpfl.augment.contract import Augmentation
from medpfl.core.codecs import Codec
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mixer
from medpfl.data.intensity import Intensity
from medpfl.flare.kit_files import Authorization, Json, Resources, local_file, write_file
from medpfl.flare.kits import keep_storage
from medpfl.flare.starting import prepare
from medpfl.flare.supervision import supervise
from medpfl.job.names import CONTROLLER, DECODE, ENCODE, EVALUATION_CONTROLLER, EXECUTOR
from medpfl.methods.contract import Method
from medpfl.methods.optimizers import Optimizer
from medpfl.methods.schedules import Schedule
from medpfl.methods.start import Start
from medpfl.models.contract import Architecture
from medpfl.privacy.contract import Privacy
from medpfl.results.callbacks import Callback
from medpfl.tasks.contract import Task
from medpfl.tasks.losses import Loss

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
        ("augment", Augmentation), ("core.codecs", Codec), ("core.mixers", Mixer), ("data", Intensity),
        ("methods", Method), ("methods", Optimizer), ("methods", Schedule), ("methods", Start),
        ("models", Architecture), ("privacy", Privacy), ("results.trackers", Callback), ("tasks", Task),
        ("tasks.losses", Loss),
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


@dataclass(frozen=True)
class Allowed:
    """What ``allow`` wrote.

    Attributes:
        file: ``local/resources.json``.
        classes: full names, all that the list holds.
        dropped: names of other packages that it held before, FLARE's own default ones left out.
    """

    file: Path
    classes: tuple[str, ...]
    dropped: tuple[str, ...]


def allow(kit: Path, extra: Sequence[str] = ()) -> Allowed:
    """Let a startup kit build this package's classes and those named here, and nothing else; safe to repeat.

    FLARE's default list goes, for it holds classes that read whatever file a job names, and what they read leaves with
    FLARE's own results.

    A hospital's kit is also closed where FLARE's default lets patient data or paths out: the upload of its error log to
    the server, and the console's commands that show files (a model's test cases lie in the kit's folder). A server's
    kit is told to keep its jobs in its own folder instead of FLARE's default in /tmp. Both are told what to do when a
    process dies (``flare.supervision``), and not to start where they could not run (``flare.starting``).

    Args:
        kit: a server's or client's startup kit (the folder that holds ``startup`` and ``local``).
        extra: full class names from other installed packages, FLARE included, that the site has reviewed.

    Raises:
        MedPFLError: not a startup kit, or a name may not stand on the list (``why_no_class``).
    """
    resources = local_file(kit, "resources.json", Resources)
    for name in extra:
        if problem := why_no_class(name):
            raise MedPFLError(f"'{name}' cannot be allowed: {problem}")
    classes = sorted({*component_classes(), *extra})
    old = set(resources.class_allow_list) - set(classes)
    if old >= set(DEFAULT_CLASS_ALLOW_LIST) - set(classes):  # FLARE's list as it was delivered: nobody chose from it
        old -= set(DEFAULT_CLASS_ALLOW_LIST)
    dropped = tuple(sorted(name for name in old if not name.startswith(f"{medpfl.__name__}.")))
    resources.class_allow_list = classes
    resources.class_list_enforcement_mode = "enforce"
    keep_storage(kit, resources)
    hospital = (kit / "startup" / "fed_client.json").is_file()
    supervise(resources, hospital)
    if hospital:
        resources.allow_log_streaming = False
        _deny(kit, READ_RIGHT)
    target = kit / "local" / "resources.json"
    write_file(target, resources)
    prepare(kit)
    return Allowed(target, tuple(classes), dropped)


def why_no_class(name: str) -> str | None:
    """Why a name may not stand on an allow list: it is a prefix, not the full name of a class, or a module's name too;
    None if it may.

    FLARE's matcher takes every name that begins with an allowed one and a dot: where that is a module's name, it would
    build whatever the module has imported.
    """
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        return f"there is no such class ({error})"
    if not isinstance(found, type):
        return "it is not a class"
    return "a module has that name, too" if _is_module(name) else None


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # what it would lie in is no package
        return False


def roles_with(kit: Path, right: str) -> list[str]:
    """The roles that have a right of FLARE's at this site, perhaps under a condition.

    Raises:
        MedPFLError: the kit has no ``local/authorization.json`` or ``.default``, or it cannot be read.
    """
    policy = local_file(kit, "authorization.json", Authorization)
    return sorted(role for role, granted in policy.permissions.items() if _grants(granted, right))


def forbid_code(kit: Path) -> Path:
    """Refuse every job that brings code, whoever submits it; other rights stay as they are. Safe to repeat.

    Returns:
        The file written: ``local/authorization.json``.

    Raises:
        MedPFLError: not a server's or hospital's startup kit.
    """
    return _deny(kit, CODE_RIGHT)


def _deny(kit: Path, right: str) -> Path:
    policy = local_file(kit, "authorization.json", Authorization)
    for role, granted in policy.permissions.items():
        if _grants(granted, right):  # a role may be granted everything by one word: it is spelled out first
            others: Json = granted if isinstance(granted, dict) else {each: granted for each in _RIGHTS}
            policy.permissions[role] = {**others, right: "none"}
    target = kit / "local" / "authorization.json"
    write_file(target, policy)
    return target


def _grants(granted: str | Json, right: str) -> bool:
    word = granted.get(right, "none") if isinstance(granted, dict) else granted
    return word not in ("none", "no")
