# SPDX-License-Identifier: Apache-2.0
"""Where a site keeps what outlives a job's run: checkpoints, private parts, models."""

import os
from pathlib import Path

from nvflare.apis.fl_context import FLContext

from medpfl.core.errors import MedPFLError

ENVIRONMENT_VARIABLE = "MEDPFL_HOME"
IN_THE_KIT = "medpfl"


def home_of(fl_ctx: FLContext) -> Path:
    """This site's own folder in the one that MEDPFL_HOME names; without it ``medpfl`` in the kit's folder.

    FLARE's Docker and Kubernetes launchers give a job's container a kit's folder in memory, which is gone with it:
    there the variable names a volume.

    Where it is not there yet it is made for this account alone, whatever the umask and who may look into the volume:
    patients can be learnt of from models and private parts. Who lets others read it (chmod) is not overruled.

    Raises:
        MedPFLError: it names no folder that is there; a volume that is not mounted must not be made up. Or this account
            may not write there.
    """
    named = named_home()
    if named is None:
        own = Path(fl_ctx.get_workspace().get_root_dir()) / IN_THE_KIT
    else:
        own = named / str(fl_ctx.get_identity_name())  # sites on one machine do not share one
    try:
        own.mkdir(mode=0o700, parents=named is None, exist_ok=True)
    except OSError as error:
        raise MedPFLError(
            f"cannot make the folder {own}: {error.strerror}",
            public=f"the folder for what outlives a run cannot be made: {error.strerror}",
        ) from error
    return own


def named_home() -> Path | None:
    """The folder that MEDPFL_HOME names, of this machine's sites; None where it is not set. Raises as ``home_of``."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if not named:
        return None
    try:
        there = Path(named).is_absolute() and Path(named).is_dir()
    except OSError as error:  # of a folder that this account may not enter, say
        raise MedPFLError(
            f"{ENVIRONMENT_VARIABLE} names a folder that cannot be used: '{named}': {error.strerror}",
            public=f"{ENVIRONMENT_VARIABLE} names a folder that cannot be used: {error.strerror}",
        ) from error
    if not there:
        raise MedPFLError(
            f"{ENVIRONMENT_VARIABLE} must be the absolute path of a folder that is there, got '{named}'",
            public=f"{ENVIRONMENT_VARIABLE} names no folder that is there",
        )
    return Path(named)
