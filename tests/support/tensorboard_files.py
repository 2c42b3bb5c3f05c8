# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's files, read by TensorBoard."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medpfl.results.trackers.scalars import Scalar


def shown(folder: Path) -> list[Scalar]:
    """All numbers below a folder of event files, sorted."""
    found = []
    for site in folder.iterdir():
        events = EventAccumulator(str(site), {"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            found += [Scalar(site.name, name, event.value, event.step) for event in events.Scalars(name)]
    return sorted(found)
