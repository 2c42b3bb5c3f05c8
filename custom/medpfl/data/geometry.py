# SPDX-License-Identifier: Apache-2.0
"""Whether MONAI's transforms note where an image lies. It is a setting of the whole process, so threads take turns."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class _Setting:
    """The setting while somebody needs it: whoever needs the other one waits until nobody does."""

    def __init__(self) -> None:
        self.free = Condition()
        self.users, self.noted, self.before = 0, True, True


_SETTING = _Setting()


@contextmanager
def geometry(noted: bool) -> Iterator[None]:
    """Within it MONAI's transforms keep account of an image's affine and history, or do not, which for small images is
    half of their time; the values are the same. It must not stand within the opposite one in one thread.

    Args:
        noted: True where images are turned and resampled by their place in the world; False where only values count.
    """
    from monai.data import get_track_meta, set_track_meta

    setting = _SETTING
    with setting.free:
        setting.free.wait_for(lambda: not setting.users or setting.noted == noted)
        if not setting.users:
            setting.before, setting.noted = get_track_meta(), noted
            set_track_meta(noted)
        setting.users += 1
    try:
        yield
    finally:
        with setting.free:
            setting.users -= 1
            if not setting.users:
                set_track_meta(setting.before)
                setting.free.notify_all()
