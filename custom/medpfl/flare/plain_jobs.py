# SPDX-License-Identifier: Apache-2.0
"""A site takes no job into whose files FLARE would put something of this machine.

FLARE writes environment variables and folders of the machine where a job's configuration has ``{$HOME}`` or
``{WORKSPACE}``, and takes HOCON in JSON's place, which includes files, addresses and environment variables. What a job
gets so, as the name of a dataset, say, a hospital repeats to the server when it refuses; a server shows it in the list
of jobs. FLARE reads a configuration while it takes a job, so it is looked at before that, in the site's own process.
"""

import json
from pathlib import Path

from nvflare.apis.app_validation import AppValidator
from nvflare.apis.fl_constant import WorkspaceConstants
from nvflare.fuel.utils.config import Config, ConfigFormat, ConfigLoader
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.fuel.utils.json_config_loader import JsonConfigLoader
from nvflare.private.fed.utils.app_authz import AppAuthzService

from medpfl.job.names import CLIENT_FILE, SERVER_FILE

_CONFIG = "config"
_OTHER = tuple(ending for ending in ConfigFormat.extensions() if ending != ".json")
_JSON_ONLY = "this site reads a job's configuration from JSON only"


class PlainJobs(AppValidator):
    """Looks at an app before FLARE's own validator does, which reads its configuration; ``then``: that one."""

    def __init__(self, then: AppValidator | None):
        self._then = then

    def validate(self, app_folder: str) -> tuple[str, dict[str, object]]:
        if refused := why_not_plain(Path(app_folder)):
            return refused, {}
        return self._then.validate(app_folder) if self._then else ("", {})


class _Refused(ConfigLoader):
    """In the place of FLARE's reader of another format: at a server FLARE reads a job's meta.json, by whatever ending,
    when it is submitted, before anybody is asked, and takes a ValueError for its refusal."""

    def load_config(self, file_path: str) -> Config:
        raise ValueError(f"{_JSON_ONLY}, and this is {Path(file_path).name[:100]!r}")

    def load_config_from_str(self, config_str: str) -> Config:
        raise ValueError(_JSON_ONLY)

    def load_config_from_dict(self, config_dict: dict[str, object]) -> Config:
        raise ValueError(_JSON_ONLY)


class _Named(JsonConfigLoader):
    """FLARE's reader of JSON; from a text it reads a job's meta.json, whose name consoles print as it is."""

    def load_config_from_str(self, config_str: str) -> Config:
        read = super().load_config_from_str(config_str)
        name = read.to_dict().get("name")
        if isinstance(name, str) and not name.isprintable():
            raise ValueError(f"the name of the job holds characters that cannot be printed: {name[:100]!r}")
        return read


def look_first() -> None:
    """From now on this process takes plain jobs only; safe to repeat."""
    for kind in ConfigFormat:
        ConfigFactory._fmt2Loader[kind] = _Named() if kind == ConfigFormat.JSON else _Refused(kind)
    if not isinstance(AppAuthzService.app_validator, PlainJobs):
        AppAuthzService.initialize(PlainJobs(AppAuthzService.app_validator))


def why_not_plain(app: Path) -> str:
    """Why an app is not taken; "" if it is.

    Where it brings code, which a site has to allow, variables are not looked for: the code reads what it likes.
    """
    files = sorted(path for path in (app / _CONFIG).rglob("*") if path.is_file())
    for file in files:
        if file.name.endswith(_OTHER):
            return f"{_JSON_ONLY}, and the job has {file.name[:100]!r}"
    if (app / WorkspaceConstants.CUSTOM_FOLDER_NAME).exists():
        return ""
    for file in files:  # FLARE looks into folders inside, too
        if file.name not in (CLIENT_FILE, SERVER_FILE):
            continue
        try:
            named = _variable(json.loads(file.read_bytes()))
        except (ValueError, RecursionError):
            return f"{file.name} of the job is no valid JSON"
        if named is not None:
            return f"{file.name} of the job names a variable, which this site fills in for no job: {named[:100]!r}"
    return ""


def _variable(content: object) -> str | None:
    """The first text in which FLARE would look for one."""
    if isinstance(content, str):
        return content if "{" in content else None
    inner = [*content, *content.values()] if isinstance(content, dict) else content
    found = (_variable(one) for one in inner) if isinstance(inner, list) else ()
    return next((one for one in found if one is not None), None)
