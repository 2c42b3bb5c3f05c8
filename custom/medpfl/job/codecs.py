# SPDX-License-Identifier: Apache-2.0
"""A job's codecs: what makes its messages small, in one direction or both."""

from dataclasses import dataclass

from medpfl.core.codecs import Codec, check_known
from medpfl.core.errors import ConfigError

TASKS = ("init", "train", "refine", "validate")
"""Tasks whose messages both ends of a hospital's connection must see."""


@dataclass(frozen=True)
class Codecs:
    """A job's codecs by direction; None: that direction is not encoded.

    Raises:
        ConfigError: there is none, no receiver could decode one, or the one to the hospitals cannot be used on
            differences to a reference.
    """

    to_site: Codec | None = None
    from_site: Codec | None = None

    def __post_init__(self) -> None:
        if self.to_site is None and self.from_site is None:
            raise ConfigError("codecs: give one for at least one direction")
        for codec in (self.to_site, self.from_site):
            if codec is not None:
                check_known(codec)
        if self.to_site is not None and not self.to_site.contracts:
            raise ConfigError(
                f"{type(self.to_site).__name__} cannot encode what goes to the hospitals: it can lose more than it is "
                "given, and there what was lost is sent again; use it on the way from them"
            )
