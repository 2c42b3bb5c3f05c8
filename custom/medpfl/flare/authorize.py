# SPDX-License-Identifier: Apache-2.0
"""Whether this site allows a class that FLARE does not build itself."""

from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

from medpfl.core.errors import ConfigError


def check_allowed(path: str, fl_ctx: FLContext) -> None:
    """Refuse a class by FLARE's own judgement: the site's allow list, unless the job may bring code.

    Raises:
        ConfigError: what FLARE says.
    """
    try:
        ComponentPathAuthorizer().authorize_component_config({"path": path}, fl_ctx=fl_ctx)
    except UnsafeComponentError as error:
        raise ConfigError(str(error)) from error
