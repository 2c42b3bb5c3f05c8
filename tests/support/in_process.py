# SPDX-License-Identifier: Apache-2.0
"""A FLARE federation inside one process: the real controller, communicator and executors in threads, every message
through FLARE's serialiser. Only the network and the processes are missing."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils import fobs
from nvflare.private.fed.utils.fed_utils import nvflare_fobs_initialize
from nvflare.private.privacy_manager import Scope
from nvflare.widgets.info_collector import InfoCollector

from medpfl.flare.controller import MixingController
from medpfl.flare.evaluation import EvaluationController
from medpfl.flare.executor import SiteExecutor
from medpfl.flare.filters import DecodeUpdate, EncodeUpdate
from medpfl.job import EvaluationJob, Job, write_job
from medpfl.job.codecs import TASKS

Script = Callable[[str, str, int], str | Callable[[Shareable], Shareable] | None]
"""(site, task, round) to what the hospital does: None answers, "silent" never answers this task, "late" answers when
the server has stopped waiting, "gone" stops for good, a function changes the answer."""


# Real hospitals are processes of their own; here they share torch's global generator, so they must take turns.
_ONE_AT_A_TIME = threading.Lock()


def new_workspace(folder: Path, name: str) -> Workspace:
    """A real FLARE workspace: startup/ and local/ as in a kit."""
    for part in ("startup", "local"):
        (folder / name / part).mkdir(parents=True, exist_ok=True)
    return Workspace(str(folder / name), site_name=name)


class Engine:
    """What components ask of FLARE's engine."""

    def __init__(self, name: str, workspace: Workspace, meta: dict[str, Any], clients: list[Client]):
        self.clients, self.workspace = clients, workspace
        self.components: dict[str, Any] = {}
        self.handlers: list[Any] = []
        self.panic: str | None = None
        self.abort = Signal()
        stickers = {FLContextKey.WORKSPACE_OBJECT: workspace, FLContextKey.JOB_META: meta}
        self.manager = FLContextManager(self, name, "job-1", {}, stickers)

    def get_clients(self) -> list[Client]:
        return self.clients

    def get_component(self, name: str) -> Any:
        return self.components.get(name)

    def get_workspace(self) -> Workspace:
        return self.workspace

    def get_cell(self) -> None:
        """There is no network."""

    def new_context(self) -> FLContext:
        return self.manager.new_context()

    def fire_event(self, event: str, fl_ctx: FLContext) -> None:
        if event == EventType.FATAL_SYSTEM_ERROR:
            self.panic = fl_ctx.get_prop(FLContextKey.EVENT_DATA)
            self.abort.trigger(True)
        for handler in self.handlers:
            handler.handle_event(event, fl_ctx)


@dataclass
class Harness:
    """Runs a job; afterwards ``engine.panic`` says why it failed (None: it did not), ``wire`` what hospitals sent and
    ``down`` what they were sent. ``without``: hospitals whose configuration lacks the job's filters; ``scopes``:
    hospital to the privacy scope that its privacy.json has; ``made``: hospital and task to what its executor answered,
    before any filter."""

    job: Job | EvaluationJob
    site_files: dict[str, Path]
    folder: Path
    script: Script = lambda site, task, round_number: None
    without: tuple[str, ...] = ()
    scopes: Mapping[str, Scope] = field(default_factory=dict)
    allowed: tuple[str, ...] = ("*",)
    """The server's allow list; the tests' own classes are on it by default."""
    leave_out: str | None = None
    """A file of the job that the server does not get."""
    wire: list[tuple[str, str, bytes]] = field(default_factory=list)
    down: list[tuple[str, str, bytes]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    made: list[tuple[str, str, bytes]] = field(default_factory=list)
    console: dict[str, InfoCollector] = field(default_factory=dict)
    """What FLARE's console can show of each hospital's process."""

    def run(self, timeout: float = 240.0) -> "Harness":
        nvflare_fobs_initialize()
        meta = {"name": self.job.name, "min_clients": self.job.min_clients, "deploy_map": {"app": ["@ALL"]}}
        clients = [Client(name, f"token-{name}") for name in sorted(self.site_files, reverse=True)]
        self.engine = Engine("server", new_workspace(self.folder, "server"), meta, clients)
        settings = vars(self.job.settings)
        self.controller: MixingController | EvaluationController
        if isinstance(self.job, EvaluationJob):
            self.controller = EvaluationController(**settings)
            config = Path(self.engine.workspace.get_app_config_dir("job-1"))
            shutil.copytree(self.job.model.parent, config)  # where FLARE puts a job's app/config
        else:
            self.controller = MixingController(**settings)
            written = write_job(self.job, self.folder / "job") / "app" / "config"
            shutil.copytree(
                written,
                self.engine.workspace.get_app_config_dir("job-1"),
                dirs_exist_ok=True,
                ignore=lambda folder, names: [name for name in names if name == self.leave_out],
            )
            local = self.folder / "server" / "local" / "resources.json"
            local.write_text(json.dumps({"class_allow_list": self.allowed}))
        self._filters = _filters_of(self.job)
        listed = [*set(self._filters[0][1].values())]  # one list for all tasks, as FLARE has it
        decoders = {f"{task}{FilterKey.DELIMITER}{FilterKey.IN}": listed for task in self._filters[0][1]}
        runner = SimpleNamespace(config=SimpleNamespace(task_result_filters=decoders))
        self.engine.manager.private_stickers[FLContextKey.RUNNER] = runner
        self.communicator = WFCommServer()
        self.controller.set_communicator(self.communicator)
        self.engine.handlers = [self.controller, self.communicator]
        fl_ctx = self.engine.new_context()
        self.communicator.initialize_run(fl_ctx)
        self.controller.initialize(fl_ctx)
        self._over = threading.Event()
        threads = [threading.Thread(target=self._client, args=(c, meta), daemon=True) for c in clients]
        server = threading.Thread(target=self.controller.control_flow, args=(self.engine.abort, fl_ctx), daemon=True)
        for thread in (*threads, server):
            thread.start()
        server.join(timeout)
        hung = server.is_alive()
        self.engine.abort.trigger(True)
        self._over.set()
        for thread in threads:
            thread.join(5)
        self.communicator.finalize_run(fl_ctx)
        assert not hung, "the controller did not come to an end"
        return self

    @property
    def results(self) -> Path:
        """What the job left at the server."""
        return Path(self.engine.workspace.get_run_dir("job-1")) / "results"

    def _client(self, client: Client, meta: dict[str, Any]) -> None:
        site = client.name
        workspace = new_workspace(self.folder, site)
        Path(workspace.get_run_dir("job-1")).mkdir(exist_ok=True)
        local = Path(workspace.get_site_config_dir()) / "site.yaml"
        if not local.exists():
            text = (
                self.site_files[site].read_text().replace(f"{site}.csv", str(self.site_files[site].with_suffix(".csv")))
            )
            local.write_text(text)
        engine = Engine(site, workspace, meta, [])
        engine.handlers = [self.console.setdefault(site, InfoCollector())]
        executor = SiteExecutor(self.job.method, self.job.task)
        try:
            self._answer(client, engine, executor)
        finally:
            executor.handle_event(EventType.END_RUN, engine.new_context())

    def _answer(self, client: Client, engine: Engine, executor: SiteExecutor) -> None:
        """What FLARE's client runner does: asks for tasks and answers them until the job is over."""
        site = client.name
        outside, inside = self._filters
        if site in self.without:
            inside = ({}, {})
        while not self._over.is_set():
            fl_ctx = engine.new_context()
            fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, self.scopes.get(site), private=True, sticky=False)
            server_ctx = self.engine.new_context()
            name, task_id, data = self.communicator.process_task_request(client, server_ctx)
            if not name:
                time.sleep(0.005)
                continue
            server_ctx.set_peer_context(fl_ctx)
            data = _filtered(outside[0], name, data, server_ctx)
            self.down.append((site, name, fobs.dumps(data)))
            received = _filtered(inside[0], name, _decoded(self.down[-1][2]), fl_ctx)
            action = self.script(site, name, self._round_of(received))
            if action == "gone":
                return
            if action == "silent":  # a frozen hospital asks for nothing until it wakes up
                self._until_closed(task_id, server_ctx)
                continue
            with _ONE_AT_A_TIME:
                result = executor.execute(name, received, fl_ctx, self.engine.abort)
            if callable(action):
                result = action(result)
            if site in self.scopes:
                self.made.append((site, name, fobs.dumps(result)))
                result = apply_filters(
                    Scope.TASK_RESULT_FILTERS_NAME, _decoded(self.made[-1][2]), fl_ctx, {}, name, FilterKey.OUT
                )
            payload = fobs.dumps(_filtered(inside[1], name, result, fl_ctx))
            self.wire.append((site, name, payload))
            if action == "late":
                self._until_closed(task_id, server_ctx)
                self.late.append(site)
            server_ctx = self.engine.new_context()
            server_ctx.set_peer_context(fl_ctx)
            result = apply_filters(
                Scope.TASK_RESULT_FILTERS_NAME,
                _decoded(payload),
                server_ctx,
                server_ctx.get_prop(FLContextKey.RUNNER).config.task_result_filters,
                name,
                FilterKey.IN,
            )
            self.communicator.process_submission(client, name, task_id, result, server_ctx)

    def _until_closed(self, task_id: str, fl_ctx: FLContext) -> None:
        while not self._over.is_set() and self.communicator.process_task_check(task_id, fl_ctx):
            time.sleep(0.005)

    @staticmethod
    def _round_of(shareable: Shareable) -> int:
        try:
            return int(json.loads(from_shareable(shareable).meta["medpfl"])["content"]["round"])
        except ValueError:  # a probe carries nothing
            return -1


def _decoded(payload: bytes) -> Shareable:
    """FOBS reads arrays with numpy.load, which parses their headers. Before Python 3.11.8, threads that parse at the
    same time can fail with a SystemError (CPython issue 106905); real hospitals are processes of their own."""
    with _ONE_AT_A_TIME:
        return fobs.loads(payload)


Filters = tuple[dict[str, Filter], dict[str, Filter]]


def _filters_of(job: Job | EvaluationJob) -> tuple[Filters, Filters]:
    """Task to filter, of task data and of task results, at the server and at a hospital: as FLARE makes them of the
    job's JSON, one object for each place."""

    def chain(kind: str, one: Filter) -> dict[str, Filter]:
        one.set_prop(FilterContextKey.CHAIN_TYPE, kind)
        return dict.fromkeys(TASKS, one)

    if isinstance(job, EvaluationJob) or job.codecs is None:
        return ({}, {}), ({}, {})
    data, result = FilterChainType.TASK_DATA_CHAIN, FilterChainType.TASK_RESULT_CHAIN
    server = (chain(data, EncodeUpdate(job.codecs.to_site)), chain(result, DecodeUpdate()))
    return server, (chain(data, DecodeUpdate()), chain(result, EncodeUpdate(job.codecs.from_site)))


def _filtered(filters: dict[str, Filter], task: str, content: Shareable, fl_ctx: FLContext) -> Shareable:
    return filters[task].process(content, fl_ctx) if task in filters else content


def tensors_of(payload: bytes) -> dict[str, np.ndarray]:
    """The arrays in an encoded message."""
    shareable = fobs.loads(payload)
    try:
        data: dict[str, np.ndarray] = from_shareable(shareable).data
    except ValueError:  # a failure's reply holds none
        return {}
    return data
