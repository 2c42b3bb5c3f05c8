# SPDX-License-Identifier: Apache-2.0
"""What a method calls the models that it deploys: they are names of files and of columns, too."""

from collections.abc import Collection

from medpfl.core.errors import ConfigError, meant, shown


def check_names(method: str, deploys: object, after_steps: Collection[str], fine_tuned: str | None) -> None:
    """Whether a method says what its models are called, and everywhere the same.

    Raises:
        ConfigError: naming the method and what is wrong.
    """
    if not deploys:
        raise ConfigError(f"{method} has no 'deploys': what its models are called, each with the network it uses")
    if not isinstance(deploys, dict) or not all(isinstance(one, str) for pair in deploys.items() for one in pair):
        raise ConfigError(
            f"{method}'s 'deploys' must be a dictionary of what its models are called, each with the network it uses; "
            f"it is {shown(deploys)}"
        )
    for name in deploys:
        if not name or name.startswith(".") or "/" in name or not name.isprintable():
            raise ConfigError(f"{method} calls a model {shown(name)}, which cannot be a file's name: rename it")
    if isinstance(after_steps, str):
        raise ConfigError(f"{method}'s 'after_steps' must be a list of its models, got {shown(after_steps)}")
    for what, names in (("after_steps", after_steps), ("fine_tuned", [] if fine_tuned is None else [fine_tuned])):
        for name in names:
            if name not in deploys:
                raise ConfigError(
                    f"{method}'s '{what}' names {shown(name)}, which it does not deploy; it deploys: "
                    f"{', '.join(deploys)}{meant(name, deploys)}"
                )
