# SPDX-License-Identifier: Apache-2.0
"""Evaluate a deployed model at a hospital, and keep it there with a card that says what it is."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import medpfl
from medpfl import store
from medpfl.component import spec_of
from medpfl.methods.base import Method
from medpfl.sites.samples import Samples, SiteData
from medpfl.tasks.base import Evaluation, Task

BATCH = 64


def evaluate(
    method: Method, name: str, models: nn.ModuleDict, task: Task, samples: Samples, device: torch.device
) -> Evaluation | None:
    """Metrics of the deployed model ``name`` on a split; None if the split is empty."""
    if not len(samples):
        return None
    models.eval()
    decisions = []
    with torch.inference_mode():
        for start in range(0, len(samples), BATCH):
            inputs = samples.inputs[start : start + BATCH].to(device)
            decisions.append(task.decide(method.predict(name, models, inputs)).cpu())
    return task.evaluate(torch.cat(decisions), samples)


def save_deployed(
    folder: Path,
    about: dict[str, Any],
    method: Method,
    name: str,
    networks: nn.ModuleDict,
    task: Task,
    data: SiteData,
    evaluation: Evaluation,
) -> None:
    """Write ``<model>-<choice>.safetensors`` (the method's networks), its card (.md) and its test cases (.csv).

    All three stay at the hospital. The safetensors file carries the configuration that rebuilds the networks.

    Args:
        about: job, site, model, choice ("best" or "last") and round.
        name: the method's own name of the deployed model.
        networks: all networks of ``method``, as they shall be kept.
        evaluation: the one reading of the test split.
    """
    stem = f"{about['model']}-{about['choice']}"
    sizes = {split: len(set(samples.case.tolist())) for split, samples in data.splits.items()}
    meta = {
        **about,
        "deployed": name,
        "method": spec_of(method),
        "task": spec_of(task),
        "classes": data.class_names,
        "input_shape": list(data.splits["train"].inputs.shape[1:]),
        "cases": sizes,
        "preparation": data.preparation,
        "test": {key: round(value, 6) for key, value in evaluation.metrics.items()},
        "versions": {"medpfl": medpfl.__version__, "torch": str(torch.__version__)},
    }
    store.save(folder / f"{stem}.safetensors", networks.state_dict(), meta)
    _write(folder / f"{stem}.md", _card(meta))
    if evaluation.cases:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(evaluation.cases[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(evaluation.cases)
        _write(folder / f"{stem}.csv", text.getvalue())


def _card(meta: dict[str, Any]) -> str:
    results = "\n".join(f"| {metric} | {value:.4f} |" for metric, value in meta["test"].items())
    return f"""# Model card: {meta["model"]} ({meta["choice"]} round) of {meta["site"]}

**Not a medical device.** For research; it must not be used for decisions about patients.

- Job: {meta["job"]}, model of round {meta["round"]}
- Method: `{json.dumps(meta["method"])}`
- Task: `{json.dumps(meta["task"])}`
- Classes: {", ".join(meta["classes"])}
- Trained with {meta["cases"]["train"]} local cases, chosen on {meta["cases"]["validation"]}, together with the other
  hospitals of the federation as the method says
- Made with MedPFL {meta["versions"]["medpfl"]}, torch {meta["versions"]["torch"]}

Result on this hospital's own {meta["cases"]["test"]} test cases (read once):

| metric | value |
|---|---|
{results}

Intended use: images or tables acquired as in this hospital's training data. Anything else is untested.
"""


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
