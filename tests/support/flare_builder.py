# SPDX-License-Identifier: Apache-2.0
"""A job's process in a startup kit, as far as FLARE's builder: what it makes of the job's files, or refuses."""

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.private.fed.client.client_json_config import ClientJsonConfigurator
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator
from nvflare.private.fed.utils.fed_utils import authorize_build_component

SERVER, HOSPITAL = "server.example.org", "hospital-a"
CONFIGURATORS = {SERVER: ServerJsonConfigurator, HOSPITAL: ClientJsonConfigurator}
FILES = {SERVER: "config_fed_server.json", HOSPITAL: "config_fed_client.json"}


def context(kit: Path) -> FLContext:
    """What a job's process knows of its kit."""
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(kit), site_name="at_kit"), private=True)
    fl_ctx.set_prop(FLContextKey.CURRENT_JOB_ID, "job-1", private=False, sticky=False)
    return fl_ctx


def configured(kit: Path, job: Path) -> Any:
    """The configuration of a job's process in a kit, as FLARE's ServerAppRunner and ClientAppRunner make it."""
    run = kit / "job-1"
    shutil.copytree(job / "app", run / "app_at_kit", dirs_exist_ok=True)
    shutil.copy(job / "meta.json", run)
    fl_ctx = context(kit)
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    arguments = Namespace(job_id="job-1", workspace=str(kit), client_name=kit.name, sp_scheme="grpc", sp_target="here")
    made = CONFIGURATORS[kit.name](workspace, str(run / "app_at_kit" / "config" / FILES[kit.name]), arguments, str(run))
    made.set_component_build_authorizer(authorize_build_component, fl_ctx=fl_ctx, event_handlers=[])
    made.configure()
    return made.runner_config
