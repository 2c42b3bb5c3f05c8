# SPDX-License-Identifier: Apache-2.0
"""What every method is compared with: local training and FedAvg, on the same batches, seeds and initial weights.

They ride along in any job unless its controller's ``references`` leave them out. This
is the one place where the rest of the package finds methods by name.
"""

from collections.abc import Iterable

from medpfl.methods.averaged import averaged
from medpfl.methods.contract import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.local import Local, Pooled

__all__ = ["AVERAGE", "CHOSEN", "LOCAL", "POOLED", "REFERENCES", "averaged", "like", "riding_along"]

LOCAL, AVERAGE, CHOSEN = "local", "average", "chosen"
"""Deployed names: of the model that a hospital trained alone, of the average of all that it holds, and of the one that
its validation cases choose."""
REFERENCES: dict[str, type[Method]] = {"local": Local, "fedavg": FedAvg}
"""Slot to the reference that has it."""
POOLED: type[Method] = Pooled
"""The reference of a comparison on one machine; it cannot ride along."""


def like(name: str, method: Method) -> Method:
    """The reference ``name`` with the arguments of every method (``Training``) as ``method`` has them."""
    return REFERENCES[name]().trained_like(method)


def riding_along(slots: Iterable[str], method: Method) -> list[Method]:
    """The references whose slots the server lists, trained like ``method``; not one that ``method`` itself is."""
    return [like(name, method) for name in slots if name in REFERENCES and not isinstance(method, REFERENCES[name])]
