# SPDX-License-Identifier: Apache-2.0
"""FLARE's privacy filters took our whole weights for differences: those that can act on differences get them, at the
one place where there are any; whoever names another one is told so before anything runs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.filters.convert_weights import ConvertWeights
from nvflare.app_common.filters.dxo_blocker import DXOBlocker
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.statistics_privacy_filter import StatisticsPrivacyFilter
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.privacy_manager import Scope

from flare_builder import FILES, HOSPITAL, configured, context
from in_process import Engine, Harness, new_workspace
from medpfl.core.codecs import CER
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.flare.allow import allow
from medpfl.flare.executor import SiteExecutor
from medpfl.flare.filters import MessageFilter
from medpfl.flare.leaving import acting_on, check_filters, name_of, untouched
from medpfl.flare.wire import failure_of
from medpfl.job import Job, load_job, write_job
from medpfl.job.codecs import Codecs
from medpfl.methods.dsfl import DSFL
from medpfl.rounds.leaves import leaves_of
from medpfl.rounds.simulate import simulate

Make = Callable[..., Job]
PERCENTILE, SVT = (name_of(one) for one in (PercentilePrivacy(), SVTPrivacy()))


class Bolder(SVTPrivacy):
    """A subclass may do anything."""


FOREIGN = [Bolder(), ConvertWeights("weights_to_diff"), DXOBlocker(["WEIGHTS"]), StatisticsPrivacyFilter([])]
IDLE = {
    "does nothing with its arguments": [
        PercentilePrivacy(gamma=0), PercentilePrivacy(percentile=101), ExcludeVars(), ExcludeVars(""),
    ],
    "fails with its arguments: epsilon must be > 0": [SVTPrivacy(epsilon=0)],
    "fails with its arguments: noise_var must be > 0": [SVTPrivacy(noise_var=0)],
    "leaves out WEIGHT_DIFF by its 'data_kinds'": [SVTPrivacy(data_kinds=["WEIGHTS"]), ExcludeVars("a", ["WEIGHTS"])],
}  # fmt: skip


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


@pytest.mark.parametrize("one", FOREIGN, ids=lambda one: type(one).__name__)
def test_a_hospital_that_demands_one_says_so_by_name(make_job: Make, tmp_path: Path, one: Any) -> None:
    """Its first answer was refused with a sentence that never named the filter."""
    job, fl_ctx = make_job(), in_scope(one, tmp_path)
    reply = SiteExecutor(job.method, job.task).execute(
        "init", DXO(DataKind.APP_DEFINED, data={}).to_shareable(), fl_ctx, Signal()
    )
    told = failure_of(reply)
    assert told is not None and told.startswith(f"privacy.json, scope 'strict': the filter '{name_of(one)}'")
    assert "was not written for MedPFL's messages" in told


@pytest.mark.parametrize(("words", "one"), [(words, one) for words, all_ in IDLE.items() for one in all_])
def test_one_that_would_not_protect_is_named_too(tmp_path: Path, words: str, one: Any) -> None:
    with pytest.raises(ConfigError, match=f"the filter '{name_of(one)}' {words}"):
        check_filters(in_scope(one, tmp_path), hospital=True)


@pytest.mark.parametrize(("way", "hospital"), [("in", True), ("inout", True), ("out", False)])
def test_models_that_are_sent_are_no_differences(tmp_path: Path, way: str, hospital: bool) -> None:
    """They are honoured at a hospital, on answers on their way out, and nowhere else."""
    with pytest.raises(ConfigError, match=f"the filter '{SVT}' can act on what a hospital answers, on its way out"):
        check_filters(in_scope(SVTPrivacy(), tmp_path, way), hospital)


def test_those_of_flare_that_act_on_differences_are_taken(tmp_path: Path) -> None:
    for one in (SVTPrivacy(), PercentilePrivacy(), ExcludeVars("model"), ExcludeVars(["a::b"])):
        fl_ctx = in_scope(one, tmp_path)
        check_filters(fl_ctx, hospital=True)
        assert acting_on("train", fl_ctx) == [one]
    assert acting_on("train", in_scope(Rounded(), tmp_path)) == []


@pytest.mark.parametrize("one", [Rounded(), SVTPrivacy()])
@pytest.mark.parametrize("way", ["in", "out", "inout"])
def test_where_a_filter_may_keep_what_came_nothing_is_written_over_it(tmp_path: Path, one: Any, way: str) -> None:
    assert not untouched(in_scope(one, tmp_path, way))
    assert untouched(Engine("anna", new_workspace(tmp_path, "anna"), {}, []).new_context())


def test_one_beside_a_filter_that_takes_whole_messages(tmp_path: Path) -> None:
    fl_ctx = in_scope(SVTPrivacy(), tmp_path)
    fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT).add_task_result_filter(Rounded(), "out")
    with pytest.raises(ConfigError, match=r"SVTPrivacy' acts on updates as differences, and '.*Rounded' takes whole"):
        check_filters(fl_ctx, hospital=True)


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


CLIENT, SERVER = "config_fed_client.json", "config_fed_server.json"


@pytest.mark.parametrize(
    ("file", "key", "path"),
    [
        (CLIENT, "task_data_filters", SVT),
        (SERVER, "task_result_filters", PERCENTILE),
        (CLIENT, "task_result_filters", "nvflare.app_opt.he.model_encryptor.HEModelEncryptor"),
        (CLIENT, "task_result_filters", "nvflare.app_common.filters.convert_weights.ConvertWeights"),
        (SERVER, "task_data_filters", "nvflare.app_opt.pt.quantization.quantizer.ModelQuantizer"),
    ],
)
def test_a_job_that_names_one_is_refused_by_name(
    make_job: Make, tmp_path: Path, file: str, key: str, path: str
) -> None:
    """SVTPrivacy in a job gave Dice 0.000 and no event."""
    with pytest.raises(ConfigError, match=rf"{file}: the filter '{path}' (was not written|can act on what a hosp)"):
        load_job(naming(path, file, key, make_job(), tmp_path / "job"))


def test_a_job_may_put_one_at_the_hospitals(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """And is not run without it by what is not FLARE, nor copied without it."""
    job = load_job(naming(PERCENTILE, CLIENT, "task_result_filters", make_job(), tmp_path / "job"))
    assert isinstance(job, Job) and job.filters == (PERCENTILE,)
    assert [one for one in leaves_of(job) if one.when == "train" and PERCENTILE in one.meaning]
    with pytest.raises(ConfigError, match=f"FLARE alone can apply .{PERCENTILE}"):
        simulate(job, table_sites, tmp_path / "results", tmp_path / "home")
    with pytest.raises(MedPFLError, match=f"would be lost in a copy of it: {PERCENTILE}"):
        write_job(job, tmp_path / "copy")


def test_a_job_with_a_codec_names_none(make_job: Make, tmp_path: Path) -> None:
    job = replace(make_job(), codecs=Codecs(None, CER(0.1)))
    with pytest.raises(ConfigError, match=f"'{SVT}' acts on updates as differences, and '.*EncodeUpdate' takes whole"):
        load_job(naming(SVT, CLIENT, "task_result_filters", job, tmp_path / "job"))


@pytest.mark.harness
def test_what_a_network_says_of_public_data_is_no_difference(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    for file in table_sites.values():
        content = yaml.safe_load(file.read_text())
        content["datasets"]["shared"] = {**content["datasets"]["blood"], "files": ["anna.csv"], "public": True}
        file.write_text(yaml.safe_dump(content))
    method = DSFL(public="shared", lr=0.05, batch_size=8)
    scope = in_scope(PercentilePrivacy(), tmp_path).get_prop(FLContextKey.SCOPE_OBJECT)
    job = make_job(rounds=1, method=method, mixers=method.components(), min_clients=4)
    harness = Harness(job, table_sites, tmp_path / "flare", scopes={"anna": scope}).run()
    assert harness.engine.panic is not None
    assert f"anna failed: the filter '{PERCENTILE}' acts on differences of weights" in harness.engine.panic
    assert "'public::public.values'" in harness.engine.panic


def test_as_flare_builds_them_of_a_kits_files(make_job: Make, tmp_path: Path) -> None:
    """A hospital's privacy.json, and a job whose filters its allow list takes by name."""
    kit = tmp_path / HOSPITAL
    for folder in ("startup", "local"):
        (kit / folder).mkdir(parents=True)
    (kit / "startup" / "fed_client.json").write_text("{}")
    for file, content in (("resources", {}), ("authorization", {"permissions": {}})):
        (kit / "local" / f"{file}.json.default").write_text(json.dumps(content))
    allow(kit, [SVT])
    strict = {"name": "strict", "task_result_filters": [{"path": PERCENTILE, "args": {"percentile": 30}}]}
    (kit / "local" / "privacy.json").write_text(json.dumps({"scopes": [strict], "default_scope": "strict"}))
    job = naming(SVT, CLIENT, "task_result_filters", make_job(), tmp_path / "job")
    assert FILES[HOSPITAL] == CLIENT
    fl_ctx = context(kit)
    scope = create_privacy_manager(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT), names_only=False).get_scope(None)
    fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True)
    fl_ctx.set_prop(FLContextKey.RUNNER, configured(kit, job), private=True)
    check_filters(fl_ctx, hospital=True)
    assert [name_of(one) for one in acting_on("train", fl_ctx)] == [PERCENTILE, SVT]
    assert [name_of(one) for one in acting_on("finish", fl_ctx)] == [PERCENTILE]


def test_a_job_may_name_one_that_knows_our_messages(make_job: Make, tmp_path: Path) -> None:
    known, unknown = f"{__name__}.Rounded", f"{__name__}.Engine"
    assert load_job(naming(known, "config_fed_client.json", "task_result_filters", make_job(), tmp_path / "one"))
    with pytest.raises(ConfigError, match="Engine' was not written for MedPFL's messages"):
        load_job(naming(unknown, "config_fed_client.json", "task_result_filters", make_job(), tmp_path / "other"))
