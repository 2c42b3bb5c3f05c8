# SPDX-License-Identifier: Apache-2.0
"""The round loop without a transport: what the server decides and what a hospital does. FLARE and ``simulate`` both
drive these same two objects, ``Coordinator`` and ``SiteRunner``."""
