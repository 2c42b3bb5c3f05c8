# SPDX-License-Identifier: Apache-2.0
"""The demos by name. Imported where one of them is written or asked for: they read and write files of all kinds, whose
libraries a command or a comparison's run need not wait for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from medpfl.demo import phantom
from medpfl.demo.har import ENVIRONMENT_VARIABLE as HAR_DATA
from medpfl.demo.har import write_har
from medpfl.demo.heart import ENVIRONMENT_VARIABLE as HEART_DATA
from medpfl.demo.heart import write_heart
from medpfl.demo.hippocampus import ENVIRONMENT_VARIABLE as HIPPOCAMPUS_DATA
from medpfl.demo.hippocampus import write_hippocampus
from medpfl.demo.organc import ENVIRONMENT_VARIABLE as ORGANC_DATA
from medpfl.demo.organc import write_organc
from medpfl.demo.patterns import KINDS, write_patterns
from medpfl.demo.skin import ENVIRONMENT_VARIABLE as SKIN_DATA
from medpfl.demo.skin import write_skin
from medpfl.demo.skin_imbalance import DELTAS, write_imbalance

DEMOS: dict[str, Callable[[Path], list[str]]] = {
    "phantom": phantom.write_phantoms,
    "heart": write_heart,
    "skin": write_skin,
    "skin_hospitals": partial(write_skin, sites="hospitals"),
    "skin_400": partial(write_skin, images=400, public=400),
    "skin_resolutions": partial(write_skin, sites="resolutions", images=400, public=400),
    "phantom_channels": phantom.write_two_channels,
    **{f"skin_delta_{delta}": partial(write_imbalance, delta=delta) for delta in DELTAS},
    **{f"patterns_{kind}": partial(write_patterns, kind=kind) for kind in KINDS},
    "hippocampus": write_hippocampus,
    "organc": write_organc,
    "har": write_har,
    "har_hospitals": partial(write_har, hospitals=3),
}
"""Name of a demo to the function that writes its site files (and data) into a folder and returns the hospitals."""
MADE_WITH = {
    "phantom": str(phantom.HOSPITALS),
    "phantom_channels": str(phantom.TWO_CHANNELS),
    **dict.fromkeys(("skin_400", "skin_resolutions"), "marked as public"),
}
"""What a demo that lies there already must have been made with."""
DATA_OF = {
    "heart": HEART_DATA,
    **{name: SKIN_DATA for name in DEMOS if name.startswith("skin")},
    "hippocampus": HIPPOCAMPUS_DATA,
    "organc": ORGANC_DATA,
    **dict.fromkeys(("har", "har_hospitals"), HAR_DATA),
}
"""Name of a demo to the environment variable that says where its data are."""
