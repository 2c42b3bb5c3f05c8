# SPDX-License-Identifier: Apache-2.0
"""What of a run only the hospital holds, on its disk: private entries of the networks, and the optimisers' state; with
them, small models as they were before the round's training (``rounds.hospital.mixed``)."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from medpfl import store
from medpfl.core.digest import digest_of
from medpfl.data.preparation import Preparation
from medpfl.data.samples import SiteData
from medpfl.data.target import Target
from medpfl.methods.contract import Method
from medpfl.methods.precision import Scalers, kept_of, restored
from medpfl.rounds.hospital.run_files import RunFiles
from medpfl.rounds.messages import load

PRIVATE = "private"
BEGUN = "begun"
"""What tells a run from others with its key: the kind of a file of its own, and what every private part says."""
_MODEL = "model/"
MIXED_PART = "mixed/"
"""So the names of entries begin that belong to the models before training."""
KEPT = 3
"""Rounds whose state is kept: a server that was killed within a round goes on from the end of the one before, or, where
its newest checkpoint is damaged, of the one before that."""


@dataclass(frozen=True)
class Basis:
    """What a run goes on with here as it began, or not at all.

    Attributes:
        cut: of the data, see ``cut_of``.
        declared: digest of what the site file says beside the data: the shape of an input, what the values of label
            maps mean, the network of the hospital's choice. None in what an earlier MedPFL kept.
        config: digest of the job's configuration, as the hospital tells it.
    """

    cut: str
    declared: str | None
    config: str

    def same_data(self, meta: Mapping[str, object]) -> bool:
        """Whether what was kept with ``meta`` was trained on these data, read in this way."""
        return meta.get("cut") == self.cut and meta.get("declared") in (None, self.declared)


def cut_of(data: SiteData, target: Target, code: Mapping[str, str]) -> str:
    """Of the data that a hospital trains on in a run: what their inputs and classes mean, which cases are in which
    split, whose they are, and what is known of them (not their masks, whose reading would take as long as a round).

    Args:
        code: of the classes of other packages by which they are read; none where they are read by MedPFL's own.
    """
    parts: list[object] = [data.class_names, data.meaning, _fitted(data.preparation), *([code] if code else ())]
    for split, samples in sorted(data.splits.items()):
        told = "" if target is Target.MASK else store.fingerprint({"targets": samples.targets[:]})
        parts.append([split, samples.names, samples.owners, samples.case.tolist(), told])
    return digest_of(parts)


def _fitted(known: Preparation | None) -> list[str]:
    """With what tables and recordings are standardised; on another machine its last digits may be others."""
    found = known.standardised() if known else None
    return [f"{number:.6g}" for numbers in found or () for number in numbers]


def save_private(
    files: RunFiles,
    round_number: int,
    basis: Basis,
    private: Mapping[str, Tensor],
    optimizers: Mapping[str, torch.optim.Optimizer],
    scalers: Scalers,
    mixed: Mapping[str, Tensor],
    best: Collection[int],
    begun: str = "",
) -> None:
    """Keep the state after a round, and those of the rounds before it (see ``KEPT``).

    Args:
        private: the networks' private entries.
        optimizers: by network.
        scalers: of float16's gradients, by network.
        mixed: the models before the round's training, where they are kept here.
        best: rounds whose mixed models are kept, which are in the file of the round after.
        begun: see ``BEGUN``.
    """
    tensors = {f"{_MODEL}{key}": tensor for key, tensor in private.items()}
    for model, optimizer in optimizers.items():
        for index, entries in optimizer.state_dict()["state"].items():
            tensors.update({f"optimizer/{model}/{index}/{key}": value for key, value in entries.items()})
    tensors.update(_told(scalers))
    taken = {f"{MIXED_PART}{key}": tensor for key, tensor in mixed.items()}
    about = {"optimizers": list(optimizers), **asdict(basis), BEGUN: begun}
    files.save(PRIVATE, round_number, tensors, about, given=taken)
    files.prune(PRIVATE, round_number, KEPT, {number + 1 for number in best})


def _told(scalers: Scalers) -> dict[str, Tensor]:
    return {f"scaler/{name}": told for name, told in kept_of(scalers).items()}


def save_refined(files: RunFiles, round_number: int, private: Mapping[str, Tensor], scalers: Scalers) -> None:
    """Keep what a further exchange of the round has changed, private entries and scalers, in the round's file, beside
    what else is there.

    Where the file is damaged, the hospital goes on from the one before if it is started again, and says so.
    """
    kept, _ = files.newest(PRIVATE, round_number)
    if kept is not None and kept.number == round_number:
        changed = {f"{_MODEL}{key}": tensor for key, tensor in private.items()}
        files.save(PRIVATE, round_number, {**kept.tensors, **changed, **_told(scalers)}, kept.meta)


def held_private(files: RunFiles, round_number: int) -> dict[str, Tensor]:
    """The networks' private entries as they were kept after a round, where they are in memory; else none. Nobody writes
    to them."""
    held = files.held(PRIVATE, round_number)
    return {key.removeprefix(_MODEL): tensor for key, tensor in held.items() if key.startswith(_MODEL)}


def restore_private(
    kept: store.Kept, models: nn.ModuleDict, owner: Mapping[str, Method], device: torch.device
) -> tuple[dict[str, torch.optim.Optimizer], Scalers]:
    """Copy what ``save_private`` kept into the networks; returns the optimisers, and the scalers.

    Args:
        owner: network to the method that made it, which makes its optimiser too.
    """
    tensors, names = kept.tensors, kept.meta["optimizers"]
    load(models, {"": {k.removeprefix(_MODEL): t for k, t in tensors.items() if k.startswith(_MODEL)}})
    optimizers = {}
    assert isinstance(names, list)
    for model in map(str, names):
        optimizer = owner[model].new_optimizer(models[model], model)
        state: dict[int, dict[str, Tensor]] = {}
        prefix = f"optimizer/{model}/"
        for name, tensor in tensors.items():
            if name.startswith(prefix):
                index, key = name.removeprefix(prefix).split("/", 1)
                state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        optimizers[model] = optimizer
    scalers = {name.removeprefix("scaler/"): told for name, told in tensors.items() if name.startswith("scaler/")}
    return optimizers, restored(scalers, device)
