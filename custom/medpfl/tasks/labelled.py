# SPDX-License-Identifier: Apache-2.0
"""What all tasks with one class a case share: cross-entropy, and accuracy, balanced accuracy and AUC."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from medpfl.data.samples import Samples
from medpfl.tasks.base import Evaluation, Task


class Labelled(Task):
    """One class a sample. Networks have one output for two classes (logistic regression), else one a class."""

    scores: ClassVar[tuple[str, ...]] = ("accuracy", "balanced_accuracy", "auc")

    @staticmethod
    def outputs(class_names: list[str]) -> int:
        """Number of the network's outputs."""
        return 1 if len(class_names) == 2 else len(class_names)

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
        """AUC is that of the second class, with more than 2 classes the mean of each one against the rest; a class that
        no sample has is left out, as for balanced accuracy. NaN where all samples are of one class or a probability is
        NaN."""
        from sklearn.metrics import accuracy_score, recall_score, roc_auc_score

        truth, probability = samples.targets[:].numpy(), decisions.numpy()
        found = probability.argmax(axis=1)
        present = np.unique(truth)
        auc = float("nan")
        if len(present) > 1 and np.isfinite(probability).all():
            against_rest = present if probability.shape[1] > 2 else present[1:]
            auc = float(np.mean([roc_auc_score(truth == one, probability[:, one]) for one in against_rest]))
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
