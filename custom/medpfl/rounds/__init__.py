# SPDX-License-Identifier: Apache-2.0
"""The round loop without a transport: what the server decides (``server``) and what a hospital does (``hospital``).
FLARE and ``simulate`` both drive these same two objects, ``Coordinator`` and ``SiteRunner``. What both ends use lies
beside the two folders."""
