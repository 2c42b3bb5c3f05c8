# SPDX-License-Identifier: Apache-2.0
"""A job that only evaluates: one given model, tested at every hospital, which answers with metrics and nothing else.

One exchange: the server sends the model's tensors; a hospital rebuilds the networks from the job's own configuration
(so that the classes are those its allow list has passed), tests them on its test split and keeps the predictions.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel

import medpfl
from medpfl.component import Spec, build, class_paths
from medpfl.core.errors import ConfigError, DataError, MedPFLError, RefusedUpdate
from medpfl.core.tied import load_own_state
from medpfl.data.meaning import other_inputs
from medpfl.data.policy import Policy
from medpfl.data.site_file import SiteFile
from medpfl.data.target import listed
from medpfl.deployed.card import evaluation_card
from medpfl.deployed.evaluate import evaluate_test, write_cases, write_text
from medpfl.deployed.model_file import Recipe, build_networks, differing_entry, read_model
from medpfl.job.given import check_no_history, check_recipe
from medpfl.job.settings import EvaluationSettings
from medpfl.methods.contract import Method
from medpfl.methods.joint_study import Study
from medpfl.methods.panels import AtServer
from medpfl.results.callbacks import Callback, Report, ResultFiles
from medpfl.results.line import MetricLine
from medpfl.results.record import Record
from medpfl.results.schema import AboutEvaluation, Given, number
from medpfl.rounds.announcing import versions
from medpfl.rounds.hospital import policy, withholding
from medpfl.rounds.messages import Message, byte_count
from medpfl.rounds.protocol.replies import EvaluateReply, Reply
from medpfl.rounds.protocol.requests import EvaluateRequest
from medpfl.rounds.server.answers import answers, check_metrics, check_within, no_tensors
from medpfl.rounds.server.quorum import Quorum
from medpfl.tasks.contract import Task
from medpfl.tasks.metrics.measure import Measure

GIVEN: Literal["given"] = "given"
"""The model's slot on the wire, and its choice of round in the results."""


class EvaluationCoordinator:
    """The server's side.

    Args:
        settings: the controller's arguments.
        job: the job's name.
        roster: the hospitals' names.
        min_sites: how many hospitals must answer with metrics.
        model: the given model's file.
        results: folder for what the job leaves behind.
        trackers: are told of the job's end, beside what writes ``results``.

    Raises:
        MedPFLError: the model's file is broken, altered, or says more than a job may.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        job: str,
        roster: list[str],
        min_sites: int,
        model: Path,
        results: Path,
        trackers: Sequence[Callback] = (),
    ):
        self.settings, self.job = settings, job
        self.roster = tuple(sorted(roster))
        self.results = results
        self.record = Record(job, self.roster, [ResultFiles(results), Report(results)], trackers)
        self.record.begin(results)
        self._quorum = Quorum(self.record, self.roster, min_sites)
        self._tensors, self._meta = read_model(model)
        check_no_history(self._meta)
        self._task = task_of(self._meta.recipe)

    def messages(self) -> dict[str, Message[EvaluateRequest]]:
        return {site: Message(self._asked(), {GIVEN: self._tensors}) for site in self.roster}

    def _asked(self) -> EvaluateRequest:
        meta = self._meta
        return EvaluateRequest(job=self.job, threads=self.settings.threads, recipe=meta.recipe, sha256=meta.sha256)

    def take(self, replies: Mapping[str, Message[Reply]]) -> None:
        """Record the metrics and write everything the job leaves behind at the server.

        Raises:
            QuorumLost: fewer than ``min_sites`` hospitals answered with metrics.
        """
        recipe = self._meta.recipe
        sizes: dict[str, dict[str, int]] = {}
        packages: dict[str, dict[str, str]] = {}
        measures: list[dict[str, Measure]] = []
        studies: dict[str, BaseModel] = {}

        task = self._task
        ranges = {metric.name: metric.range for metric in task.tested} if task else None

        def check(site: str, reply: Message[EvaluateReply]) -> None:
            no_tensors(site, reply)
            if ranges is not None:
                check_metrics(reply.header.metrics[0], ranges)
            if reply.header.study is not None:
                found = method_of(recipe).read_study(site, reply.header.study)
                if task is not None and ranges is not None and isinstance(found, Study):
                    for score in found.scores():
                        check_within("score in the study of the model", score, ranges[task.score])
                studies[site] = found

        def refuse(site: str, reason: str) -> None:
            self.refuse(site, 0, f"answer refused: {reason}")

        for site, message in answers(self._asked(), EvaluateReply, replies, None, check, refuse).items():
            sizes[site], packages[site] = {"test": message.header.cases}, message.header.versions
            measures.append(message.header.measures)
            self.record.metric(message.header.metrics[0].tested_at(site))
            self.record.traffic(0, site, sent=byte_count({GIVEN: self._tensors}), received=0)
        self._quorum.check(0, sizes, "evaluated the model")
        about = AboutEvaluation(
            classes=recipe.classes,
            metrics=task.measures if task else max(measures, key=measures.count),  # else as most hospitals say
            sizes=sizes,
            versions=packages,
            settings=dataclasses.asdict(self.settings),
            components={},
            evaluated=Given(
                model=recipe.deployed,
                method=recipe.method,
                task=recipe.task,
                parameters=self._meta.parameters,
                sha256=self._meta.sha256,
            ),
            study={site: found.model_dump(mode="json") for site, found in studies.items()},
            panels=method_of(recipe).report_panels(AtServer(studies=studies)) if studies else [],
        )
        self.record.finish(about, {}, {})

    def refuse(self, site: str, round_number: int, reason: str) -> None:
        """Note that a hospital answered with an error."""
        self._quorum.refuse(site, round_number, reason)


def method_of(recipe: Recipe) -> Method:
    """The given model's method, which knows what a study of it may say.

    Raises:
        RefusedUpdate: it is not this package's: the server imports no other class that a job names.
    """
    if outside := _outside(recipe.method):
        raise RefusedUpdate(f"this server reads no study of '{outside}', which is not a class of MedPFL's")
    method: Method = build(recipe.method, Method, "method")
    return method


def task_of(recipe: Recipe) -> Task | None:
    """The given model's task, which knows what its metrics may say; None: it is not this package's.

    Raises:
        ConfigError: it cannot be built.
    """
    task: Task | None = None if _outside(recipe.task) else build(recipe.task, Task, "task")
    return task


def _outside(spec: Spec) -> str | None:
    """The first class of a configuration that is of another package, which the server does not import."""
    return next((path for path in class_paths(spec) if not path.startswith(f"{medpfl.__name__}.")), None)


def evaluate_given(
    message: Message[EvaluateRequest],
    site: str,
    method: Method,
    task: Task,
    site_file: SiteFile,
    home: Path,
    device: torch.device,
) -> Message[EvaluateReply]:
    """A hospital's side: test the given model and keep a card (.md) and the cases (.csv) in ``home/evaluation``.

    Args:
        method: the job's own, as is ``task``; the message must describe the same.

    Raises:
        ConfigError: the model does not fit the job or this hospital's data.
        MedPFLError: likewise, where the policy keeps here what these are; or the data cannot be read, or the test split
            is empty.
    """
    header = message.header
    torch.set_num_threads(header.threads)
    recipe = header.recipe
    check_recipe(recipe, method, task)
    tensors = message.slots.get(GIVEN, {})
    networks = build_networks(method, task, recipe, sum(tensor.numel() for tensor in tensors.values()))
    if difference := differing_entry(networks, tensors):
        raise ConfigError(f"the given model does not fit its configuration: {difference}")
    data = task.load(site_file)
    policy.check_scored(site_file.policy, data)
    shape = list(data.splits["test"].inputs.shape[1:])
    if shape != recipe.input_shape:
        said = f"the given model takes inputs of shape {recipe.input_shape}, the data here have"
        raise _differ(site_file.policy, "recipe", f"{said} {shape}", f"{said} another one")
    if data.class_names != recipe.classes:
        said = f"the given model's classes are {listed(recipe.classes)}; the data here have"
        raise _differ(site_file.policy, "classes", f"{said} {listed(data.class_names)}", f"{said} others")
    meaning = data.preparation.meaning() if data.preparation else []
    if differs := other_inputs(meaning, "this hospital's", recipe.meaning, "the given model's"):
        said = "the inputs of the given model mean something else than those of the data here"
        raise _differ(site_file.policy, "recipe", differs, said)
    load_own_state(networks, tensors)
    evaluation, found = evaluate_test(method, recipe.deployed, networks.to(device), task, data, device)
    values = {metric: number(value) for metric, value in evaluation.metrics.items()}
    cases = len(data.splits["test"].names)
    folder = home / "evaluation"
    write_text(
        folder / f"{recipe.deployed}.md",
        evaluation_card(recipe, header.sha256, site, cases, values, found, task.measures, evaluation.threshold),
    )
    write_cases(folder / f"{recipe.deployed}.csv", evaluation)
    line = MetricLine(model=recipe.deployed, split="test", round=0, metrics=values, choice=GIVEN)
    told = method.study(networks, task, data, device)
    study = None if told is None else told.model_dump(mode="json")
    return Message(
        EvaluateReply(metrics=(line,), measures=task.measures, cases=cases, versions=versions(), study=study)
    )


def _differ(policy: Policy, line: str, differs: str, told: str) -> MedPFLError:
    """That the data here are others than the model's: ``told``, where the policy keeps here what they are, in the
    ``line`` of a training job's first answer."""
    kept = withholding.refused(policy, "init", line)
    return DataError(f"{differs}; {kept}", public=told) if kept else ConfigError(differs)
