# SPDX-License-Identifier: Apache-2.0
"""The verb ``table``: the tables of a stored result, as the command that made the result wrote them.

Every table of a page in docs/results that says what a command wrote is made from the file beside it in this way.
"""

import importlib
import json
from pathlib import Path

from pydantic import TypeAdapter

from medpfl.compare import comparison_tables, fold_table
from medpfl.compare.results import LeaveOneOut, Results
from medpfl.core.errors import MedPFLError
from medpfl.results.compact import read_compact
from medpfl.results.files import parse


def tables_of(file: Path) -> str:
    """Markdown tables of a benchmark's, a comparison's or a leave-one-out's result file.

    Raises:
        MedPFLError: it cannot be read, or is no such file.
    """
    content = read_compact(file)
    if (bench := content.get("bench")) in [path.stem for path in Path(__file__).parent.glob("*.py")]:
        text: str = importlib.import_module(f"benchmarks.{bench}").table_of(content)
        return text
    if "comparison" in content:
        return comparison_tables.markdown(parse(TypeAdapter(Results), json.dumps(content), file))
    if {"models", "runs"} <= set(content):
        return fold_table.page(parse(TypeAdapter(LeaveOneOut), json.dumps(content), file), file.name.partition(".")[0])
    raise MedPFLError(f"{file}: neither a benchmark's result nor a comparison's nor a leave-one-out's")
