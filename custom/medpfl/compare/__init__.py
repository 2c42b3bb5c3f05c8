# SPDX-License-Identifier: Apache-2.0
"""Methods x seeds on one task, in process: the comparison file, its runs, the statistics and the report.

``medpfl.compare`` is also a function of the Python API (``medpfl.api.compare``). Python binds that name to this package
as soon as a module of it is imported, so the package itself can be called.
"""

import importlib
import sys
from types import ModuleType


class _Callable(ModuleType):
    def __call__(self, *args: object, **kwargs: object) -> object:
        return importlib.import_module("medpfl.api").compare(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
