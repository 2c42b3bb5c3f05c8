# SPDX-License-Identifier: Apache-2.0
"""FLARE's privacy filters take our whole weights for differences: whoever names one is told so before anything runs,
instead of ending with a model that is destroyed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.private.privacy_manager import Scope

from in_process import Engine, new_workspace
from medpfl.core.errors import ConfigError
from medpfl.flare.executor import SiteExecutor
from medpfl.flare.filters import MessageFilter
from medpfl.flare.leaving import check_filters
from medpfl.flare.wire import failure_of
from medpfl.job import Job, load_job, write_job

Make = Callable[..., Job]
FILTERS = [SVTPrivacy(), PercentilePrivacy(), ExcludeVars("model")]


class Rounded(MessageFilter):
    """A hospital's own filter, written for our messages."""

    def process(self, shareable: Shareable, fl_ctx: Any) -> Shareable:
        return shareable


def in_scope(one: Any, folder: Path, way: str = "out") -> Any:
    """The context of a hospital whose privacy.json names a filter."""
    scope = Scope()
    scope.set_name("strict")
    scope.add_task_result_filter(one, way)
    fl_ctx = Engine("anna", new_workspace(folder, "anna"), {}, []).new_context()
    fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True)
    return fl_ctx


@pytest.mark.parametrize("one", FILTERS, ids=lambda one: type(one).__name__)
def test_a_hospital_that_demands_one_says_so_by_name(make_job: Make, tmp_path: Path, one: Any) -> None:
    """Its first answer was refused with a sentence that never named the filter."""
    job, fl_ctx = make_job(), in_scope(one, tmp_path)
    reply = SiteExecutor(job.method, job.task).execute(
        "init", DXO(DataKind.APP_DEFINED, data={}).to_shareable(), fl_ctx, Signal()
    )
    told = failure_of(reply)
    assert told is not None and told.startswith("privacy.json, scope 'strict': the filter 'nvflare.app_common.filters.")
    assert f".{type(one).__name__}' was not written for MedPFL's messages" in told


@pytest.mark.parametrize("way", ["in", "out", "inout"])
def test_in_either_direction(tmp_path: Path, way: str) -> None:
    with pytest.raises(ConfigError, match=r"SVTPrivacy' was not written for MedPFL's messages"):
        check_filters(in_scope(SVTPrivacy(), tmp_path, way))


def test_a_filter_that_knows_our_messages_is_taken(tmp_path: Path) -> None:
    check_filters(in_scope(Rounded(), tmp_path))
    check_filters(Engine("anna", new_workspace(tmp_path, "anna"), {}, []).new_context())


def naming(path: str, file: str, key: str, job: Job, folder: Path) -> Path:
    """The job's folder with one filter more."""
    write_job(job, folder)
    config = folder / "app" / "config" / file
    content = json.loads(config.read_text())
    content.setdefault(key, []).append({"tasks": ["train"], "filters": [{"path": path}]})
    config.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("file", ["config_fed_client.json", "config_fed_server.json"])
@pytest.mark.parametrize("key", ["task_result_filters", "task_data_filters"])
def test_a_job_that_names_one_is_refused_by_name(make_job: Make, tmp_path: Path, file: str, key: str) -> None:
    """SVTPrivacy in a job gave Dice 0.000 and no event."""
    path = f"{SVTPrivacy.__module__}.SVTPrivacy"
    with pytest.raises(ConfigError, match=rf"{file}: the filter '{path}' was not written for MedPFL's messages"):
        load_job(naming(path, file, key, make_job(), tmp_path / "job"))


def test_a_job_may_name_one_that_knows_our_messages(make_job: Make, tmp_path: Path) -> None:
    known, unknown = f"{__name__}.Rounded", f"{__name__}.Engine"
    assert load_job(naming(known, "config_fed_client.json", "task_result_filters", make_job(), tmp_path / "one"))
    with pytest.raises(ConfigError, match="Engine' was not written for MedPFL's messages"):
        load_job(naming(unknown, "config_fed_client.json", "task_result_filters", make_job(), tmp_path / "other"))
