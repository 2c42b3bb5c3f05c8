# SPDX-License-Identifier: Apache-2.0
"""Whether a startup kit can run here: one finding for each thing looked at, and for each problem its mend.

No data are read, nothing is started, and nothing leaves the machine but a TLS handshake with the kit's server.
"""

import importlib
import importlib.metadata
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from medpfl.bundle import installed_bundle, manifest
from medpfl.core.errors import MedPFLError, SiteFileError, counted
from medpfl.data.contract import Dataset
from medpfl.data.paths import paths_of, split_pattern
from medpfl.data.site_file import ENVIRONMENT_VARIABLE, SiteFile, find_site_file
from medpfl.flare.allow import CODE_RIGHT, LOG_STREAMING, READ_RIGHT, component_classes, roles_with, why_no_class
from medpfl.flare.common_key import common_key
from medpfl.flare.console import check_console
from medpfl.flare.finding import Finding, note, ok, problem
from medpfl.flare.gpus import gpus
from medpfl.flare.home import ENVIRONMENT_VARIABLE as HOME_VARIABLE
from medpfl.flare.home import IN_THE_KIT, named_home
from medpfl.flare.identity import check_identity, check_server
from medpfl.flare.kit_files import Json, Privacy, Resources, local_file, read_file
from medpfl.flare.kits import DEFAULT_STORAGE, Kit, awkward, read_kit, storage_of
from medpfl.flare.left_over import left_over
from medpfl.flare.starting import prepared
from medpfl.flare.supervision import RESTARTS, unsupervised
from medpfl.rounds.hospital.policy import check_named
from medpfl.rounds.hospital.withholding import check_known

PYTHONS = ((3, 11), (3, 12), (3, 13))
GIB = 1 << 30
LEAST_DISK, LEAST_MEMORY = 2 * GIB, 2 * GIB  # below it a site does not get through a job
GOOD_DISK, GOOD_MEMORY = 20 * GIB, 8 * GIB


def examine(folder: Path) -> Iterator[Finding]:
    """Look at a startup kit, at this machine, and at the way to the server.

    Raises:
        MedPFLError: the folder is not a startup kit.
    """
    folder = folder.resolve()
    kit = read_kit(folder)
    way = f"behind relay '{kit.relay}'," if kit.relay else "it connects to" if kit.role == "relay" else "server"
    yield ok("kit", f"{kit.role} '{kit.name}', {way} {kit.host}:{kit.port}")
    if kit.relay:
        text = f"whoever runs the relay '{kit.relay}' can read all that goes between this hospital and the server"
        yield note("kit", text, "ask the coordinating centre who that is, and why there is one (docs/network.md)")
    if kit.role == "relay":
        yield note("kit", "a relay passes messages on: it needs no site file and no allow list")
    if kit.role == "admin":
        yield note("kit", "it is a person's kit for the admin console: it needs no site file and no allow list")
    if why := awkward(kit.folder):
        yield problem("place", why, "move the kit to a folder without them; then, of a server, medpfl site allow KIT")
    yield from _versions(kit)
    yield from _machine(kit)
    yield from _permissions(kit)
    yield from left_over(kit)
    yield from check_identity(kit)
    if kit.role in ("server", "hospital"):
        yield from allow_list(kit)
        yield from _code(kit)
        yield from _supervision(kit)
        yield from _home(kit)
    if kit.role == "hospital":
        yield from _leaks(kit)
        yield from _site_file(kit)
    if kit.role == "server":
        yield from _storage(kit)
    if kit.role == "admin":
        yield check_console(kit)
    yield from check_server(kit)


# -- the machine ------------------------------------------------------------------------------------------------------


_SOUND = {(3, 11): 8, (3, 12): 2}
"""The first releases in which threads that read arrays at the same time cannot fail (CPython issue 106905)."""


def python(version: tuple[int, int, int]) -> Finding:
    """What is said of a Python of this version."""
    named, sound = ".".join(map(str, version)), _SOUND.get(version[:2], 0)
    if version[:2] not in PYTHONS:
        return problem("python", f"{named}; 3.11, 3.12 or 3.13 is needed", "install Python 3.11")
    if version[2] < sound:
        return note(
            "python",
            f"{named} at {sys.executable}; threads that read arrays at the same time can fail in it, rarely",
            f"install {version[0]}.{version[1]}.{sound} or later",
        )
    return ok("python", f"{named} at {sys.executable}")


def _versions(kit: Kit) -> Iterator[Finding]:
    install = "pip install MedPFL's wheel, in the Python environment that start.sh will find first in PATH"
    yield python(sys.version_info[:3])
    tested = manifest(installed_bundle()).tested_with
    for package in ("nvflare", "torch", "monai"):
        wanted = str(tested[package])
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == "nvflare" or kit.role == "hospital":
                yield problem(package, "it is not installed", install)
            else:
                yield note(package, f"it is not installed; this {kit.role} kit can do without")
            continue
        if found.split("+")[0] == wanted:
            yield ok(package, f"{found}, as tested")
        elif package == "nvflare" and found.split(".")[:2] != wanted.split(".")[:2]:
            yield problem(package, f"{found}; kits and jobs need {wanted}", install)
        else:
            yield note(package, f"{found}; tested with {wanted}")
    path = shutil.which("python3")
    if path is None or not os.path.samefile(Path(path).parent, Path(sys.executable).parent):
        activate = Path(sys.executable).parent / "activate"
        yield note("PATH", f"start.sh runs python3, which is {path or 'not there'}", f"first: source {activate}")


def _machine(kit: Kit) -> Iterator[Finding]:
    if kit.role == "hospital":
        yield from gpus()
        yield from _processor()
    free, memory = shutil.disk_usage(kit.folder).free, psutil.virtual_memory().total
    text = f"{free / GIB:.0f} GiB free where the kit lies"
    if free < LEAST_DISK:
        yield problem("disk", text, f"free {LEAST_DISK // GIB} GiB or more, or move the kit to a larger disk")
    elif free < GOOD_DISK:
        yield note("disk", f"{text}; {GOOD_DISK // GIB} GiB are comfortable")
    else:
        yield ok("disk", text)
    if kit.role in ("relay", "admin"):
        return
    text = f"{memory / GIB:.0f} GiB, {os.cpu_count()} cores"
    if memory < LEAST_MEMORY:
        yield problem("memory", text, f"use a machine with {GOOD_MEMORY // GIB} GiB")
    elif memory < GOOD_MEMORY:
        yield note("memory", f"{text}; {GOOD_MEMORY // GIB} GiB are comfortable")
    else:
        yield ok("memory", text)


def _processor() -> Iterator[Finding]:
    """Whether the library computes safely on this processor."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return  # said above
    if importlib.import_module("medpfl.models.memory_order").faulty_here():
        yield note(
            "processor",
            f"torch {torch.__version__} damages memory on processors with AVX2 at best, such as this one, "
            "in convolutions with a kernel of 1, a stride of 2 and 2 to 7 channels, of images channels last",
            "none for MedPFL's networks, which avoid it; networks of your own: docs/results/convolutions.md",
        )


def _permissions(kit: Kit) -> Iterator[Finding]:
    check, sound = "permissions", True
    if not kit.key.is_file():
        yield problem(check, f"the private key {kit.key} is missing", "ask the coordinating centre for the kit again")
        sound = False
    elif (mode := stat.S_IMODE(kit.key.stat().st_mode)) & 0o077:
        yield problem(check, f"others may read the private key {kit.key} (mode {mode:o})", f"chmod 600 {kit.key}")
        sound = False
    for folder in (kit.folder, kit.folder / "startup", kit.local):
        if folder.is_dir() and folder.stat().st_mode & 0o022:
            yield problem(check, f"others may write to {folder}", f"chmod go-w {folder}")
            sound = False
    for path in (kit.folder, kit.key):
        if path.exists() and (owner := path.stat().st_uid) != os.getuid():
            mend = f"start it as that user, or: chown -R {os.getuid()} {kit.folder}"
            yield problem(check, f"{path} belongs to user {owner}, you are {os.getuid()}", mend)
            sound = False
            break
    if foreign := [path for path in _left(kit) if path.lstat().st_uid != os.getuid() and not os.access(path, os.W_OK)]:
        text = (
            f"{foreign[0]} belongs to user {foreign[0].lstat().st_uid}, as after a start or a restore by that one, and"
        )
        more = f"you may not write it ({counted(len(foreign), 'such place')})"
        yield problem(check, f"{text} {more}", f"chown -R {os.getuid()} {kit.folder}")
        sound = False
    if sound:
        yield ok(check, "the private key is readable, and the kit writable, by its owner only")
    if kit.role in ("server", "hospital") and kit.folder.stat().st_mode & 0o055:  # a copy loses what provision had set
        text = f"other accounts of this machine may look into {kit.folder}, where its logs and its jobs' folders lie"
        yield note(check, text, f"chmod 700 {kit.folder}, unless they should")


def _left(kit: Kit) -> Iterator[Path]:
    """What a site itself writes into its kit."""
    for place in sorted(kit.folder.iterdir()):
        if place.name not in ("startup", "local", "readme.txt"):
            yield from (path for path in (place, *place.rglob("*")) if not path.is_symlink())


# -- what the site allows ---------------------------------------------------------------------------------------------


def allow_list(kit: Kit) -> Iterator[Finding]:
    """Whether the kit's allow list holds what our jobs need; whatever else it holds is named."""
    check, mend = "allow list", f"medpfl site allow {kit.folder}"
    file = kit.local / "resources.json"
    if not file.exists():
        yield problem(check, f"there is no {file}: FLARE would build none of MedPFL's classes", mend)
        return
    try:
        resources = read_file(file, Resources)
    except MedPFLError as error:
        yield problem(check, str(error), f"remove {file}, then: {mend}")
        return
    listed = resources.class_allow_list
    bad = [name for name in listed if name.endswith(".")]
    if bad:
        text = f"{', '.join(bad)}: a prefix lets a job call anything a module there has imported"
        yield problem(check, text, f"remove it from class_allow_list in {file}, then: {mend}")
    further = sorted(set(listed) - set(bad) - set(component_classes()))
    flares = set(DEFAULT_CLASS_ALLOW_LIST)
    if untouched := flares <= set(listed):  # some of these belong to frameworks that are not installed here
        text = f"FLARE's default classes are allowed, by which jobs read files here: {', '.join(sorted(flares))}"
        yield problem(check, text, mend)
        further = [name for name in further if name not in flares]
    wrong = [f"{name} ({why})" for name in further if (why := why_no_class(name))]
    if wrong:
        yield problem(check, f"not the name of a class: {'; '.join(wrong)}", f"remove it from {file}, then: {mend}")
    missing = sorted(set(component_classes()) - set(listed))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield problem(check, f"{missing[0]}{more} missing: jobs that need it fail here", mend)
    if resources.class_list_enforcement_mode != "enforce":
        text = f"class_list_enforcement_mode is '{resources.class_list_enforcement_mode}': the list is not enforced"
        yield problem(check, text, mend)
    elif not (bad or wrong or missing or untouched):
        yield ok(check, "all MedPFL classes, each by its full name, and no prefix")
    if further and not wrong:
        text = f"a risk that this site took: a job may also build {', '.join(further)}"
        yield note(check, text, f"to allow MedPFL's only: {mend}")


def _code(kit: Kit) -> Iterator[Finding]:
    try:
        roles = roles_with(kit.folder, CODE_RIGHT)
    except MedPFLError as error:
        yield problem("code in jobs", str(error), "ask the coordinating centre for the kit again")
        return
    if not roles:
        yield ok("code in jobs", "refused, whoever submits the job: only installed code runs here")
    elif kit.role == "server":
        yield note("code in jobs", f"accepted from {' and '.join(roles)}; each hospital decides for itself")
    else:
        text = f"accepted: jobs of {' and '.join(roles)} may bring Python code that runs here"
        yield note("code in jobs", text, f"to run installed code only: medpfl site forbid-code {kit.folder}")


def _supervision(kit: Kit) -> Iterator[Finding]:
    """Whether somebody looks after a process that dies."""
    check, hospital = "supervision", kit.role == "hospital"
    try:
        resources = local_file(kit.folder, "resources.json", Resources)
    except MedPFLError:
        return  # said with the allow list
    why = unsupervised(resources, hospital)
    mend = f"medpfl site allow {kit.folder}   (kits that an earlier MedPFL set up need it once more)"
    if why is None and hospital:
        yield ok(check, f"a job's process that is killed here is started again, up to {RESTARTS} times in a job")
    elif why is None:
        yield ok(check, "jobs that were running when the server was killed are closed when it starts again")
    elif why == "other":
        text = "job processes are not started by FLARE's default launcher: what happens when one is killed is not known"
        yield note(check, text)
    elif hospital:
        yield problem(check, "if a job's process is killed here, FLARE ends the whole job, at all hospitals", mend)
    else:
        yield problem(check, "if the server is killed, FLARE shows the jobs that it ran as RUNNING for ever", mend)
    if not prepared(kit):
        others = "read every file that this user can read" if hospital else "speak as this server, and end others' jobs"
        text = "a kit that is started twice, or has expired, would start and say nothing"
        yield problem(check, f"{text}; other hospitals could {others}", mend)


def _leaks(kit: Kit) -> Iterator[Finding]:
    """What FLARE's defaults let out of a hospital."""
    check, mend = "privacy", f"medpfl site allow {kit.folder}"
    try:
        resources = local_file(kit.folder, "resources.json", Resources)
        readers = roles_with(kit.folder, READ_RIGHT)
    except MedPFLError:
        return  # said above
    if resources.allow_log_streaming:
        yield problem(check, f"{LOG_STREAMING} is on: FLARE sends this site's error log, paths and all, away", mend)
    if readers:
        text = f"{' and '.join(readers)} may read files of this kit from FLARE's console (right '{READ_RIGHT}')"
        yield problem(check, text, mend)
    if not readers and not resources.allow_log_streaming:
        yield ok(check, "logs stay here, and no file of the kit can be read from FLARE's console")


def _home(kit: Kit) -> Iterator[Finding]:
    """Where what outlives a job's run is kept."""
    check, what = "home", "checkpoints, private parts and models"
    try:
        named = named_home()
    except MedPFLError as error:
        yield problem(check, str(error), f"mount the volume, or start the site without {HOME_VARIABLE}")
        return
    folder = named or kit.folder
    if not os.access(folder, os.W_OK | os.X_OK):
        yield problem(check, f"{what} are to be kept in {folder}, where this user may not write", f"chown {folder}")
    elif named:
        yield note(check, f"{what} are kept in {named}, which {HOME_VARIABLE} names; start.sh must run with it, too")
    else:
        yield ok(check, f"{what} are kept in {folder / IN_THE_KIT}")
    own = folder / (kit.name if named else IN_THE_KIT)
    if own.is_dir() and all(path.stat().st_mode & 0o077 for path in (own, folder)):  # an earlier MedPFL made it so
        yield note(check, f"other accounts of this machine may look into {own}", f"chmod 700 {own}, unless they should")


def _storage(kit: Kit) -> Iterator[Finding]:
    try:
        resources = local_file(kit.folder, "resources.json", Resources)
    except MedPFLError:
        return  # said with the allow list
    for what, path in storage_of(resources).items():
        there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # Path's raises errors
        mend = f"medpfl site allow {kit.folder}   (it moves the storage into the kit)"
        if path.is_relative_to(DEFAULT_STORAGE):
            yield problem("storage", f"{what} are kept in {path}, which a restart of the machine empties", mend)
        elif not os.access(there, os.W_OK):
            yield problem("storage", f"{what} are to be kept in {path}, where this user may not write", mend)
        elif not path.is_relative_to(kit.folder) and not os.path.exists(path):
            yield problem("storage", f"{what} are to be kept in {path}, which is not there (was the kit moved?)", mend)
        else:
            yield ok("storage", f"{what} are kept in {path}")


# -- the site file ----------------------------------------------------------------------------------------------------


def _site_file(kit: Kit) -> Iterator[Finding]:
    check = "site file"
    try:
        scope, way = _scope(kit)
        found = find_site_file(kit.name, scope, kit.local)
    except SiteFileError as error:
        file = kit.local / f"{kit.name}.yaml"
        yield problem(check, str(error), f"write or mend the site file, usually {file} (docs/site-files.md)")
        return
    except MedPFLError as error:
        yield problem(check, str(error), f"mend {kit.local / 'privacy.json'} (FLARE's documentation: privacy policy)")
        return
    yield ok(check, f"{found._path}{way}")
    if os.environ.get(ENVIRONMENT_VARIABLE) and not way:
        yield note(check, f"named by {ENVIRONMENT_VARIABLE}; start.sh must run with the same environment")
    yield _policy(found)
    yield from common_key(found)
    for name, dataset in found.datasets.items():
        yield _dataset(found, name, dataset)


def _policy(found: SiteFile) -> Finding:
    try:
        check_named(found.policy)
        check_known(found.policy)
    except MedPFLError as error:
        return problem("policy", f"{error}; jobs are refused because of it", f"mend the name in {found._path}")
    return ok("policy", "; ".join(found.policy.described()))


def _scope(kit: Kit) -> tuple[Json | None, str]:
    """The properties of the default privacy scope, which FLARE takes when a job names none."""
    file = kit.local / "privacy.json"
    if not file.exists():
        return None, ""
    privacy = read_file(file, Privacy)
    for scope in privacy.scopes:
        if scope.name == privacy.default_scope and scope.properties.get("site_file"):
            return scope.properties, f" (of the privacy scope '{scope.name}')"
    return None, ""


def _dataset(site_file: SiteFile, name: str, dataset: Dataset) -> Finding:
    places = [site_file._path.parent / split_pattern(text)[0] for text in paths_of(dataset.model_dump())]
    absent = [str(place) for place in places if not os.access(place, os.R_OK)]
    if absent:
        beside = "copy what lay beside the site file (site init writes a datalist there) to it, too"
        mend = f"mend the path in {site_file._path}, or let this user read it; where the site file was moved, {beside}"
        return problem("data", f"dataset '{name}': cannot read {', '.join(absent)}", mend)
    return ok("data", f"dataset '{name}' ({dataset.kind}): {len(places)} declared path(s) readable")
