# SPDX-License-Identifier: Apache-2.0
"""Train a job's network in one place, on public data or on what hospitals agreed to pool: a checkpoint, for methods
that use one. Pooling moves rows of data: it is not federated learning, and only for public data and simulated studies.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medpfl import store
from medpfl.component import Spec, spec_of
from medpfl.core.devices import training_device
from medpfl.core.errors import ConfigError, DataError, MedPFLError
from medpfl.core.repeatable import repeatable
from medpfl.core.seeding import derive_seed, seed_torch
from medpfl.core.tied import own_state
from medpfl.data.declared import StorageRule
from medpfl.data.meaning import Meaning, other_inputs
from medpfl.data.partition import cut_by_class
from medpfl.data.rows import CaseRows, Rows
from medpfl.data.samples import Budget, CaseStore, Samples, SiteData, joined_rows
from medpfl.data.site_file import CHECKPOINT, SiteFile, load_site_file
from medpfl.job import Job
from medpfl.methods.contract import Build, Hospital, Method, Site, Span
from medpfl.methods.references import like
from medpfl.models.norms import single_sample_errors
from medpfl.results.schema import Typed
from medpfl.rounds.held_alike import check_fits, common_start

POOLED = "pooled"


class About(Typed):
    """What a checkpoint's file says of itself; ``share``: of every training split, ``samples``: of all of them,
    ``meaning`` and ``classes``: what the entries of an input and of an output mean."""

    kind: str = CHECKPOINT
    task: Spec
    method: Spec
    seed: int
    epochs: int
    share: float
    samples: int
    meaning: Meaning
    classes: list[str]
    sha256: str


def pretrain(
    job: Job,
    site_files: Mapping[str, Path],
    share: float,
    epochs: int,
    progress: Callable[[int, float], None] = lambda epoch, loss: None,
) -> tuple[dict[str, Tensor], About]:
    """Train the job's network with its method's learning rate, batch size and optimiser, from its ``start`` weights if
    it has any.

    Args:
        site_files: name to site file: one of a public data set, or several to be pooled.
        share: part of every training split that is used, in (0, 1]; with one class a sample, of every class.
        epochs: passes over it, >= 1.
        progress: told the epoch and the loss of its last batch.

    Returns:
        The network's tensors, and what the checkpoint's file says of itself.

    Raises:
        ConfigError: share or epochs make no sense, the task's loss or metrics do not fit the data, or BatchNorm is to
            train on a single value.
        SiteFileError: a site file does not declare the checkpoint of the start weights.
        DataError: the data sets do not fit together, or their checkpoints differ.
        MedPFLError: training diverged.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"the share of the training data must be above 0 and at most 1, got {share}")
    if epochs < 1:
        raise ConfigError(f"the epochs must be at least 1, got {epochs}")
    files = {name: load_site_file(path, name) for name, path in sorted(site_files.items())}
    data = _pooled(job, files, share)
    method: Method = replace(like("local", job.method), epochs=1, steps=None)
    start = common_start(method.start, files)
    if method.start:
        check_fits(method.start.checkpoint, next(iter(files.values())), data, job.task)
    models = nn.ModuleDict(method.models(Build(job.task, data, (POOLED,), job.settings.seed, start=start)))
    device = training_device()
    name = next(iter(method.deploys.values()))
    torch.set_num_threads(job.settings.threads)
    hospital = Hospital(
        task=job.task.informed(data), data=data, models=models.to(device), device=device, roster=(POOLED,), name=POOLED,
        seed=job.settings.seed,
    )  # fmt: skip
    for epoch in range(1, epochs + 1):
        seed_torch(job.settings.seed, POOLED, epoch, type(method).__name__)
        if method.optimizer_state == "reset":
            hospital.optimizers.clear()
        site = Site(hospital, method, epoch, Span(1, epochs))
        with single_sample_errors(method.batch_size), repeatable(device):
            site.fit(name)
        progress(epoch, float(site.last_loss))
    tensors = {key: tensor.detach().cpu() for key, tensor in own_state(models[name]).items()}
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise MedPFLError("training diverged: weights are not numbers (NaN or infinite) any more; try a smaller lr")
    about = About(
        task=spec_of(job.task),
        method=spec_of(method),
        seed=job.settings.seed,
        epochs=epochs,
        share=share,
        samples=len(data.splits["train"]),
        meaning=data.meaning,
        classes=data.class_names,
        sha256=store.fingerprint(tensors),
    )
    return tensors, about


def _pooled(job: Job, site_files: Mapping[str, SiteFile], share: float) -> SiteData:
    inputs, targets, first, of_first = list[Rows](), list[Rows](), None, ""
    for name, site_file in site_files.items():
        data = job.task.load(site_file)
        train = data.splits["train"]
        if first is None:
            first, of_first = data, f"{name}'s"
        elif data.class_names != first.class_names or data.input_shape != first.input_shape:
            raise DataError(f"{name}: its classes or the shape of its inputs differ from the other data sets'")
        elif train.annotated != first.splits["train"].annotated:
            raise DataError(f"{name}: it annotates other classes than the other data sets; they cannot be pooled")
        elif differs := other_inputs(data.meaning, f"{name}'s", first.meaning, of_first):
            raise DataError(differs)
        rows = _chosen(train, share, derive_seed(job.settings.seed, POOLED, name))
        inputs.append(_taken(train.inputs, rows))
        targets.append(_taken(train.targets, rows))
    if first is None:
        raise DataError("there is no site file to train on")
    budget, train = Budget(StorageRule(), Path()), first.splits["train"]
    together = joined_rows(inputs, budget)
    count = len(together)
    samples = Samples(
        together, joined_rows(targets, budget), np.arange(count), [POOLED] * count, train.classes, train.annotated
    )
    return SiteData({split: samples for split in first.splits}, first.class_names, first.preparation)


def _taken(rows: Rows, chosen: NDArray[np.int64]) -> Rows:
    """Of whole cases the cases themselves, of which patches are drawn, and not their views."""
    if not isinstance(rows, CaseRows):
        return rows[torch.from_numpy(chosen)]
    cases = CaseStore(Budget(StorageRule(), Path()), rows.size)
    for number in chosen.tolist():
        cases.append(rows.whole(number))
    return cases.finish()


def _chosen(train: Samples, share: float, seed: int) -> NDArray[np.int64]:
    if share == 1:
        return np.arange(len(train))
    targets = train.targets[:].numpy()
    if train.classes and targets.ndim == 1:
        parts = cut_by_class(range(len(train)), targets, {"used": share, "left": 1 - share}, seed % 2**32)
        return np.array(parts["used"])
    generator = np.random.default_rng(seed)
    return np.sort(generator.permutation(len(train))[: max(1, round(share * len(train)))])
