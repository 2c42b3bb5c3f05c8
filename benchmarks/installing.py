# SPDX-License-Identifier: Apache-2.0
"""``benchmarks installing``: what the wheel and each of its extras take on disk, and how long pip needs for them.

A wheel is built from the checkout and installed into an empty virtual environment; each extra is then installed into a
copy of that environment. The versions are those of constraints.txt.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path
from typing import Any

from benchmarks.common import OutOption, machine, markdown, write_json
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError

ROOT = Path(__file__).resolve().parents[1]
BASE = "base"


def measure(extras: list[str]) -> dict[str, Any]:
    """Megabytes of site-packages and seconds of pip, of the base and of every extra beside it.

    Raises:
        MedPFLError: pip fails.
    """
    with tempfile.TemporaryDirectory(prefix="medpfl-install-") as scratch:
        folder = Path(scratch)
        _run("pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT), python=None)
        (wheel,) = folder.glob("medpfl-*.whl")
        base = folder / BASE
        venv.create(base, with_pip=True)
        empty = _megabytes(base)
        rows = [_row(BASE, base, str(wheel), empty)]
        for extra in extras:
            place = folder / extra
            shutil.copytree(base, place, symlinks=True, copy_function=os.link)
            rows.append(_row(extra, place, f"{wheel}[{extra}]", _megabytes(base)))
            shutil.rmtree(place)
        torch = sum(_size(one) for one in _packages(base).glob("torch*"))
        return {"wheel_mb": round(wheel.stat().st_size / 1e6, 2), "torch_mb": round(torch / 1e6), "rows": rows}


def _row(name: str, place: Path, what: str, before: float) -> dict[str, Any]:
    had = len(list(_packages(place).glob("*.dist-info")))
    started = time.perf_counter()
    _run("pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), what, python=place / "bin" / "python")
    seconds = round(time.perf_counter() - started)
    packages = len(list(_packages(place).glob("*.dist-info"))) - had
    return {"extra": name, "mb": round(_megabytes(place) - before), "packages": packages, "seconds": seconds}


def _run(*arguments: str, python: Path | None) -> None:
    command = [str(python or sys.executable), "-m", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MedPFLError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")


def _packages(place: Path) -> Path:
    (found,) = place.glob("lib/python*/site-packages")
    return found


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def _megabytes(place: Path) -> float:
    return _size(_packages(place)) / 1e6


def table_of(content: dict[str, Any]) -> str:
    """The table on docs/installation.md."""
    rows = [
        (
            f"`{row['extra']}`" if row["extra"] != BASE else f"base, of it torch {content['torch_mb']:,} MB",
            f"{'' if row['extra'] == BASE else '+'}{row['mb']:,} MB",
            str(row["packages"]),
            str(row["seconds"]),
        )
        for row in content["rows"]
    ]
    return markdown(("", "size", "packages", "seconds"), rows)


def command(out: OutOption = None) -> None:
    """Size and time of installing the wheel, and each of its extras beside it."""
    facts = machine()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    results = measure([name for name in project["optional-dependencies"] if name != "test"])
    write_json(out, "installing", facts, results)
    say(table_of({"bench": "installing", **results}))
