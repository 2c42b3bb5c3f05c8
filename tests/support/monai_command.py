# SPDX-License-Identifier: Apache-2.0
"""MONAI's own command. What it needs, pytorch-ignite above all, lies beside the other packages: MONAI imports ignite in
every process that finds it, for seconds. ``tests/run`` puts it there.

One process imports MONAI and ignite, once, and does what it is asked in copies of itself.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

BESIDE = Path(sys.prefix) / "monai-command"
# Ends when nobody is left who could ask: its input is then closed. It has nothing to tidy up.
SERVER = """
import json, os, runpy, sys, traceback
import monai.bundle
import ignite.engine

def do(module, arguments, folder, log):
    code = 1
    try:
        os.chdir(folder)
        sys.path.insert(0, "")
        written = os.open(log, os.O_WRONLY)
        os.dup2(written, 1)
        os.dup2(written, 2)
        sys.argv[1:] = arguments
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            exec(arguments[0], {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        do(**asked)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@cache
def _server() -> "subprocess.Popen[str]":
    path = os.pathsep.join(filter(None, (str(BESIDE), os.environ.get("PYTHONPATH"))))
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    atexit.register(server.communicate)  # closes its input and waits for its end
    return server


def _done(module: str | None, arguments: list[str], folder: Path) -> str:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as log:
        asked = {"module": module, "arguments": arguments, "folder": str(folder), "log": log.name}
        server.stdin.write(f"{json.dumps(asked)}\n")
        server.stdin.flush()
        code, said = server.stdout.readline().strip(), log.read()
    assert code == "0", said
    return said


def run_bundle(arguments: list[str], folder: Path) -> str:
    """What ``python -m monai.bundle ARGUMENTS`` prints, in ``folder``. AssertionError: it failed."""
    return _done("monai.bundle", arguments, folder)


def run_code(code: str, folder: Path) -> str:
    """What the code prints, in ``folder``. AssertionError: it failed."""
    return _done(None, [code], folder)
