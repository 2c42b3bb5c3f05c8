# SPDX-License-Identifier: Apache-2.0
"""What an inspection says about a dataset as a whole: problems (wrong results) and warnings (worth a look)."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from medpfl.check.inspection import Inspection, Twins
from medpfl.data.init.tables import MISSING
from medpfl.data.numbers import in_full

RARE = 0.05  # share of the training cases below which a class is called rare
FEW = 5  # cases of a split
NAMED = 5  # names in one sentence
MOSTLY_MISSING = 0.5
DEEP = 2**14  # a file of 16 bits whose largest value is below holds 14 bits or fewer


def problems_of(inspection: Inspection) -> list[str]:
    """What no single case shows: other numbers of channels, the same image in two splits."""
    found = []
    channels: Counter[int] = Counter()
    for shape, count in inspection.shapes.items():
        channels[shape[0]] += count
    if len(channels) > 1:
        parts = " and ".join(f"{count} with {number}" for number, count in channels.most_common())
        rarest = channels.most_common()[-1][0]
        found.append(
            f"{inspection.name}: the cases differ in their number of channels: {parts}, the first of these "
            f"{inspection.first_with[rarest].where}"
        )
    if inspection.columns:
        return found  # two patients may well have equal rows
    for twins in inspection.twins:
        if twins.first_split != twins.second_split:
            found.append(
                f"{twins.second.where}: the same image as {twins.first.where}{_other_label(twins)}; that one is in "
                f"the {twins.first_split} split, this one in the {twins.second_split} split"
            )
    return found


def warnings_of(inspection: Inspection) -> list[str]:
    """What may be right but deserves a look."""
    found = (_of_twins, _of_owners, _of_splits, _of_images, _of_columns)
    return [sentence for warnings in found for sentence in warnings(inspection)]


def too_few_to_score(inspection: Inspection, least: int) -> Iterator[str]:
    """A split of so few patients that its scores may not leave, so that no job is taken part in.

    Args:
        least: the policy's ``least_scored``.
    """
    for split in ("validation", "test"):
        if 0 < (groups := inspection.splits[split].groups) < least:
            yield (
                f"{inspection.name}: the {split} split is of {groups} patient{'s' * (groups > 1)} or "
                f"recording{'s' * (groups > 1)}, and this hospital's policy ('least_scored') asks for at least {least},"
                " so that jobs go on without this hospital; a lower 'least_scored' lets such scores leave"
            )


def _other_label(twins: Twins) -> str:
    return "" if twins.same_label else ", with another label"


def _names(names: list[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _of_twins(inspection: Inspection) -> Iterator[str]:
    if inspection.columns:
        apart = [twins for twins in inspection.twins if twins.first_split != twins.second_split]
        if apart:
            yield (
                f"{inspection.name}: {len(apart)} rows equal a row of another split in all features, the first "
                f"{apart[0].second.where} ({apart[0].second_split}) and {apart[0].first.where} "
                f"({apart[0].first_split}); is it one patient?"
            )
        again = [twins for twins in inspection.twins if twins.same_label and twins.first.group == twins.second.group]
        if again:
            yield (
                f"{inspection.name}: {len(again)} rows equal another row of the same group in all features and in what "
                f"is to be predicted, the first {again[0].second.where} and {again[0].first.where}; is a row there "
                "twice?"
            )
        return
    for twins in inspection.twins:
        if twins.first_split == twins.second_split:
            where = f"both in the {twins.first_split} split"
            yield f"{twins.second.where}: the same image as {twins.first.where}{_other_label(twins)}; {where}"


def _of_owners(inspection: Inspection) -> Iterator[str]:
    """Names of groups that may be one patient's, or nobody's."""
    if alike := list(_alike(inspection.owners)):
        one, other = alike[0]
        yield (
            f"{inspection.name}: the groups '{one}' and '{other}' differ in capital letters alone"
            f"{f', and {len(alike) - 1} more pairs' if len(alike) > 1 else ''}; if they are one patient, write the "
            "name alike everywhere, for that patient may be in training and in test"
        )
    for text, count in inspection.owners.items():
        if count > 1 and text in MISSING:
            yield (
                f"{inspection.name}: {count} cases are of the group '{text}'; if it means that nobody knows whose they "
                "are, they count as one patient: leave them out, or give each a name of its own"
            )


def _of_splits(inspection: Inspection) -> Iterator[str]:
    name = inspection.name
    for split, counts in inspection.splits.items():
        if 0 < counts.listed < FEW:
            yield f"{name}: the {split} split holds {counts.listed} case{'s' * (counts.listed > 1)} only"
        if counts.empty:
            yield (
                f"{name}: {len(counts.empty)} of {counts.cases} label maps of the {split} split hold nothing but "
                f"'{inspection.class_names[0]}': {_names(counts.empty)}"
            )
        if counts.events == 0:
            less = "nothing can be learnt from it" if split == "train" else "it says nothing about a model"
            yield f"{name}: the event came in none of the {counts.cases} cases of the {split} split, so {less}"
    if not inspection.splits["validation"].listed and inspection.splits["train"].listed:
        yield f"{name}: there is no validation split; the last round will count as the best one"
    for one, other in _alike(inspection.class_names):
        yield (
            f"{name}: the classes '{one}' and '{other}' differ in capital letters alone; if they mean the same, make "
            f"one class of them, with the values of both"
        )
    train = inspection.splits["train"]
    for index, count in enumerate(train.classes):
        text = inspection.class_names[index]
        if not count:
            yield f"{name}: no case of the train split has '{text}'"
        elif not train.voxels and count < RARE * train.cases:
            yield f"{name}: '{text}' is rare: {count} of {train.cases} training cases ({count / train.cases:.1%})"
    yield from _absent(inspection)


def _absent(inspection: Inspection) -> Iterator[str]:
    """Classes that the validation or test split lacks: it cannot say how well they are found."""
    for split in ("validation", "test"):
        counts = inspection.splits[split]
        if counts.voxels or not counts.cases:
            continue
        for index, count in enumerate(counts.classes):
            text = inspection.class_names[index]
            if not count:
                yield f"{inspection.name}: no case of the {split} split has '{text}', so it says nothing about it"


def _of_images(inspection: Inspection) -> Iterator[str]:
    if inspection.constant:
        names = _names([case.name for case in inspection.constant])
        yield f"{inspection.name}: {len(inspection.constant)} images hold one value only: {names}"
    if inspection.unplaced:
        share = f"{len(inspection.unplaced)} of {sum(inspection.shapes.values())} volumes"
        yield (
            f"{inspection.name}: the headers of {share} do not say how they lie (sform_code and qform_code are 0): "
            f"{_names([case.name for case in inspection.unplaced])}; their first axis is taken to run from right to "
            "left, the second from back to front, the third upwards. If the pictures show left and right, or up and "
            "down, exchanged, write the files anew with an sform"
        )
    for shape in inspection.shapes:
        if len(shape) == 2 and shape[0] > shape[1]:
            yield (
                f"{inspection.name}: a window has {shape[0]} channels and {shape[1]} time steps; if the arrays are n x "
                "length x channels, swap the last two axes"
            )
    if 0 < inspection.deepest < DEEP:
        yield (
            f"{inspection.name}: no image of 16 bits has a value above {inspection.deepest}, and its values are divided"
            " by 65535, so that networks see it nearly black; if the scanner's largest value is 4095, say, multiply the"
            " files' values by 16, at all hospitals alike"
        )
    if len(inspection.spacings) > 1:
        sizes = np.array(list(inspection.spacings.elements()))
        for spacing, count in inspection.spacings.items():
            ratio = np.array(spacing) / np.median(sizes, axis=0)
            if ratio.max() > 3 or ratio.min() < 1 / 3:
                text = " x ".join(f"{length:g}" for length in spacing)
                yield f"{inspection.name}: {count} volumes have voxels of {text} mm, far from the others' size"


def _of_columns(inspection: Inspection) -> Iterator[str]:
    rows = inspection.columns[0].rows if inspection.columns else 0
    listed = sum(counts.listed for counts in inspection.splits.values())
    if listed < rows:
        yield f"{inspection.name}: {rows - listed} of {rows} rows are not used, for a missing value or a problem"
    for column in inspection.columns:
        if column.missing > MOSTLY_MISSING * column.rows:
            yield f"column '{column.name}': missing in {column.missing} of {column.rows} rows"
        numbers = column.numbers()
        if column.role == "number" and len(numbers) and numbers.min() == numbers.max():
            yield f"column '{column.name}': every row has the value {numbers[0]:g}"
        elif column.role == "categories" and len(column.texts) == 1:
            yield f"column '{column.name}': every row has the value '{next(iter(column.texts))}'"
        for one, other in _alike(column.texts if column.role == "categories" else ()):
            yield (
                f"column '{column.name}': '{one}' and '{other}' differ in capital letters alone; if they mean the same,"
                f" list one of them under 'features' and declare codes: {{{column.name}: {{'{one}': '{other}'}}}}"
            )
        if column.signed:
            yield (
                f"column '{column.name}': {len(column.signed)} numbers have three decimal places, such as "
                f"{column.signed[0]}, and all others none; if the sign stands after thousands, write them without it, "
                "for they are read as thousandths of what they are"
            )
        for value, count, why in _codes(numbers):
            yield (  # in full: under 'missing' 1e+07 is not 9999999
                f"column '{column.name}': {count} rows have the value {in_full(value)}, {why}; if it means "
                "'not known', list it under 'missing'"
            )


def _alike(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of texts that are one but for their capital letters."""
    known: dict[str, str] = {}
    for text in sorted(texts):
        if (other := known.setdefault(text.casefold(), text)) != text:
            yield other, text


def _codes(numbers: NDArray[np.float64]) -> Iterator[tuple[float, int, str]]:
    """Lowest or highest values that look like a code for "not known" (-9, 999), and why: repeated, and further from the
    next value than the middle half of all others is wide, or the only negative one."""
    values, counts = np.unique(numbers, return_counts=True)
    if len(values) < 10:
        return
    for end, following in ((0, 1), (-1, -2)):
        rest = numbers[numbers != values[end]]
        width = float(np.subtract(*np.percentile(rest, (75, 25))))
        if counts[end] < 3:
            continue
        if abs(values[end] - values[following]) > width > 0:
            yield float(values[end]), int(counts[end]), "far from all others"
        elif end == 0 and values[0] < 0 <= values[1] and values[0].is_integer():
            yield float(values[0]), int(counts[0]), "the only negative one"
