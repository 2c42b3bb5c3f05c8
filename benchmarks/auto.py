# SPDX-License-Identifier: Apache-2.0
"""``benchmarks auto``: Auto, our method for who does not want to choose one, in the stored comparisons' studies: same
hospitals, seeds, rounds and networks, beside the best of the rows that are stored there."""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic import TypeAdapter
from scipy import stats

from benchmarks.common import machine, markdown, write_json
from medpfl import api
from medpfl.cli.terminal import say
from medpfl.compare.results import Gain, Results, Row
from medpfl.core.errors import MedPFLError
from medpfl.data.untrusted import load_yaml
from medpfl.results.compact import read_compact
from medpfl.results.files import parse

STORED = Path(__file__).resolve().parents[1] / "docs" / "results"
STUDIES = {
    "feature-shift": "scanner",
    "label-skew": "case mix",
    "concept-shift": "labelling rule",
    "quantity-skew": "one tiny hospital",
    "none": "nothing",
    "heart": "UCI heart",
    "skin-augmented": "malignant or benign (balanced accuracy)",
    "skin-diagnoses": "seven skin diagnoses (balanced accuracy)",
    "lesions-augmented": "skin lesions (Dice)",
    "phantom": "phantoms (Dice)",
    "hippocampus-longer": "hippocampus (Dice)",
}
UNSEEN = 3
"""The seed from which on no run had been made when Auto's last rule was, in the generated studies: the first five."""
REFERENCES = ("Local", "FedAvg", "FedAvg + fine-tuning")
NO_RIVALS = ("Pooled", "(always", "Auto")
"""Rows with which the best is not looked for: all data in one place, the answer that is always the same, and Auto by a
former rule. Nor is it with methods that step by another optimiser than the others of the study: that is a difference of
its own."""


def measure(studies: list[str], runs: Path) -> dict[str, Any]:
    """Each study with Auto and the references; finished runs are kept in a folder of ``runs`` for each."""
    if unknown := sorted(set(studies) - set(STUDIES)):
        raise MedPFLError(f"--study: no study '{unknown[0]}'; there are: {', '.join(STUDIES)}")
    return {"studies": {study: _measured(study, runs / study) for study in studies}}


def _measured(study: str, folder: Path) -> dict[str, Any]:
    said = load_yaml(STORED / f"compare-{study}.yaml")
    name = _best(study).name
    rival = {method: entry for method, entry in said["methods"].items() if name in (method, f"{method} (generic)")}
    methods = {**rival, "Auto": {"path": "medpfl.methods.auto.Auto"}}
    said |= {"name": f"auto-{study}", "pooled": False, "methods": methods}
    return beside_stored(study, api.compare(said, None, folder, 1).content)


def _rivals(study: str) -> list[Row]:
    rows, apart = _stored(study)
    return [row for row in rows if not row.name.startswith(apart) and row.best.mean is not None]


def _best(study: str) -> Row:
    """The stored row with the best mean of those that Auto is compared with."""
    return max(_rivals(study), key=lambda row: row.best.mean or 0.0)


def together(rows: dict[str, Row], other: str) -> list[float] | None:
    """Auto's distance to another row of the same comparison, with its interval from patients and seeds: where one of
    the two is the comparison's first row, from which all distances are told; else None."""
    if (found := _gain(rows["Auto"].to_first)) and rows[other].to_first is None:
        return found
    theirs = _gain(rows[other].to_first)
    if theirs is None or rows["Auto"].to_first is not None:
        return None
    mean, low, high = theirs
    return [-mean, -high, -low]


def beside_stored(study: str, content: Results) -> dict[str, Any]:
    """What the table needs of a comparison of Auto, the references and the best stored row, and of the stored one."""
    best = _best(study)
    rows = {row.name: row for row in content.rows}
    auto = rows["Auto"]
    hospitals = {site: _gain(one.gain) for site, one in auto.hospitals.items()}
    return {
        "score": content.score,
        "seeds": content.seeds,
        "references": {name: _values(rows[name]) for name in REFERENCES},
        "auto": _values(auto),
        "gain": _gain(auto.gain),
        "hospitals": hospitals,
        "rivals": len(_rivals(study)),
        "best": best.name,
        "best_values": _values(best),
        "together": together(rows, best.name),
    }


def _values(row: Row) -> list[float | None]:
    return [None if value is None else round(value, 6) for value in row.best.values]


def _gain(gain: Gain | None) -> list[float] | None:
    """The mean and its 95 % interval."""
    if gain is None or gain.interval is None:
        return None
    return [round(value, 4) for value in (gain.mean, *gain.interval)]


def distances(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Method to study to how far its mean is from that of the study's best row, whichever that is; of those that are in
    all studies, and of those that are in all but the one whose network has one layer (UCI heart)."""
    found: dict[str, dict[str, float]] = {}
    for study in STUDIES:
        rows, apart = _stored(study)
        means = {row.name: row.best.mean for row in rows if row.best.mean is not None}
        means = {name: mean for name, mean in means.items() if not name.startswith(apart)}
        means["Auto"] = float(np.mean(results["studies"][study]["auto"]))
        best = max(means.values())
        for name, mean in means.items():
            if not name.endswith("(global)"):  # which are FedAvg
                found.setdefault(name, {})[study] = mean - best
    return {name: far for name, far in found.items() if set(STUDIES) - set(far) <= {"heart"}}


def unseen_distances() -> dict[str, tuple[float, float]]:
    """Method to how far its mean over the unseen seeds is from the best row's: the mean over the five generated studies
    and the farthest, of those that are in all of them."""
    found: dict[str, list[float]] = {}
    studies = list(STUDIES)[:5]
    for study in studies:
        rows, apart = _stored(study)
        kept = [row for row in rows if row.name == "Auto" or not row.name.startswith(apart)]
        means = {row.name: np.mean(np.array(row.best.values[UNSEEN:], dtype=float)) for row in kept}
        best = np.nanmax(list(means.values()))
        for name, mean in means.items():
            found.setdefault(name, []).append(float(mean - best))
    whole = {name: far for name, far in found.items() if len(far) == len(studies) and np.isfinite(far).all()}
    return {name: (float(np.mean(far)), min(far)) for name, far in whole.items()}


def _unseen_sentence() -> str:
    first = sorted(unseen_distances().items(), key=lambda item: -item[1][0])[:3]
    told = "; ".join(f"{name} {mean:+.3f} and {least:+.3f}" for name, (mean, least) in first)
    return (
        f"With the seeds that no rule had been tried on (from {UNSEEN} on, in the five generated studies), the "
        f"distance to each study's best row, mean and farthest: {told}."
    )


def _stored(study: str) -> tuple[list[Row], tuple[str, ...]]:
    """The rows of a stored comparison, and how the names of those begin that are no rivals of the others."""
    file = STORED / f"compare-{study}.json.xz"
    content = parse(TypeAdapter(Results), json.dumps(read_compact(file)), file)
    said = load_yaml(STORED / f"compare-{study}.yaml")["methods"]
    return content.rows, (*NO_RIVALS, *(name for name, one in said.items() if "optimizer" in one.get("args", {})))


def taken_by_other_seeds(rows: list[Row]) -> list[float]:
    """For each seed the score of the row that has the best mean of the other seeds: what who looked at those would have
    taken. The row that is best over all seeds owes a part of its lead to them."""
    scores: NDArray[np.float64] = np.array([row.best.values for row in rows], dtype=float)
    others = scores.sum(axis=1, keepdims=True) - scores
    seeds = np.arange(scores.shape[1])
    found: list[float] = scores[others.argmax(axis=0), seeds].tolist()
    return found


def _apart(scores: list[float], others: list[float]) -> str:
    """The mean difference, paired by seed, with its 95 % interval by Student's t."""
    low, high = stats.ttest_rel(scores, others).confidence_interval()
    return f"{np.mean(scores) - np.mean(others):+.3f} [{low:.3f}, {high:.3f}]"


def _distance_table(results: dict[str, Any]) -> str:
    rows = []
    for name, far in sorted(distances(results).items(), key=lambda item: -float(np.mean(list(item[1].values())))):
        shown = [f"{far[study]:+.3f}" if study in far else "" for study in STUDIES]
        rows.append([name, f"{np.mean(list(far.values())):+.3f}", f"{min(far.values()):+.3f}", *shown])
    return markdown(["method", "mean", "farthest", *STUDIES.values()], rows)


def table_of(results: dict[str, Any]) -> str:
    """A row a study; means and standard deviations over its seeds. Then a row a method: how far it is from the best."""
    rows = []
    for study, found in results["studies"].items():
        rivals = [row for row in _rivals(study) if None not in row.best.values]
        below = [site for site, one in found["hospitals"].items() if one[2] < 0]
        rows.append(
            [
                STUDIES[study],
                f"{len(found['seeds'])}",
                *(_shown(found["references"][name]) for name in REFERENCES),
                f"{found['best']} {_shown(found['best_values'])}",
                f"**{_shown(found['auto'])}**",
                _with_interval(found["gain"]),
                ", ".join(below) or "none",
                _apart(found["auto"], found["best_values"]),
                _with_interval(found["together"]) if found.get("together") else "–",
                _apart(found["auto"], taken_by_other_seeds(rivals)),
            ]
        )
    headings = ["hospitals differ in", "seeds", *REFERENCES, "best of the others", "Auto", "gain over Local"]
    more = ["surely below Local", "to the best of the others", "run together, by patients and seeds"]
    table = markdown([*headings, *more, "to the row that the other seeds take"], rows)
    if not set(STUDIES) <= set(results["studies"]):
        return table
    return f"{table}\n\n{_distance_table(results)}\n\n{_unseen_sentence()}"


def _with_interval(found: list[float]) -> str:
    mean, low, high = found
    return f"{mean:+.3f} [{low:.3f}, {high:.3f}]"


def _shown(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"


def command(
    runs: Annotated[Path, typer.Option(help="Folder for the runs; finished ones in it are not repeated.")],
    study: Annotated[list[str] | None, typer.Option(help="One of the studies; default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the numbers and the machine's facts.")] = None,
) -> None:
    """Auto in the stored studies, beside the references and the best row that is stored (several hours)."""
    facts = machine()
    results = measure(study or list(STUDIES), runs)
    write_json(out, "auto", facts, results)
    say(table_of(results))
