# SPDX-License-Identifier: Apache-2.0
"""What every hospital must hold alike before a job starts: checkpoints, and public data."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medpfl import store
from medpfl.component import Spec, class_name, spec_of
from medpfl.core.errors import DataError
from medpfl.data.meaning import other_inputs
from medpfl.data.samples import SiteData
from medpfl.data.site_file import SiteFile
from medpfl.methods.contract import Method
from medpfl.methods.start import Start, Started
from medpfl.models.contract import Architecture
from medpfl.tasks.contract import Task


@dataclass(frozen=True)
class Common:
    """What the method uses.

    Attributes:
        checkpoints: name to tensors.
        public: dataset to its inputs, N x ..., as the job's task prepares them.
    """

    checkpoints: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    public: Mapping[str, Tensor] = field(default_factory=dict)

    def start(self, how: Start | None) -> Started | None:
        """What networks start with."""
        return None if how is None else Started(how, self.checkpoints[how.checkpoint])

    def marks(self) -> dict[str, str]:
        """A SHA-256 of each, by which the server compares the hospitals; of data it tells nothing else but N."""
        checkpoints = {f"checkpoint '{name}'": store.fingerprint(found) for name, found in self.checkpoints.items()}
        public = {
            f"dataset '{name}' of {len(inputs)} samples": store.fingerprint({"inputs": inputs})
            for name, inputs in self.public.items()
        }
        return {**checkpoints, **public}


def common_start(how: Start | None, site_files: Mapping[str, SiteFile]) -> Started | None:
    """What networks start with where all hospitals' files are at hand: pretraining, a comparison on one machine.

    Raises:
        SiteFileError: a site file does not declare the checkpoint.
        DataError: two hospitals hold other tensors under its name.
    """
    if how is None:
        return None
    found = {site: site_file.checkpoint(how.checkpoint) for site, site_file in sorted(site_files.items())}
    marks = {site: store.fingerprint(tensors) for site, tensors in found.items()}
    first, *others = found
    for other in others:
        if marks[other] != marks[first]:
            raise DataError(f"checkpoint '{how.checkpoint}' of {other} holds other tensors than that of {first}")
    return Started(how, found[first])


_UNSEEN = ("norm", "num_heads", "heads", "pool", "stride", "gamma")
"""Arguments of architectures that no tensor's shape tells: with others the same weights compute something else."""
_UNSEEN_OPTIONS: Spec = {"conv1_t_stride": 1, "no_max_pool": False}
"""The same of ``MonaiNet``'s options, with what they are where they are not given."""


def check_fits(name: str, site_file: SiteFile, data: SiteData, task: Task) -> None:
    """Refuse a checkpoint whose tensors fit by their shapes, and whose inputs or classes are others, as after the site
    file's features have changed places; or whose network computes something else than the job's.

    Raises:
        DataError: it is one.
    """
    told, sentence = site_file.trained_on(name), None
    if "meaning" in told:
        sentence = other_inputs(data.meaning, "the site file's", told["meaning"], "the model's")
    classes = told.get("classes", [])
    if classes != data.class_names and sorted(classes) == sorted(data.class_names):
        trained, here = ", ".join(classes), ", ".join(data.class_names)
        sentence = f"it was trained for the classes {trained}; the site file has {here}, in another order"
    if differs := _differs(site_file.network_of(name), getattr(task, "architecture", None)):
        told_job = f"checkpoint '{name}' does not fit the job: its {differs}"
        raise DataError(told_job, public=told_job)
    if sentence:
        sentence = f"checkpoint '{name}' does not fit the data: {sentence}"
        raise DataError(sentence, public=sentence)


def _differs(theirs: object, ours: object) -> str | None:
    """What no shape tells and is another in the network of a checkpoint than in the job's of the same class."""
    if not isinstance(theirs, dict) or not isinstance(theirs.get("args"), dict) or not isinstance(ours, Architecture):
        return None
    here = spec_of(ours)["args"]  # in the form of a file, in which a tuple is a list
    if theirs.get("path") != class_name(type(ours)) or not isinstance(here, dict):
        return None
    here, there = _with_options(here), _with_options(theirs["args"])
    for key in (*_UNSEEN, *_UNSEEN_OPTIONS):
        if key in here and there.get(key, here[key]) != here[key]:
            return (
                f"{type(ours).__name__} has another '{key}' than the job's, {here[key]!r}, with which "
                "the same weights would compute something else: name that of the checkpoint"
            )
    return None


def _with_options(args: Spec) -> Spec:
    options = args.get("options")
    return {**args, **_UNSEEN_OPTIONS, **options} if isinstance(options, dict) else args


def read_common(
    method: Method, task: Task, site_file: SiteFile, input_shape: tuple[int, ...], data: SiteData | None = None
) -> Common:
    """Read what the method asks for. Of a public dataset all samples are taken, and no label.

    Args:
        data: the hospital's own, with which all must fit; None: that is looked at elsewhere.

    Raises:
        SiteFileError: the site file does not declare it, or does not say that a dataset is public.
        DataError: a public dataset cannot be read, or its inputs have another shape than ``input_shape``, that of the
            hospital's own, or mean something else; or a checkpoint's do.
    """
    checkpoints = {name: site_file.checkpoint(name) for name in method.declared_checkpoints()}
    for name in checkpoints if data else ():
        assert data is not None
        check_fits(name, site_file, data, task)
    public = {}
    for name in method.public_datasets():
        site_file.check_public(name)
        found = dataclasses.replace(task, dataset=name).load(site_file)  # type: ignore[type-var]
        inputs = torch.cat([samples.inputs[:] for samples in found.splits.values()])
        if tuple(inputs.shape[1:]) != input_shape:
            sentence = (
                f"the public dataset '{name}' has inputs of shape {list(inputs.shape[1:])}, the hospital's own have "
                f"{list(input_shape)}"
            )
            raise DataError(sentence, public=sentence)
        if data and (differs := other_inputs(found.meaning, f"the public dataset '{name}': its", data.meaning, "own")):
            raise DataError(differs, public=differs)
        public[name] = inputs
    return Common(checkpoints, public)
