# SPDX-License-Identifier: Apache-2.0
"""The command ``medpfl``: one verb each."""

import errno
import io
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import medpfl
from medpfl.cli import bundles, demo, federations, jobs, keys, models, planning, sites
from medpfl.cli.compare import compare
from medpfl.cli.leave_one_out import leave_one_out
from medpfl.cli.super import super_
from medpfl.cli.terminal import Terminal, console, say
from medpfl.core.errors import MedPFLError, reason_of

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=medpfl.__doc__)
for verbs in (jobs, models, planning, sites, federations):
    app.add_typer(verbs.app)
app.add_typer(demo.app, name="demo")
app.add_typer(bundles.app, name="bundle")
app.add_typer(keys.app, name="keys")
app.command()(compare)
app.command("super")(super_)
app.command()(leave_one_out)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Nothing more can be written: the disk, the account's share of it or the longest file that is allowed."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
"""What is named cannot be looked at, read or written by this account, or by anybody."""


def _print_version(asked: bool) -> None:
    if asked:
        console.print(medpfl.__version__)
        raise typer.Exit


@app.callback()
def _before_a_verb(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command()
def licences() -> None:
    """List the licences of every installed package that this one needs, directly or not."""
    from medpfl.licences import licences as find

    for one in find():
        say(f"{one.name} {one.version}: {one.licence}")


def main() -> None:
    """Entry point: a MedPFLError is one sentence on stderr and exit code 1, never a traceback;
    so are a full disk, also where what is printed goes into a file, and a place where this account may not go.

    A kill (SIGTERM, of a cluster's scheduler, say) and a terminal that is closed (SIGHUP) end a command as Ctrl-C does:
    processes that it began and copies of data that it made go with it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that a terminal's encoding lacks is no reason to end
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it, and so do we then
        terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        signal.signal(signal.SIGHUP, lambda *_: _hung_up(terminals))
    try:
        app()
    except MedPFLError as error:
        Terminal(stderr=True).print(f"medpfl: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        why, what = reason_of(error), error.filename or "what the command prints"
        if isinstance(error, shutil.Error) and any(os.strerror(number) in why for number in FULL):
            what = error.args[0][0][1]
        elif error.errno in REFUSED and error.filename is not None:
            Terminal(stderr=True).print(f"medpfl: cannot use {what}: {why}", markup=False, soft_wrap=True)
            sys.exit(1)
        elif error.errno not in FULL:
            raise
        Terminal(stderr=True).print(f"medpfl: cannot write {what}: {why}", markup=False, soft_wrap=True)
        sys.exit(1)


def _hung_up(terminals: Sequence[int]) -> None:
    """The system and the shell both tell it: the second time would break off the cleaning up. To write to a terminal
    that is closed is an error, which would do so, too."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in terminals:
        os.dup2(nowhere, stream)
    sys.exit(129)
