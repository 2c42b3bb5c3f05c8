# SPDX-License-Identifier: Apache-2.0
"""The server's side of a job, without a transport: what to send to whom, mixing, best rounds, checkpoints, records.

The caller (FLARE's controller, or ``simulate``) carries the messages:

    messages = c.init_messages(); c.take_init(replies)
    for round in range(c.done + 1, rounds + 1):
        messages = c.train_messages(round); c.take_train(round, replies)
    messages = c.validate_messages(); c.take_validation(replies)
    messages = c.finish_messages(); c.take_final(replies)
"""

import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from medpfl import store
from medpfl.core.errors import MedPFLError, RefusedUpdate
from medpfl.core.mixers import Mixer, RoundInfo
from medpfl.core.mixing import Matrix
from medpfl.rounds.messages import (
    Message,
    byte_count,
    check_metrics,
    check_update,
    digest_of,
    fingerprint,
    flatten,
    number,
    table,
    unflatten,
)
from medpfl.rounds.record import Record
from medpfl.rounds.settings import Settings

SHARED = "*"
"""In a checkpoint, the owner of a model that all hospitals share."""


_INIT_KEYS = {"sizes", "config", "personalised", "score", "classes", "versions"}


class QuorumLost(MedPFLError):
    """Fewer hospitals answered than the job needs."""


class Coordinator:
    """State of a job at the server.

    Args:
        settings: the controller's arguments.
        mixers: slot to server component, in the settings' order.
        job: the job's name.
        roster: the hospitals' names.
        min_sites: how many hospitals must answer for a round to count.
        home: folder for checkpoints, outside FLARE's run folder.
        results: folder for what the job leaves behind.
    """

    def __init__(
        self,
        settings: Settings,
        mixers: Mapping[str, Mixer],
        job: str,
        roster: list[str],
        min_sites: int,
        home: Path,
        results: Path,
    ):
        self.settings, self.mixers, self.job = settings, dict(mixers), job
        self.roster = tuple(sorted(roster))
        self.min_sites = min_sites
        self.travelling = [slot for slot, mixer in self.mixers.items() if mixer.travels]
        self.record = Record(job, self.roster, results)
        self.done = 0
        """Rounds that are finished."""
        self.joined: list[str] = []
        """Hospitals that passed the init task; the others take no part."""
        self.sizes: dict[str, dict[str, int]] = {}
        self.best: dict[str, dict[str, Any]] = {}
        self._home = home
        self._log = logging.getLogger(__name__)
        self._stack: dict[str, list[dict[str, Any]]] = {}
        self._scores: dict[str, dict[str, float]] = {}
        for mixer in self.mixers.values():
            mixer.check(self.roster)

    # -- init ---------------------------------------------------------------------------------------------------------

    def init_messages(self) -> dict[str, Message]:
        header = {
            "task": "init",
            "job": self.job,
            "roster": list(self.roster),
            "seed": self.settings.seed,
            "threads": self.settings.threads,
            "slots": {slot: mixer.travels for slot, mixer in self.mixers.items()},
        }
        return {site: Message(dict(header)) for site in self.roster}

    def take_init(self, replies: Mapping[str, Message]) -> None:
        """Take the first hospital's tensors as the start; hospitals whose models differ take no part.

        Raises:
            QuorumLost: fewer than ``min_sites`` hospitals fit together.
        """
        first: tuple[str, dict[str, Any]] | None = None
        for site in sorted(replies):
            header, slots = replies[site].header, replies[site].slots
            missing = sorted(_INIT_KEYS - header.keys())
            if missing:
                self._refuse(site, f"{site} did not say its '{missing[0]}'")
                continue
            if first is None:
                first = site, header
                self._start, mark = slots, fingerprint(slots)
            elif fingerprint(slots) != mark:
                self._refuse(site, self._difference(site, replies[site], first[0], replies[first[0]]))
                continue
            elif header["score"] != first[1]["score"] or header["classes"] != first[1]["classes"]:
                self._refuse(
                    site,
                    f"{site} learns {header['classes']} by {header['score']}, {first[0]} learns "
                    f"{first[1]['classes']} by {first[1]['score']}",
                )
                continue
            self.joined.append(site)
            self.sizes[site] = header["sizes"]
        if first is None or len(self.joined) < self.min_sites:
            raise QuorumLost(
                f"only {len(self.joined)} of {len(self.roster)} hospitals are ready "
                f"({', '.join(self.joined) or 'none'}); the job needs {self.min_sites}{self._reasons(0)}"
            )
        self.expected = table(self._start)
        self.score: str = first[1]["score"]
        self.record.about.update(
            personalised=first[1]["personalised"],
            score=self.score,
            classes=first[1]["classes"],
            sizes=self.sizes,
            versions={site: replies[site].header["versions"] for site in self.joined},
            settings=dataclasses.asdict(self.settings),
            components={slot: repr(mixer) for slot, mixer in self.mixers.items()},
        )
        # The roster is part of the run's key: a run with other hospitals neither resumes this one nor overwrites it.
        configs = sorted({replies[site].header["config"] for site in self.joined})
        components = self.record.about["components"]
        self.run = digest_of([self.job, dataclasses.asdict(self.settings), components, list(self.roster), configs])
        self._checkpoint = self._home / "state" / self.run / "server.safetensors"
        if not self._resume():
            self._tell_of_other_runs()
            for slot in self.travelling:
                self.mixers[slot].start(self._start[slot])
                self._stack[slot] = [{k: t.clone() for k, t in self._start[slot].items()} for _ in self.roster]
        del self._start

    def _difference(self, site: str, theirs: Message, first: str, reference: Message) -> str:
        got, expected = table(theirs.slots), table(reference.slots)
        for slot in {**expected, **got}:
            here, there = got.get(slot, {}), expected.get(slot, {})
            for key in sorted(here.keys() | there.keys()):
                if here.get(key) != there.get(key):
                    return (
                        f"{site}: entry '{slot}::{key}' is {here.get(key, 'missing')}, at {first} it is "
                        f"{there.get(key, 'missing')}"
                    )
        versions = (theirs.header["versions"].get("torch"), reference.header["versions"].get("torch"))
        return f"{site} starts from other initial weights than {first} with the same shapes (torch {versions})"

    def _tell_of_other_runs(self) -> None:
        """Say so when an unfinished run of this job, with other hospitals or settings, is kept and not taken up."""
        for path in sorted((self._home / "state").glob("*/server.safetensors")):
            if path == self._checkpoint:
                continue
            try:
                meta = store.read_meta(path)
            except MedPFLError:
                self.record.event(0, "server", f"the checkpoint of run {path.parent.name} is unreadable and left alone")
                continue
            if not meta["finished"]:
                who = f"round {meta['done']}; {', '.join(meta['roster'])}"
                text = (
                    f"an unfinished run of this job ({who}) is kept and not resumed: its hospitals or settings differ"
                )
                self.record.event(0, "server", text)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def train_messages(self, round_number: int, sites: list[str]) -> dict[str, Message]:
        return {site: self._message("train", round_number, site) for site in sites}

    def take_train(self, round_number: int, replies: Mapping[str, Message], started: float | None = None) -> list[str]:
        """Mix what the hospitals sent and save the checkpoint; returns the hospitals whose updates were mixed.

        Args:
            started: ``time.monotonic()`` when the round began, to write down how long it took.

        Raises:
            QuorumLost: fewer than ``min_sites`` usable updates came; the checkpoint of the last round stands.
        """
        accepted: dict[str, Message] = {}
        for site in sorted(replies):
            try:
                check_update(site, replies[site].slots, self.expected)
                check_metrics(site, replies[site].header.get("metrics"))
            except RefusedUpdate as error:
                self.record.event(round_number, site, f"update refused: {error}")
                self._log.warning("round %d: update refused: %s", round_number, error)
                continue
            accepted[site] = replies[site]
        if len(accepted) < self.min_sites:
            raise QuorumLost(
                f"round {round_number}: {len(accepted)} of {len(self.roster)} hospitals sent a usable update "
                f"({', '.join(accepted) or 'none'}); the job needs {self.min_sites}{self._reasons(round_number)}"
            )
        info = RoundInfo(
            self.roster,
            np.array([float(self.sizes.get(site, {}).get("train", 0)) for site in self.roster]),
            tuple(site in accepted for site in self.roster),
        )
        matrices: dict[str, Matrix] = {}
        for slot in self.travelling:
            # Mixing is in place. An absent hospital's copy is cloned first: it may still be downloading the old one.
            stack = [
                accepted[site].slots[slot] if site in accepted else {key: t.clone() for key, t in kept.items()}
                for site, kept in zip(self.roster, self._stack[slot], strict=True)
            ]
            self._stack[slot], matrix = self.mixers[slot].mix(stack, info)
            if matrix is not None:
                matrices[slot] = matrix
        for site, message in accepted.items():
            self._take_scores(site, message.header["metrics"])
            self._take_notes(site, round_number, message)
            self.record.training(round_number, site, message.header)
            self.record.traffic(round_number, site, sent=self.payload_bytes(), received=byte_count(message.slots))
        self._choose_best(round_number - 1)
        seconds = time.monotonic() - started if started is not None else 0.0
        self.record.round(round_number, matrices, seconds)
        self.done = round_number
        self._save()
        return list(accepted)

    def validate_messages(self, sites: list[str]) -> dict[str, Message]:
        return {site: self._message("validate", self.done, site) for site in sites}

    def take_validation(self, replies: Mapping[str, Message]) -> None:
        for site, lines in self._metrics_of(replies):
            self._take_scores(site, lines)
        self._choose_best(self.done)

    def finish_messages(self, sites: list[str]) -> dict[str, Message]:
        messages = {}
        for site in sites:
            header = self._header("finish", self.done)
            messages[site] = Message({**header, "finetune": self.settings.finetune})
        return messages

    def take_final(self, replies: Mapping[str, Message]) -> None:
        """Record the test results and write everything the job leaves behind at the server."""
        for site, lines in self._metrics_of(replies):
            for line in lines:
                self.record.metric(site, line)
            self._take_notes(site, self.done, replies[site])
        self.record.finish(self.best, {slot: self._compact(slot) for slot in self.travelling})
        self._save(finished=True)

    def _metrics_of(self, replies: Mapping[str, Message]) -> list[tuple[str, list[dict[str, Any]]]]:
        """Well-formed metric lines by hospital, sorted; malformed ones are noted and left out."""
        found = []
        for site in sorted(replies):
            lines = replies[site].header.get("metrics")
            try:
                check_metrics(site, lines)
            except RefusedUpdate as error:
                self.refuse(site, self.done, str(error))
                continue
            found.append((site, lines))
        return found

    def _take_notes(self, site: str, round_number: int, message: Message) -> None:
        for note in message.header.get("notes") or []:
            self.record.event(round_number, site, str(note))

    def refuse(self, site: str, round_number: int, reason: str) -> None:
        """Note that a hospital answered with an error."""
        self.record.event(round_number, site, reason)
        self._log.warning("round %d: %s: %s", round_number, site, reason)

    def _refuse(self, site: str, reason: str) -> None:
        self.refuse(site, 0, f"takes no part: {reason}")

    def _reasons(self, round_number: int) -> str:
        """What kept the others from answering, for the sentence that ends the job."""
        found = [f"{e['site']} {e['event']}" for e in self.record.events if e["round"] == round_number]
        return "".join(f"; {reason}" for reason in found)

    def _header(self, task: str, round_number: int) -> dict[str, Any]:
        return {"task": task, "run": self.run, "round": round_number, "rounds": self.settings.rounds, "best": self.best}

    def _message(self, task: str, round_number: int, site: str) -> Message:
        index = self.roster.index(site)
        slots = {slot: self._stack[slot][index] for slot in self.travelling}
        return Message(self._header(task, round_number), slots)

    def payload_bytes(self) -> int:
        """Bytes of the tensors that one hospital is sent a round."""
        return byte_count({slot: self._stack[slot][0] for slot in self.travelling})

    # -- best round ---------------------------------------------------------------------------------------------------

    def _take_scores(self, site: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self.record.metric(site, line)
            value = number(line["metrics"].get(self.score))
            if value is not None:
                self._scores.setdefault(line["model"], {})[site] = value

    def _choose_best(self, round_number: int) -> None:
        """The best unweighted mean validation score so far, model by model; a hospital that did not answer counts
        with its last known score, ties go to the earlier round."""
        if round_number < 1:
            return
        for model, scores in self._scores.items():
            mean = float(np.mean([scores[site] for site in sorted(scores)]))
            self.record.mean_score(round_number, model, mean)
            if model not in self.best or mean > self.best[model]["score"]:
                self.best[model] = {"round": round_number, "score": mean}

    # -- checkpoint ---------------------------------------------------------------------------------------------------

    def _compact(self, slot: str) -> dict[str, dict[str, Any]]:
        """Owner to state; one entry for everybody where all hospitals have the same."""
        states = self._stack[slot]
        same = all((state[key] == states[0][key]).all() for state in states[1:] for key in states[0])
        return {SHARED: states[0]} if same else dict(zip(self.roster, states, strict=True))

    def _save(self, finished: bool = False) -> None:
        tensors = {}
        for slot in self.travelling:
            tensors.update({f"{slot}/{owner}": state for owner, state in self._compact(slot).items()})
            tensors[f"mixer:{slot}/"] = self.mixers[slot].state()
        meta = {
            "done": self.done,
            "finished": finished,
            "roster": list(self.roster),
            "best": self.best,
            "scores": self._scores,
            "record": self.record.dump(),
            "saved": time.time(),
        }
        store.save(self._checkpoint, flatten(tensors), meta)

    def _resume(self) -> bool:
        """Take up an unfinished run of the same job, settings, seed and roster; a finished one starts fresh."""
        if not self._checkpoint.exists():
            return False
        tensors, meta = store.read(self._checkpoint)
        if meta["finished"]:
            return False
        slots = unflatten(tensors)
        for slot in self.travelling:
            shared = slots.get(f"{slot}/{SHARED}")
            self._stack[slot] = [
                {key: t.clone() for key, t in (shared or slots[f"{slot}/{site}"]).items()} for site in self.roster
            ]
            self.mixers[slot].load_state(slots.get(f"mixer:{slot}/", {}))
        self.done, self.best, self._scores = meta["done"], meta["best"], meta["scores"]
        self.record.restore(meta["record"])
        self.record.event(self.done, "server", f"resumed after round {self.done} of an unfinished run")
        self._log.info("resumed after round %d of an unfinished run", self.done)
        return True
