# SPDX-License-Identifier: Apache-2.0
"""A job's process at the server outlives what a hospital sends it.

FLARE 2.9 ends that process, and so the job at all hospitals, where an answer of one hospital cannot be read, or where
one hospital says that what it was sent is too large for it; and it ends the job where one hospital answers that it does
not know the task, or takes the job for unsafe. Here it goes on: that hospital's answer is missing.
"""

from pathlib import Path

from nvflare.apis.fl_component import FLComponent
from nvflare.fuel.f3.cellnet import cell
from nvflare.private.fed.server.server_runner import ServerRunner

from medpfl.flare.kit_files import Component, Components, write_file

FILE = "medpfl__j_resources.json"  # by this ending FLARE reads it for jobs' processes, not for the site's own
_ENDS = "_is_server_job_cell"
"""What FLARE asks before it ends its own process, and nothing else."""


class OutliveStreams(FLComponent):
    """FLARE builds it before the job's process can be reached: an answer may come before there is a controller."""

    def __init__(self) -> None:
        super().__init__()
        outlive_streams()


def outlive_streams() -> None:
    """From now on this process is not ended by a message that is in pieces; safe to repeat.

    Raises:
        AttributeError: this is another FLARE, and what it does then is not known.
    """
    getattr(cell, _ENDS)
    setattr(cell, _ENDS, lambda _: False)


def outlive_answers() -> None:
    """From now on whatever a hospital answers is MedPFL's controller's to judge, who counts it as that hospital's
    failure; in a process whose job is one of MedPFL's."""
    ServerRunner.ABORT_RETURN_CODES = []


def prepare_jobs(kit: Path) -> None:
    """Put ``OutliveStreams`` into a server's kit; safe to repeat.

    Raises:
        MedPFLError: it cannot be written.
    """
    own = Component(id="medpfl_outlive", path=f"{OutliveStreams.__module__}.{OutliveStreams.__name__}", args={})
    write_file(kit / "local" / FILE, Components(components=[own]))
