# SPDX-License-Identifier: Apache-2.0
"""What networks hold in buffers that are not in their state (``persistent=False``): it neither travels nor is kept."""

from torch import Tensor, nn

from medpfl.core.errors import ConfigError


class Unkept:
    """These buffers of networks that have not been trained here yet. A constant that the first pass computes may lie
    there: it changes once. What training moves would be lost where a run goes on, and in a deployed model, which would
    predict otherwise than it was scored."""

    def __init__(self, models: nn.Module):
        self._held = _copies(models)
        self._changed: set[str] = set()

    def check(self, models: nn.Module) -> None:
        """After every round.

        Raises:
            ConfigError: one has changed in a second round.
        """
        before, self._held = self._held, _copies(models)
        for key in before.keys() & self._held.keys():
            if before[key].shape == self._held[key].shape and not before[key].equal(self._held[key]):
                if key in self._changed:
                    raise ConfigError(
                        f"training changes '{key}', a buffer that is not in the network's state (persistent=False), so "
                        "that it could neither travel nor be kept: make it persistent, or if nothing is predicted with "
                        "it, hold it outside of the buffers"
                    )
                self._changed.add(key)


def _copies(models: nn.Module) -> dict[str, Tensor]:
    """With zeros in place of NaN, which differs from itself."""
    state = models.state_dict()
    return {key: buffer.detach().nan_to_num() for key, buffer in models.named_buffers() if key not in state}
