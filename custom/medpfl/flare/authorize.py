# SPDX-License-Identifier: Apache-2.0
"""Whether this site allows a class that FLARE does not build itself."""

import importlib

from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

from medpfl.core.errors import ConfigError


class _ByName(ComponentPathAuthorizer):
    """FLARE's matcher takes ``Class.attribute`` for an allowed ``Class``; here a name matches itself only."""

    @staticmethod
    def _path_matches_prefix(component_path: str, prefix: str) -> bool:
        return component_path == prefix


def check_allowed(path: str, fl_ctx: FLContext) -> None:
    """Refuse a class by FLARE's own judgement: the site's allow list, unless the job may bring code. What is allowed is
    imported, for it may be of another package.

    Raises:
        ConfigError: what FLARE says, or there is no such module.
    """
    try:
        _ByName().authorize_component_config({"path": path}, fl_ctx=fl_ctx)
        importlib.import_module(path.rpartition(".")[0])
    except (UnsafeComponentError, ImportError) as error:
        raise ConfigError(str(error)) from error
