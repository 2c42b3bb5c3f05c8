# SPDX-License-Identifier: Apache-2.0
"""The verb ``table``: the tables of a stored result, as the command that made the result wrote them.

Every table of a page in docs/results that says what a command wrote is made from the file beside it in this way.
"""

import importlib
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from medpfl.compare import comparison_tables, fold_table
from medpfl.compare.results import LeaveOneOut, Results
from medpfl.core.errors import MedPFLError
from medpfl.results.compact import compact, read_compact
from medpfl.results.files import parse
from medpfl.tasks.metrics.digits import digits

OTHERS = "others"
"""In a result: further ones of the same benchmark, whole."""


def joined(files: Sequence[Path]) -> dict[str, Any]:
    """The first file's result with those of the others, for one page.

    Raises:
        MedPFLError: one cannot be read, or they are not of one benchmark.
    """
    first, *others = [read_compact(file) for file in files]
    for file, other in zip(files[1:], others, strict=True):
        if "bench" not in other or other["bench"] != first.get("bench"):
            raise MedPFLError(f"{file}: expected a result of the benchmark '{first.get('bench')}'")
    return {**first, OTHERS: [*_others(first), *others]}


def keep(file: Path, out: Path) -> None:
    """Write a comparison's result compressed, its numbers with six decimals: scores have so many; means and
    deviations, which follow from them, have sixteen, and take most of the room. The tables stay the same.

    Raises:
        MedPFLError: it cannot be read or written, is no comparison's, or its tables would be others.
    """
    content = read_compact(file)
    if "comparison" not in content:
        raise MedPFLError(f"{file}: not a comparison's result")
    short = _shortened(content)
    if _tables_of(short, file) != _tables_of(content, file):
        raise MedPFLError(f"{file}: its tables need more digits than are kept")
    data = lzma.compress(compact(short).encode(), preset=9 | lzma.PRESET_EXTREME)
    try:
        out.write_bytes(data)
    except OSError as error:
        raise MedPFLError(f"cannot write {out}: {error.strerror}") from error


def _shortened(value: Any) -> Any:
    """With six decimals (of a small value more), or as many as leave what a table shows the same, where it lies between
    two."""
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one) for one in value]
    if not isinstance(value, float):
        return value
    least = max(6, digits([value]) + 3)
    return next((short for places in range(least, 17) if _shown(short := round(value, places)) == _shown(value)), value)


def _shown(value: float) -> list[str]:
    return [f"{value:.{places}f}" for places in range(max(5, digits([value]) + 2))]


def _others(content: Mapping[str, Any]) -> list[Any]:
    return list(content.get(OTHERS, []))


def _when(content: Mapping[str, Any]) -> str:
    facts = content["machine"]
    return f"Started {facts['started']}, load averages {', '.join(map(str, facts['load_average_at_start']))}"


def tables_of(file: Path) -> str:
    """Markdown tables of a benchmark's, a comparison's or a leave-one-out's result file.

    Raises:
        MedPFLError: it cannot be read, or is no such file.
    """
    return _tables_of(read_compact(file), file)


def _tables_of(content: Mapping[str, Any], file: Path) -> str:
    bench = content.get("bench")
    if bench in [path.stem for path in Path(__file__).parent.glob("*.py")]:
        table_of = getattr(importlib.import_module(f"benchmarks.{bench}"), "table_of", None)
        try:
            if table_of is not None:
                others = [f"{_when(other)}:\n\n{table_of(other)}" for other in _others(content)]
                return "\n\n".join([table_of(content), *others])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MedPFLError(f"{file}: not a whole result of the benchmark '{bench}': {error!r}") from error
    if "comparison" in content:
        return comparison_tables.markdown(parse(TypeAdapter(Results), json.dumps(content), file))
    if {"models", "runs"} <= set(content):
        return fold_table.page(parse(TypeAdapter(LeaveOneOut), json.dumps(content), file), file.name.partition(".")[0])
    raise MedPFLError(f"{file}: neither a benchmark's result nor a comparison's nor a leave-one-out's")
