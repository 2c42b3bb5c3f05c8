# SPDX-License-Identifier: Apache-2.0
"""Which FLARE filters stand between a hospital and the server, and whether they can be honoured."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.task_utils import get_filters
from nvflare.private.privacy_manager import Scope

from medpfl.core.errors import ConfigError
from medpfl.flare.kit_files import ClientJob, read_file
from medpfl.job.names import CLIENT_FILE, HONOURED, KNOWS_MESSAGES, foreign_filter, not_both

_LEARNT = {"statistics", "train", "refine"}
"""Tasks whose answers hold what was learnt of the data."""
_ALL = ("init", *sorted(_LEARNT), "validate", "finish", "evaluate")


def name_of(one: object) -> str:
    """An object's class in full."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


def filters_out(fl_ctx: FLContext) -> tuple[str, ...]:
    """Full class names of the filters through which all of this hospital's results go: those of its own privacy scope,
    and those of the job's configuration that act on every answer with what was learnt here."""
    return tuple(sorted({*_of_scope(fl_ctx), *_of_job(fl_ctx)}))


def acting_on(task: str, fl_ctx: FLContext) -> list[DXOFilter]:
    """FLARE's own filters that will act on this hospital's answer to a task, as updates in the form of differences."""
    return [one for one in _results_out(task, fl_ctx) if isinstance(one, DXOFilter) and name_of(one) in HONOURED]


def untouched(fl_ctx: FLContext) -> bool:
    """Whether messages come to this hospital and leave it as they are, so that no filter keeps their tensors."""
    return next(_all(fl_ctx, True), None) is None


def check_filters(fl_ctx: FLContext, hospital: bool = False) -> None:
    """Refuse filters of this machine's privacy scope, in either direction, that cannot act on our messages; at a
    hospital those of the job, too.

    A hospital's answers may pass those of FLARE's own that act on differences, if they act on them with the arguments
    that they have, and if nothing beside them takes whole messages.

    Raises:
        ConfigError: naming the filter; it may be told outside the hospital.
    """
    for where, one, answers in _all(fl_ctx, hospital):
        if hospital and answers and name_of(one) in HONOURED:
            _try(where, one, fl_ctx)
        elif getattr(one, KNOWS_MESSAGES, False) is not True:
            raise ConfigError(f"{where}: {foreign_filter(name_of(one))}")
    for task in _ALL if hospital else ():
        acting = acting_on(task, fl_ctx)
        for other in _results_out(task, fl_ctx) if acting else ():
            if name_of(other) not in HONOURED:
                raise ConfigError(not_both(name_of(acting[0]), name_of(other)))


def _all(fl_ctx: FLContext, hospital: bool) -> Iterator[tuple[str, Filter, bool]]:
    """Where it is named, a filter, and whether it acts on answers on their way out only."""
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    for filters, results in ((scope.task_data_filters, False), (scope.task_result_filters, True)) if scope else ():
        for way in (FilterKey.IN, FilterKey.OUT):
            for one in filters[way]:
                yield f"privacy.json, scope '{scope.name}'", one, results and way == FilterKey.OUT
    runner = fl_ctx.get_prop(FLContextKey.RUNNER) if hospital else None
    for kind, results in (("task_data_filters", False), ("task_result_filters", True)):
        table: Mapping[str, list[Filter]] = getattr(runner, kind, None) or {}
        for place, listed in table.items():
            for one in listed:
                yield CLIENT_FILE, one, results and place.endswith(f"{FilterKey.DELIMITER}{FilterKey.OUT}")


def _results_out(task: str, fl_ctx: FLContext) -> list[Filter]:
    """As FLARE itself finds them."""
    table = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "task_result_filters", None) or {}
    found: list[Filter] = get_filters(Scope.TASK_RESULT_FILTERS_NAME, fl_ctx, table, task, FilterKey.OUT)
    return found


def _try(where: str, one: Filter, fl_ctx: FLContext) -> None:
    """Let a copy of the filter act on two numbers: with arguments that it cannot use, or by which it does nothing, it
    would fail, or not protect, in every round."""
    assert isinstance(one, DXOFilter)
    if DataKind.WEIGHT_DIFF not in (one.data_kinds or [DataKind.WEIGHT_DIFF]):
        raise ConfigError(
            f"{where}: the filter '{name_of(one)}' leaves out {DataKind.WEIGHT_DIFF.value} by its 'data_kinds'"
        )
    trial = copy.copy(one)
    trial.handle_event(EventType.START_RUN, fl_ctx)  # what it counts is the copy's own from here on
    try:
        numbers = DXO(DataKind.WEIGHT_DIFF, {"a": np.array([1, -1], dtype=np.float32)})
        acted = trial.process_dxo(numbers, Shareable(), fl_ctx)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{where}: the filter '{name_of(one)}' fails with its arguments: {error}") from error
    if acted is None:
        raise ConfigError(f"{where}: the filter '{name_of(one)}' does nothing with its arguments")


def _of_scope(fl_ctx: FLContext) -> Iterator[str]:
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    for one in scope.task_result_filters[FilterKey.OUT] if scope else []:
        yield name_of(one)


def _of_job(fl_ctx: FLContext) -> Iterator[str]:
    config = Path(fl_ctx.get_workspace().get_app_config_dir(fl_ctx.get_job_id())) / CLIENT_FILE
    for entry in read_file(config, ClientJob).task_result_filters if config.is_file() else []:
        goes_out = (entry.direction or FilterKey.OUT) in (FilterKey.OUT, FilterKey.INOUT)
        if goes_out and set(entry.tasks) >= _LEARNT:
            yield from (one.path for one in entry.filters)
