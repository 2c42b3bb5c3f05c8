# SPDX-License-Identifier: Apache-2.0
"""The words of reports, each explained in a sentence."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

METRICS: Mapping[str, str] = {
    "accuracy": "The share of cases for which the model's answer is right.",
    "balanced accuracy": (
        "The share of right answers in each class, and the mean of that over the classes: a rare class counts as "
        "much as a frequent one."
    ),
    "AUC": (
        "The area under the ROC curve: how often a case of the class gets a higher probability than one that is "
        "not of it. 1 is perfect, 0.5 is chance."
    ),
    "AUPRC": (
        "The area under the precision-recall curve: how well the cases of a rare class are ranked before the "
        "others. 1 is perfect."
    ),
    "Brier": "The Brier score: the mean squared difference between the probabilities and what was true. 0 is perfect.",
    "ECE": (
        "Expected calibration error: how far the probabilities are from the share of answers that are right. 0 is "
        "perfect."
    ),
    "sensitivity": "The share of the cases of a class that the model finds.",
    "specificity": "The share of the cases that are not of a class which the model says are not.",
    "Dice": (
        "The overlap of the model's outline with the hospital's: twice the part that they share, divided by the "
        "sum of both. 1 is perfect, 0 is no overlap."
    ),
    "HD95": "The 95th percentile of the distances between the model's outline and the hospital's. 0 is perfect.",
    "surface Dice": "The share of both outlines that lies within the tolerance of the other one. 1 is perfect.",
    "volume error": "How far the outlined volume is from the true one. 0 is perfect.",
    "macro AUC": "The mean over the labels of the area under the ROC curve. 1 is perfect, 0.5 is chance.",
    "macro F1": (
        "The mean over the labels of F1, which is high where a model finds a label's cases and names few others. "
        "1 is perfect."
    ),
    "exact match": "The share of cases all of whose labels are right.",
    "MAE": "The mean absolute error: by how much a prediction is wrong on average.",
    "RMSE": "The root of the mean squared error: as the mean error, but large errors count more.",
    "R2": "The share of the variance that the predictions explain. 1 is perfect, 0 is no better than the mean.",
    "C index": (
        "The concordance index: how often, of two patients, the one with the higher predicted risk has the event "
        "first. 1 is perfect, 0.5 is chance."
    ),
}

WORDS: Mapping[str, str] = {
    **METRICS,
    "95 % interval": (
        "The range of values that go well with what these test patients showed: in about 95 of 100 studies such a "
        "range holds the true value. Few patients make it wide."
    ),
    "average": (
        "The mean of what all models of a hospital answer: of their probabilities, or of the numbers that they predict."
    ),
    "chance": "A difference whose interval holds zero may come from which patients happened to be in the test.",
    "delta": "In differential privacy, the probability with which the bound by epsilon may fail.",
    "epsilon": (
        "The bound of differential privacy on how much a single case, or a hospital's whole update, can change "
        "what is sent. Smaller is more private."
    ),
    "FedAvg": (
        "Federated averaging: in every round the server takes the mean of the hospitals' models, and all go on "
        "from it. The result is one model for all."
    ),
    "FedAvg before the mean": (
        "A hospital's FedAvg model after its own steps of the round and before the server's mean."
    ),
    "fine-tuning": "FedAvg's model trained further at each hospital, on its own cases alone, at the end.",
    "gain": (
        "By how much a model is better than the hospital's own local model, on the same cases. Above zero, "
        "joining was better."
    ),
    "global": "The one model for all hospitals that the method trains beside the hospitals' own ones.",
    "Local": "The model that a hospital trained alone, on its own cases. It is what joining is measured against.",
    "Personal": "The hospital's own model of the job's method, made with what the other hospitals learnt.",
    "Pooled": "A model that was trained on all hospitals' data in one place, which real hospitals cannot do.",
    "super model": "One model made of the hospitals' models, which decides for each case which of them answers.",
    "validation": "Cases that are kept out of training and choose the model. The test cases choose nothing.",
}

_BY_TEXT = {word.lower(): word for word in WORDS}
_WORD = re.compile(  # the longest first: "surface Dice" is no "Dice"
    rf"(?<!\w)({'|'.join(map(re.escape, sorted(WORDS, key=len, reverse=True)))})(?!\w)", re.IGNORECASE | re.ASCII
)


def spelled(metric: str) -> str:
    """A metric's name as one writes it in a sentence: "Dice" of "dice", "HD95 of liver" of "hd95 of liver"."""
    name, of, class_name = metric.partition(" of ")
    return f"{next((word for word in METRICS if word.lower() == name), name)}{of}{class_name}"


@dataclass(frozen=True)
class Piece:
    """Of a text; ``anchor`` and ``meaning``: of a word that is to be marked, else empty."""

    text: str
    anchor: str = ""
    meaning: str = ""


class Glossary:
    """Of one page: finds each word where it first stands, and remembers it for the list at the end.

    Args:
        names: of hospitals, which may be called "delta" and are no words.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._used: set[str] = set()
        longest = sorted(filter(None, names), key=len, reverse=True)
        self._names = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest))})(?!\w)") if longest else None

    def pieces(self, text: str) -> list[Piece]:
        """The text in pieces, of which those are to be marked that are words and had no mark yet on the page."""
        if self._names is None:
            return self._pieces(text)
        parts = enumerate(self._names.split(text))
        return [piece for place, part in parts for piece in ([Piece(part)] if place % 2 else self._pieces(part))]

    def _pieces(self, text: str) -> list[Piece]:
        return [self._word(piece) if place % 2 else Piece(piece) for place, piece in enumerate(_WORD.split(text))]

    def _word(self, piece: str) -> Piece:
        word = _BY_TEXT[piece.lower()]
        if word in self._used:
            return Piece(piece)
        self._used.add(word)
        return Piece(piece, _anchor(word), WORDS[word])

    @property
    def used(self) -> list[Piece]:
        """The words that were marked so far, sorted."""
        return [Piece(word, _anchor(word), WORDS[word]) for word in sorted(self._used, key=str.lower)]


def _anchor(word: str) -> str:
    return f"word-{re.sub('[^a-z0-9]+', '-', word.lower())}"
