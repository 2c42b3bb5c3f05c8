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


def check_places(scores: Tensor, targets: Tensor) -> None:
    """Scores, B x C x ..., are of the very places that the targets, B x ..., have.

    Raises:
        ConfigError: they are of others.
    """
    if scores.shape[2:] != targets.shape[1:]:
        wanted = ", ".join(map(str, ["classes", *targets.shape[1:]]))
        raise ConfigError(
            f"a network must give a score of each class at each place, a tensor of the shape [batch, {wanted}] here, "
            f"and this one gives {list(scores.shape)}; with deep supervision it gives, in training, a list of "
            "maps, the finest first (MONAI's DynUNet stacks them: take torch.unbind of axis 1)"
        )


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
