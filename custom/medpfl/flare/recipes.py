# SPDX-License-Identifier: Apache-2.0
"""Jobs as FLARE's recipes: ``recipe.execute(SimEnv(...))``, ``PocEnv`` or ``ProdEnv``, and ``recipe.export(folder)``.

For whoever submits jobs; hospitals and servers need none of this. A recipe is a typed ``Job`` and exports what
``write_job`` writes, the plain JSON of ``jobs/``. Where FLARE makes the sites itself (SimEnv, PocEnv) these allow no
installed class of ours, so there the job brings the code, as ``medpfl pack`` does; for ProdEnv it only names classes.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME
from nvflare.app_common.widgets.streaming import AnalyticsReceiver
from nvflare.job_config.api import FedJob
from nvflare.job_config.fed_job_config import FedJobConfig
from nvflare.recipe import PocEnv, SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from medpfl.core.errors import ConfigError, MedPFLError, reason_of
from medpfl.core.mixers import Mixer
from medpfl.core.temporary import temporary_folder
from medpfl.flare.pack import pack
from medpfl.flare.receivers import tracker_for
from medpfl.job import Job, write_job
from medpfl.job.codecs import Codecs
from medpfl.job.declared import meta_of
from medpfl.job.settings import Settings
from medpfl.methods.contract import Method
from medpfl.methods.cusfl import CusFL
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedsm import FedSM
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.methods.pfednet import PFedNet
from medpfl.results.callbacks import Callback
from medpfl.tasks.contract import Task

M = TypeVar("M", bound=Method)


class _Config(FedJobConfig):
    """Writes the job folder of a ``Job``; ``packed``: with this package's code inside."""

    def __init__(self, job: Job):
        super().__init__(job.name, job.min_clients)
        self.job = job
        self.packed = False

    def generate_job_config(self, job_root: str) -> None:
        """Write ``<job_root>/<name>``; a job of that name that lies there is replaced, anything else is not.

        Raises:
            ConfigError: what lies there is no job of this name.
            MedPFLError: the folder cannot be written.
        """
        target = Path(job_root) / self.job.name
        if target.exists() and not self._is_valid_job_folder(str(target), self.job.name):
            raise ConfigError(f"{target} is there already and is no job of this name; export into another folder")
        with temporary_folder() as scratch:
            made = write_job(self.job, scratch / "plain" / self.job.name)
            if self.packed:
                made = pack(made, scratch / "packed")
            fresh = target.with_name(f".{target.name}-{os.getpid()}")
            try:
                shutil.copytree(made, fresh)
                shutil.rmtree(target, ignore_errors=True)
                fresh.rename(target)
            except OSError as error:
                shutil.rmtree(fresh, ignore_errors=True)
                raise MedPFLError(f"cannot write {target}: {reason_of(error)}") from error


class _FedJob(FedJob):
    """What a recipe hands to an environment: FLARE builds no app of its own for it."""

    def __init__(self, job: Job):
        super().__init__(job.name, job.min_clients)
        self.job = _Config(job)
        self.clients = [ALL_SITES]

    def to(self, obj: Any, target: str, *_: object, **__: object) -> Any:
        """Everything that FLARE's helpers would add to the job's apps comes here.

        FLARE's receivers become the tracker that writes the same (``flare.receivers``): a receiver of FLARE's is fed by
        hospitals only, and MedPFL's numbers are the server's.

        Raises:
            ConfigError: it is anything else; what is added in silence would not be what the recipe says.
        """
        if target == SERVER_SITE_NAME and isinstance(obj, AnalyticsReceiver):
            self.job.job = replace(self.job.job, trackers=(*self.job.job.trackers, tracker_for(obj, self.name)))
            return None
        raise ConfigError(
            f"{type(obj).__name__} for {target}: a recipe of MedPFL is changed by its arguments alone (trackers, "
            "codecs, components, settings) and by add_experiment_tracking; FLARE's filters and services are configured "
            "at the sites"
        )

    def _set_all_apps(self) -> None:
        pass


class MedPFLRecipe(Recipe, Generic[M]):
    """Any method on any task.

    Args:
        method: what hospitals do in a round; ``task``: what is learnt.
        settings: what the server decides: ``Settings(rounds=...)``.
        name: the job's; letters, digits, "-" and "_".
        min_clients: how many hospitals must answer for a round to count.
        components: slot to the server component that takes the place of the method's own.
        codecs: how messages are encoded. None: they are not.
        trackers: are told at the server of every round's end and the job's (``medpfl.results.callbacks``).

    Raises:
        ConfigError: the method is not the recipe's, the name cannot be a job's, or what is given does not fit together.
    """

    takes: ClassVar[type[Method]] = Method  # type: ignore[type-abstract]  # it is only asked for instances

    def __init__(
        self,
        *,
        method: M,
        task: Task,
        settings: Settings,
        name: str = "medpfl",
        min_clients: int = 2,
        components: Mapping[str, Mixer] | None = None,
        codecs: Codecs | None = None,
        trackers: tuple[Callback, ...] = (),
    ):
        if not isinstance(method, self.takes):
            raise ConfigError(f"{type(self).__name__} takes {self.takes.__name__}, got {type(method).__name__}")
        # As the job's meta.json will be read; FLARE would raise a ValueError.
        meta_of({"name": name, "min_clients": min_clients, "deploy_map": {"app": [ALL_SITES]}})
        made = Job(name, min_clients, settings, dict(components or {}), method, task, codecs, tuple(trackers))
        super().__init__(_FedJob(made))

    @property
    def job(self) -> Job:
        """What is run and exported."""
        found: Job = self._job.job.job
        return found

    def finalize(self) -> None:
        self._job.job.packed = False  # until ``process_env``, which FLARE calls next where there is an environment

    def process_env(self, env: ExecEnv) -> None:
        self._job.job.packed = isinstance(env, SimEnv | PocEnv)


class FedSMRecipe(MedPFLRecipe[FedSM]):
    """FedSM: SoftPull with a model selector (Xu et al., CVPR 2022)."""

    takes = FedSM


class FedAPRecipe(MedPFLRecipe[FedAP]):
    """FedAP (Lu et al., IEEE Trans. Big Data 2022)."""

    takes = FedAP


class CusFLRecipe(MedPFLRecipe[CusFL]):
    """CusFL (Wicaksana et al., IEEE JBHI 2022)."""

    takes = CusFL


class PFedNetRecipe(MedPFLRecipe[PFedNet]):
    """pFedNet (Zhao et al.)."""

    takes = PFedNet


class MHpFLIDRecipe(MedPFLRecipe[MHpFLID]):
    """MH-pFLID (Xie et al., ICML 2024)."""

    takes = MHpFLID
