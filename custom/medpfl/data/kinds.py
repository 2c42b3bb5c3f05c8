# SPDX-License-Identifier: Apache-2.0
"""The kinds of datasets by name: those of this package, and those of other packages by their full class name."""

from collections.abc import Mapping

from pydantic import JsonValue, ValidationError

from medpfl.component import find_class
from medpfl.core.errors import ConfigError, DataError
from medpfl.data.arrays.declare import Arrays
from medpfl.data.contract import Dataset
from medpfl.data.images.declare import Images
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.series.declare import Series
from medpfl.data.table.declare import Table
from medpfl.data.target import Target
from medpfl.data.volumes.declare import Volumes

KINDS: Mapping[str, type[Dataset]] = {
    "volumes": Volumes, "table": Table, "images": Images, "arrays": Arrays, "series": Series,
}  # fmt: skip


def kind_named(name: str) -> type[Dataset]:
    """The kind that a site file, or a model's file, names.

    Raises:
        ConfigError: there is none.
    """
    if name in KINDS:
        return KINDS[name]
    if "." not in name:
        raise ConfigError(f"there is no kind '{name}'")
    found = find_class(name, "kind")
    if not issubclass(found, Dataset):
        raise ConfigError(f"'{name}' is no kind of dataset")
    return found


def read_preparation(saved: Mapping[str, JsonValue], spec: Spec, what: object = "new cases") -> Preparation:
    """What a model's file says of how inputs were prepared; without a kind it is of the first one that fits the task.

    Args:
        what: what is to be prepared, for messages.

    Raises:
        DataError: it says too little, as where the model was given away without its hospital's preparation.
        ConfigError: its kind is not installed here.
    """
    name = saved.get("kind")
    fitting = [kind for kind in KINDS.values() if kind.gives(spec)]
    if spec.target is Target.CLASS:  # volumes that are classified always say so
        fitting = [kind for kind in fitting if kind is not Volumes]
    kinds = [kind_named(str(name))] if name else fitting
    try:
        return kinds[0].preparation.model_validate(saved)
    except (IndexError, ValidationError) as error:
        raise DataError(
            f"{what}: cannot be prepared: the model's file has no hospital's preparation of its inputs"
        ) from error
