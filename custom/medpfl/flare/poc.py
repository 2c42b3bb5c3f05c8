# SPDX-License-Identifier: Apache-2.0
"""A FLARE POC federation on this machine: own HOME, own workspace, free port, no process left behind."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from medpfl.core.errors import MedPFLError
from medpfl.data.site_file import ENVIRONMENT_VARIABLE
from medpfl.flare.allow import allow
from medpfl.flare.federation import LocalFederation
from medpfl.flare.kit_files import Participant

ADMIN = "admin@medpfl.local"
PROJECT = "medpfl"


class Federation(LocalFederation):
    """One server, some hospitals and an admin, started in the foreground of this process.

    Args:
        site_files: folder with ``<hospital>.yaml`` for every hospital.
        sites, port, classes: see ``LocalFederation``.
    """

    def __init__(self, site_files: Path, sites: list[str], port: int | None = None, classes: Sequence[str] = ()):
        super().__init__(sites, port, classes)
        self.site_files = site_files.resolve()
        self.kits = self.workspace / "poc" / PROJECT / "prod_00"

    submitter = ADMIN

    def kit(self, name: str) -> Path:
        return self.kits / name

    def _command(self, name: str) -> list[str]:
        # The kit's own script; --once runs it in the foreground, without the daemon that restarts it.
        return ["bash", str(self.kit(name) / "startup" / "sub_start.sh"), "--once"]

    def _environment(self, name: str) -> dict[str, str]:
        return {
            **self._own_home(self.workspace / "home"),
            "NVFLARE_POC_WORKSPACE": str(self.workspace / "poc"),
            # How long the server waits, at a job's end, for a hospital that has disappeared.
            "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "20",
            ENVIRONMENT_VARIABLE: str(self.site_files),
            # A class of another package that is found here is found there.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }

    def _failed_to_start(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def _provision(self) -> None:
        here = {"fed_learn_port": self.port, "admin_port": self.port, "default_host": "localhost"}
        participants = [
            Participant(name="server", type="server", org="centre").model_copy(update=here),
            *(Participant(name=site, type="client", org=site.replace("-", "_")) for site in self.sites),
            Participant(name=ADMIN, type="admin", org="centre", role="project_admin"),
        ]
        builders = ["workspace.WorkspaceBuilder", "static_file.StaticFileBuilder", "cert.CertBuilder"]
        arguments = [{"template_file": ["master_template.yml"]}, {"config_folder": "config", "scheme": "tcp"}, {}]
        project = {
            "api_version": 3,
            "name": PROJECT,
            "participants": [one.written() for one in participants],
            "builders": [
                {"path": f"nvflare.lighter.impl.{name}", "args": args}
                for name, args in zip(builders, arguments, strict=True)
            ]
            + [{"path": "nvflare.lighter.impl.signature.SignatureBuilder"}],
        }
        file = self.workspace / "project.yml"
        file.write_text(yaml.safe_dump(project, sort_keys=False))
        (self.workspace / "poc").mkdir()
        command = [sys.executable, "-m", "nvflare.cli", "poc", "prepare", "-i", str(file), "--force"]
        done = subprocess.run(command, env=self._environment("admin"), capture_output=True, text=True, check=False)
        if done.returncode or not self.kits.is_dir():
            raise MedPFLError(f"FLARE could not prepare the federation: {(done.stderr or done.stdout).strip()[-400:]}")
        for name in ("server", *self.sites):
            allow(self.kits / name, self.classes)
