# SPDX-License-Identifier: Apache-2.0
"""What a network must give, whoever wrote it."""

from torch import Tensor

from medpfl.core.errors import ConfigError


def check_outputs(found: object, several: bool = False) -> None:
    """Outputs are B x outputs x ...

    Args:
        several: in training there may be a list of them.

    Raises:
        ConfigError: they are something else.
    """
    each = list(found) if several and isinstance(found, list | tuple) else [found]
    if each and all(isinstance(one, Tensor) and one.ndim > 1 for one in each):
        return
    got = f"a tensor of the shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    more = "; in training it may give a list of several, the finest first" if several else ""
    raise ConfigError(f"a network must give a tensor, batch x outputs x ..., and this one gives {got}{more}")


def check_classes(shares: Tensor, classes: int) -> None:
    """Probabilities, N x C, are those of all classes and of no others.

    Raises:
        ConfigError: there are more or fewer.
    """
    if shares.shape[1] != classes:
        raise ConfigError(
            f"the network gives {shares.shape[1]} outputs a case, and the data have {classes} classes: its last layer "
            "must have as many outputs as 'build' is asked for"
        )
