# SPDX-License-Identifier: Apache-2.0
"""What happened in a job, written as it happens: metrics.jsonl, mixing.npz, bytes.json, summary.json, the report."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import medpfl
from medpfl import store
from medpfl.core.codecs.dadaquant import hospital_scales
from medpfl.core.errors import MedPFLError
from medpfl.core.mixing import Matrix
from medpfl.rounds.messages import number


class Record:
    """Collects a job's results at the server and writes them into ``folder``.

    Raises:
        MedPFLError: the folder cannot be written.
    """

    def __init__(self, job: str, roster: tuple[str, ...], folder: Path):
        self.job, self.roster, self.folder = job, roster, folder
        self.about: dict[str, Any] = {}
        self.lines: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.bytes: list[dict[str, Any]] = []
        self.matrices: dict[str, Matrix] = {}
        self._written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.jsonl").write_text("")
        except OSError as error:
            raise MedPFLError(f"cannot write the results folder {folder}: {error.strerror}") from error

    def metric(self, site: str, line: dict[str, Any]) -> None:
        """One evaluation: which model, of which round, on which split of which hospital."""
        values = {name: number(value) for name, value in line["metrics"].items()}
        self.lines.append({"site": site, **line, "metrics": values})

    def mean_score(self, round_number: int, model: str, value: float) -> None:
        line = {"site": "mean", "model": model, "split": "validation", "round": round_number}
        self.lines.append({**line, "metrics": {self.about["score"]: value}})

    def training(self, round_number: int, site: str, header: dict[str, Any]) -> None:
        losses = header.get("loss")
        line = {"site": site, "split": "train", "round": round_number, "seconds": number(header.get("seconds"))}
        self.lines.append({**line, "loss": losses if isinstance(losses, dict) else {}})

    def progress(self, sites: list[str]) -> dict[str, dict[str, Any]]:
        """For codecs that adapt (``core.codecs.Progress``): the losses so far, and each hospital's scale."""
        sizes = {site: found["train"] for site, found in self.about["sizes"].items()}
        scales = dict(zip(sizes, hospital_scales(list(sizes.values())), strict=True))
        losses = self._mean_losses()
        return {site: {"losses": losses, "scale": scales[site]} for site in sites}

    def _mean_losses(self) -> list[float]:
        """Of every round that was trained, the mean training loss over hospitals and networks, NaN left out."""
        found: dict[int, list[float]] = {}
        for line in self.lines:
            if line["split"] == "train":
                losses = [value for value in line["loss"].values() if isinstance(value, float) and np.isfinite(value)]
                found.setdefault(line["round"], []).extend(losses)
        return [float(np.mean(losses)) for _, losses in sorted(found.items()) if losses]

    def traffic(
        self, round_number: int, site: str, sent: int, received: int, encoded: tuple[int, int] | None = None
    ) -> None:
        """Bytes of the tensors in both directions, added up over a round's exchanges.

        Args:
            encoded: what travelled where there is a codec; without one, it is the tensors as they are.
        """
        travelled = encoded or (sent, received)
        for direction, raw, coded in zip(("to_site", "from_site"), (sent, received), travelled, strict=True):
            place = {"round": round_number, "site": site, "direction": direction}
            for line in reversed(self.bytes[-2 * len(self.roster) :]):
                if all(line[key] == value for key, value in place.items()):
                    line["raw"] += raw
                    line["encoded"] += coded
                    break
            else:
                self.bytes.append({**place, "raw": raw, "encoded": coded})

    def event(self, round_number: int, site: str, text: str) -> None:
        self.events.append({"round": round_number, "site": site, "event": text})

    def round(self, round_number: int, matrices: dict[str, Matrix], seconds: float) -> None:
        """End of a round: append to metrics.jsonl, so that progress can be followed while the job runs."""
        for slot, matrix in matrices.items():
            self.matrices[f"{slot}/{round_number:05d}"] = matrix
        self.lines.append({"site": "server", "split": "round", "round": round_number, "seconds": round(seconds, 3)})
        self._append()

    def _append(self) -> None:
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            for line in self.lines[self._written :]:
                file.write(json.dumps(line) + "\n")
        self._written = len(self.lines)

    def finish(self, best: dict[str, Any], slots: dict[str, dict[str, dict[str, Tensor]]]) -> None:
        """Write everything the server owns, and the report."""
        from medpfl.results.report import write_report

        self._append()
        with open(self.folder / "mixing.npz", "wb") as file:
            np.savez_compressed(file, roster=np.array(self.roster), **self.matrices)  # type: ignore[arg-type]
        ratios = [round(line["raw"] / line["encoded"], 3) if line["encoded"] else None for line in self.bytes]
        self._json("bytes.json", [{**line, "ratio": ratio} for line, ratio in zip(self.bytes, ratios, strict=True)])
        files = {}
        for slot, states in slots.items():
            tensors = {f"{owner}::{key}": tensor for owner, state in states.items() for key, tensor in state.items()}
            path = self.folder / "slots" / f"{slot}.safetensors"
            store.save(path, tensors, {"slot": slot, "job": self.job})
            files[slot] = store.file_digest(path)
        summary = {
            "job": self.job,
            "medpfl": medpfl.__version__,
            "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "roster": list(self.roster),
            "best": best,
            "slots": files,
            **self.about,
            "test": [line for line in self.lines if line["split"] == "test"],
            "events": self.events,
        }
        self._json("summary.json", summary)
        write_report(self.folder)

    def fail(self, reason: str) -> None:
        """Keep what is known of a job that could not go on."""
        self._append()
        self._json("failure.json", {"job": self.job, "reason": reason, "events": self.events})

    def _json(self, name: str, value: Any) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
        os.replace(temporary, self.folder / name)

    def dump(self) -> dict[str, Any]:
        """All of it as JSON values, for the checkpoint."""
        return {
            "lines": self.lines,
            "events": self.events,
            "bytes": self.bytes,
            "matrices": {key: matrix.tolist() for key, matrix in self.matrices.items()},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self.lines, self.bytes = saved["lines"], saved["bytes"]
        self.events = saved["events"] + self.events
        self.matrices = {key: np.array(rows) for key, rows in saved["matrices"].items()}
        self._append()
