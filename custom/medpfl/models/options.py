# SPDX-License-Identifier: Apache-2.0
"""Checks that the options of several architectures share."""

from collections.abc import Iterator

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture

MOST = 2**20
"""No width, depth or length of a network is larger; its memory is bounded by the hospital's policy."""


def whole(architecture: Architecture, *names: str, least: int = 1, most: int = MOST) -> None:
    """Whether the numbers in these fields, which may be lists, are within bounds.

    Raises:
        ConfigError: with the field and the number.
    """
    kind = type(architecture).__name__
    for name in names:
        for number in _numbers(getattr(architecture, name)):
            if not least <= number <= most:
                raise ConfigError(f"{kind}'s {name} must be whole numbers from {least} to {most}, got {number}")


def share(architecture: Architecture, name: str = "dropout") -> None:
    """Raises ConfigError: the field is not in [0, 1)."""
    value = getattr(architecture, name)
    if not 0 <= value < 1:
        raise ConfigError(f"{type(architecture).__name__}'s {name} must be in [0, 1), got {value}")


def divides(architecture: Architecture, part: str, field: str) -> None:
    """Raises ConfigError: one field does not divide the other."""
    number, by = getattr(architecture, field), getattr(architecture, part)
    if number % by:
        kind = type(architecture).__name__
        raise ConfigError(f"{kind}'s {field} must be a multiple of its {part}, got {number} and {by}")


def axes_of(architecture: Architecture, input_shape: tuple[int, ...]) -> int:
    """2 for inputs C x H x W, 3 for C x D x H x W.

    Raises:
        ConfigError: the inputs have another form, or lengths that the network cannot take.
    """
    kind = type(architecture).__name__
    if len(input_shape) not in (3, 4):
        raise ConfigError(f"{kind} takes inputs C x H x W or C x D x H x W, got inputs of shape {input_shape}")
    axes = len(input_shape) - 1
    wanted = architecture.multiples(axes)
    for length, multiple in zip(input_shape[1:], wanted or (1,) * axes, strict=True):
        if length % multiple:
            raise ConfigError(
                f"{kind} takes lengths that are multiples of {' x '.join(map(str, wanted or ()))}, got inputs of shape "
                f"{input_shape}"
            )
    return axes


def _numbers(value: int | tuple[object, ...]) -> Iterator[int]:
    if isinstance(value, tuple):
        for one in value:
            assert isinstance(one, int | tuple)
            yield from _numbers(one)
    else:
        yield value
