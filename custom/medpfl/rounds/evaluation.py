# SPDX-License-Identifier: Apache-2.0
"""A job that only evaluates: one given model, tested at every hospital, which answers with metrics and nothing else.

One exchange: the server sends the model's tensors; a hospital rebuilds the networks from the job's own configuration
(so that the classes are those its allow list has passed), tests them on its test split and keeps the predictions.
"""

import dataclasses
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue, ValidationError

import medpfl
from medpfl.component import build, class_paths, spec_of
from medpfl.core.errors import ConfigError, RefusedUpdate
from medpfl.data.site_file import SiteFile
from medpfl.deployed.card import evaluation_card
from medpfl.deployed.evaluate import evaluate_test, write_cases, write_text
from medpfl.deployed.model_file import ModelMeta, Recipe, build_networks, differing_entry, read_model
from medpfl.methods.base import Method
from medpfl.results.callbacks import Callback, Report, ResultFiles
from medpfl.results.record import Record
from medpfl.results.schema import AboutEvaluation, FinalLine, Given, number
from medpfl.rounds.coordinator import QuorumLost
from medpfl.rounds.messages import Message, byte_count, digest_of, metric_lines
from medpfl.rounds.settings import EvaluationSettings
from medpfl.tasks.base import Task

GIVEN = "given"
"""The model's slot on the wire, and its choice of round in the results."""
MODEL_FILE = "model.safetensors"
"""Where a job holds the given model: this name in ``app/config``."""


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
        self.settings, self.job, self.min_sites = settings, job, min_sites
        self.roster = tuple(sorted(roster))
        self.results = results
        self.record = Record(job, self.roster, [ResultFiles(results), Report(results)], trackers)
        self._log = logging.getLogger(__name__)
        self._tensors, self._meta = read_model(model)
        check_no_history(self._meta)

    def messages(self) -> dict[str, Message]:
        header = {
            "task": "evaluate",
            "job": self.job,
            "threads": self.settings.threads,
            "recipe": self._meta.recipe.model_dump(mode="json"),
            "sha256": self._meta.sha256,
        }
        return {site: Message(dict(header), {GIVEN: self._tensors}) for site in self.roster}

    def take(self, replies: Mapping[str, Message]) -> None:
        """Record the metrics and write everything the job leaves behind at the server.

        Raises:
            QuorumLost: fewer than ``min_sites`` hospitals answered with metrics.
        """
        sizes, versions = {}, {}
        studies: dict[str, JsonValue] = {}
        recipe = self._meta.recipe
        for site in sorted(replies):
            header = replies[site].header
            try:
                line = _check_reply(site, replies[site])
                if "study" in header:
                    studies[site] = method_of(recipe).read_study(site, header["study"]).model_dump(mode="json")
            except RefusedUpdate as error:
                self.refuse(site, 0, str(error))
                continue
            sizes[site], versions[site] = {"test": header["cases"]}, header["versions"]
            self.record.metric(line)
            self.record.traffic(0, site, sent=byte_count({GIVEN: self._tensors}), received=0)
        if len(sizes) < self.min_sites:
            reasons = "".join(f"; {event.site} {event.event}" for event in self.record.events)
            raise QuorumLost(
                f"{len(sizes)} of {len(self.roster)} hospitals evaluated the model ({', '.join(sizes) or 'none'}); "
                f"the job needs {self.min_sites}{reasons}"
            )
        about = AboutEvaluation(
            classes=recipe.classes,
            sizes=sizes,
            versions=versions,
            settings=dataclasses.asdict(self.settings),
            components={},
            evaluated=Given(
                model=recipe.deployed,
                method=recipe.method,
                task=recipe.task,
                parameters=self._meta.parameters,
                sha256=self._meta.sha256,
            ),
            study=studies,
        )
        self.record.finish(about, {}, {})

    def refuse(self, site: str, round_number: int, reason: str) -> None:
        """Note that a hospital answered with an error."""
        self.record.event(round_number, site, reason)
        self._log.warning("%s: %s", site, reason)


def method_of(recipe: Recipe) -> Method:
    """The given model's method, which knows what a study of it may say.

    Raises:
        RefusedUpdate: it is not this package's: the server imports no other class that a job names.
    """
    outside = [path for path in class_paths(recipe.method) if not path.startswith(f"{medpfl.__name__}.")]
    if outside:
        raise RefusedUpdate(f"this server reads no study of '{outside[0]}', which is not a class of MedPFL's")
    method: Method = build(recipe.method, Method, "method")
    return method


def _check_reply(site: str, reply: Message) -> FinalLine:
    """One metric line, a number of cases, versions, and no tensors.

    Raises:
        RefusedUpdate: naming the hospital.
    """
    header = reply.header
    lines = metric_lines(site, header.get("metrics"), FinalLine)
    if len(lines) != 1:
        raise RefusedUpdate(f"{site}: expected the metrics of one model, got {len(lines)}")
    if type(header.get("cases")) is not int or not isinstance(header.get("versions"), dict):
        raise RefusedUpdate(f"{site}: its answer lacks the number of cases or the versions")
    if reply.slots:
        raise RefusedUpdate(f"{site}: it sent tensors, and this job asks for metrics only")
    return lines[0]


def evaluate_given(
    message: Message,
    site: str,
    method: Method,
    task: Task,
    site_file: SiteFile,
    home: Path,
    device: torch.device,
) -> Message:
    """A hospital's side: test the given model and keep a card (.md) and the cases (.csv) in ``home/evaluation``.

    Args:
        method: the job's own, as is ``task``; the message must describe the same.

    Raises:
        ConfigError: the model does not fit the job or this hospital's data.
        MedPFLError: the data cannot be read, or the test split is empty.
    """
    header = message.header
    torch.set_num_threads(header["threads"])
    try:
        recipe = Recipe.model_validate(header["recipe"])
    except ValidationError as error:
        raise ConfigError(f"what the server says of the given model is broken: {error.errors()[0]['msg']}") from error
    check_recipe(recipe, method, task)
    networks = build_networks(method, task, recipe)
    tensors = message.slots.get(GIVEN, {})
    if difference := differing_entry(networks, tensors):
        raise ConfigError(f"the given model does not fit its configuration: {difference}")
    data = task.load(site_file)
    shape = list(data.splits["test"].inputs.shape[1:])
    if shape != recipe.input_shape:
        raise ConfigError(f"the given model takes inputs of shape {recipe.input_shape}, the data here have {shape}")
    if data.class_names != recipe.classes:
        raise ConfigError(
            f"the given model's classes are {', '.join(recipe.classes)}; the data here have "
            f"{', '.join(data.class_names)}"
        )
    networks.load_state_dict(tensors)
    evaluation, found = evaluate_test(method, recipe.deployed, networks.to(device), task, data, device)
    values = {metric: number(value) for metric, value in evaluation.metrics.items()}
    cases = len(data.splits["test"].names)
    folder = home / "evaluation"
    write_text(folder / f"{recipe.deployed}.md", evaluation_card(recipe, header["sha256"], site, cases, values, found))
    write_cases(folder / f"{recipe.deployed}.csv", evaluation)
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "medpfl": medpfl.__version__,
    }
    line = {"model": recipe.deployed, "split": "test", "round": 0, "metrics": values, "choice": GIVEN}
    reply = {"metrics": [line], "cases": cases, "versions": versions}
    if (told := method.study(networks, task, data, device)) is not None:
        reply["study"] = told.model_dump(mode="json")
    return Message(reply)


def check_no_history(meta: ModelMeta) -> None:
    """A model that goes to other hospitals must not tell of the one that made it.

    Raises:
        ConfigError: it does.
    """
    if meta.history is not None:
        raise ConfigError(
            f"the job's {MODEL_FILE} says which hospital made it, from how many cases and with which results; "
            "'medpfl evaluation-job' writes a job without that"
        )


def check_recipe(recipe: Recipe, method: Method, task: Task) -> None:
    """The model's file and the job's configuration must name the same method and task.

    Raises:
        ConfigError: naming which of them differs.
    """
    for what, own, given in (("method", method, recipe.method), ("task", task, recipe.task)):
        if digest_of(spec_of(own)) != digest_of(given):
            raise ConfigError(
                f"the job's configuration and its {MODEL_FILE} name different {what}s: {json.dumps(spec_of(own))} and "
                f"{json.dumps(given)}"
            )
