# SPDX-License-Identifier: Apache-2.0
"""Classification of table rows, scored by accuracy, balanced accuracy and AUC."""

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError, DataError
from medpfl.sites.site_file import SPLITS, SiteFile, Table
from medpfl.sites.table import read_table
from medpfl.tasks.base import Evaluation, Samples, SiteData, Task, to_tensor


@dataclass(frozen=True)
class Tabular(Task):
    """A multilayer perceptron; without hidden layers, logistic regression. Loss: cross-entropy.

    Args:
        dataset: name of a declared dataset of kind ``table``.
        hidden: widths of hidden layers (each followed by ReLU).
        score: metric that chooses the best round.
    """

    dataset: str
    hidden: tuple[int, ...] = ()
    score: Literal["accuracy", "balanced_accuracy", "auc"] = "accuracy"
    scores: ClassVar[tuple[str, ...]] = ("accuracy", "balanced_accuracy", "auc")

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON has lists
        if any(width < 1 for width in self.hidden):
            raise ConfigError(f"Tabular's hidden widths must be at least 1, got {list(self.hidden)}")

    def load(self, site_file: SiteFile) -> SiteData:
        declared = site_file.dataset(self.dataset, Table)
        assert isinstance(declared, Table)  # what ``dataset`` checked, said again for the type checker
        data = read_table(declared)
        if not data.splits["train"]:
            raise DataError(f"{', '.join(declared.files)}: the train split is empty")
        splits = {
            split: Samples(
                to_tensor(data.features[data.splits[split]], torch.float32),
                to_tensor(data.classes[data.splits[split]], torch.int64),
                np.arange(len(data.splits[split])),
                [data.rows[index] for index in data.splits[split]],
                len(data.class_names),
            )
            for split in SPLITS
        }
        return SiteData(splits, data.class_names)

    def network(self, data: SiteData) -> nn.Module:
        widths = [data.splits["train"].inputs.shape[1], *self.hidden]
        # Two classes need one output (logistic regression), more need one each.
        outputs = 1 if len(data.class_names) == 2 else len(data.class_names)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[1] == 1:
            return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.to(outputs.dtype))
        return nn.functional.cross_entropy(outputs, targets)

    def decide(self, outputs: Tensor) -> Tensor:
        """Class probabilities, N x C."""
        if outputs.shape[1] == 1:
            positive = outputs.float().sigmoid()
            return torch.cat([1 - positive, positive], dim=1)
        return outputs.float().softmax(dim=1)

    def evaluate(self, decisions: Tensor, samples: Samples) -> Evaluation:
        """AUC (one against the rest for more than 2 classes) is NaN where a class is absent from the split or a
        probability is NaN."""
        from sklearn.metrics import accuracy_score, recall_score, roc_auc_score

        truth, probability = samples.targets.numpy(), decisions.numpy()
        found = probability.argmax(axis=1)
        present = np.unique(truth)
        auc = float("nan")
        if len(present) == probability.shape[1] and np.isfinite(probability).all():
            binary = probability.shape[1] == 2
            auc = float(roc_auc_score(truth, probability[:, 1] if binary else probability, multi_class="ovr"))
        metrics = {
            "accuracy": float(accuracy_score(truth, found)),
            # The mean recall of the classes that are there; sklearn's own name for it warns when one is absent.
            "balanced_accuracy": float(recall_score(truth, found, labels=present, average="macro")),
            "auc": auc,
        }
        cases = [
            {
                "case": name,
                "class": int(truth[i]),
                "predicted": int(found[i]),
                "probability": float(probability[i].max()),
            }
            for i, name in enumerate(samples.names)
        ]
        return Evaluation(metrics, cases)
