# SPDX-License-Identifier: Apache-2.0
"""Which FLARE filters stand between a hospital and the server, and whether they can be honoured."""

from collections.abc import Iterator
from pathlib import Path

from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext

from medpfl.core.errors import ConfigError
from medpfl.flare.kit_files import ClientJob, read_file
from medpfl.job.names import CLIENT_FILE, KNOWS_MESSAGES, foreign_filter

_LEARNT = {"statistics", "train", "refine"}
"""Tasks whose answers hold what was learnt of the data."""


def filters_out(fl_ctx: FLContext) -> tuple[str, ...]:
    """Full class names of the filters through which all of this hospital's results go: those of its own privacy scope,
    and those of the job's configuration that act on every answer with what was learnt here."""
    return tuple(sorted({*_of_scope(fl_ctx), *_of_job(fl_ctx)}))


def check_filters(fl_ctx: FLContext) -> None:
    """Refuse filters of this machine's privacy scope, in either direction, that were not written for our messages.

    Those that a job names are refused where its files are read.

    Raises:
        ConfigError: naming the filter; it may be told outside the hospital.
    """
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    for filters in (scope.task_data_filters, scope.task_result_filters) if scope else ():
        for one in (*filters[FilterKey.IN], *filters[FilterKey.OUT]):
            if getattr(one, KNOWS_MESSAGES, False) is not True:
                name = f"{type(one).__module__}.{type(one).__qualname__}"
                raise ConfigError(f"privacy.json, scope '{scope.name}': {foreign_filter(name)}")


def _of_scope(fl_ctx: FLContext) -> Iterator[str]:
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    for one in scope.task_result_filters[FilterKey.OUT] if scope else []:
        yield f"{type(one).__module__}.{type(one).__qualname__}"


def _of_job(fl_ctx: FLContext) -> Iterator[str]:
    config = Path(fl_ctx.get_workspace().get_app_config_dir(fl_ctx.get_job_id())) / CLIENT_FILE
    for entry in read_file(config, ClientJob).task_result_filters if config.is_file() else []:
        goes_out = (entry.direction or FilterKey.OUT) in (FilterKey.OUT, FilterKey.INOUT)
        if goes_out and set(entry.tasks) >= _LEARNT:
            yield from (one.path for one in entry.filters)
