# SPDX-License-Identifier: Apache-2.0
"""``benchmarks mixing``: what mixing K models costs, as a multiple of cloning and of copying the same K models.

The work is done in fresh processes: one for the times, with an allocator that gives fresh memory for every large
tensor (glibc otherwise hands freed memory back, and cloning would look cheaper than it is in a server that holds the
models of many rounds), and one for the peak memory.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.common import OutOption, environment, machine, markdown, write_json
from medpfl.cli.terminal import say
from medpfl.core import mixing
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mean, RoundInfo, SoftPull
from medpfl.core.mixing import Matrix, mix

ENTRIES = 20  # tensors of a model, equally large
CLONE, COPY, NAIVE = "clone", "copy", "general, double loop of axpys"
TARGETS = {"general": 2.0, "soft_pull": 1.0, "mean": 1.0}
Models = list[dict[str, Tensor]]


def measure(sites: int, values: int, repeats: int) -> dict[str, Any]:
    """Times (seconds, medians), ratios and extra memory (bytes) for ``sites`` models of ``values`` float32 each."""
    for name, value, least in (("sites", sites, 3), ("values", values, ENTRIES), ("repeats", repeats, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    settings = {"sites": sites, "values": values, "repeats": repeats}
    return {**settings, **_in_process("times", settings), **_in_process("memory", settings)}


def _in_process(what: str, settings: dict[str, int]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.mixing", what, json.dumps(settings)]
    limits = environment(MALLOC_MMAP_THRESHOLD_=str(1 << 17))
    done = subprocess.run(command, env=limits, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MedPFLError(f"measuring {what} failed: {done.stderr.strip()[-300:] or 'out of memory, probably'}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def matrices(sites: int) -> dict[str, Matrix]:
    """A general row-stochastic matrix, SoftPull's and the mean's."""
    info = RoundInfo(tuple(f"{i}" for i in range(sites)), np.ones(sites), (True,) * sites)
    general = np.random.default_rng(0).random((sites, sites))
    general /= general.sum(axis=1, keepdims=True)
    return {"general": general, "soft_pull": SoftPull(0.7).matrix(info), "mean": Mean().matrix(info)}


def _models(sites: int, values: int) -> Models:
    generator = torch.Generator().manual_seed(0)
    sizes = [values // ENTRIES + (index < values % ENTRIES) for index in range(ENTRIES)]
    return [{f"{i}": torch.randn(size, generator=generator) for i, size in enumerate(sizes)} for _ in range(sites)]


def _naive(matrix: Matrix, models: Models) -> Models:
    results: Models = [{key: torch.zeros_like(tensor) for key, tensor in model.items()} for model in models]
    for row, result in zip(matrix.tolist(), results, strict=True):
        for weight, model in zip(row, models, strict=True):
            for key, target in result.items():
                target.add_(model[key], alpha=weight)
    return results


def _times(sites: int, values: int, repeats: int) -> dict[str, Any]:
    models, targets = _models(sites, values), _models(sites, values)
    made = matrices(sites)

    def clone() -> Models:
        return [{key: tensor.clone() for key, tensor in model.items()} for model in models]

    def copy() -> None:
        for model, target in zip(models, targets, strict=True):
            for key, tensor in model.items():
                target[key].copy_(tensor)

    jobs: dict[str, Callable[[], object]] = {CLONE: clone, COPY: copy}
    for name, matrix in made.items():
        jobs[f"{name}, out of place"] = partial(mix, matrix, models)
        # As the server does. On the copies: repeated mixing drives all models together, which changes no time.
        jobs[f"{name}, in place"] = partial(mix, matrix, targets, in_place=True, may_share=True)
    jobs[NAIVE] = lambda: _naive(made["general"], models)
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):  # in turns, so that other work on the machine meets all alike
        for name, job in jobs.items():
            if name == NAIVE and turn > max(1, repeats // 3):
                continue
            started = time.perf_counter()
            result = job()
            elapsed = time.perf_counter() - started
            del result
            if turn:  # the first turn warms up
                found[name].append(elapsed)
    seconds = {name: float(np.median(times)) for name, times in found.items()}
    return {
        "threads": torch.get_num_threads(),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "to_cloning": {name: round(_ratio(found, name, CLONE), 3) for name in found},
        "to_copying": {name: round(_ratio(found, name, COPY), 3) for name in found},
        "worst_error": _worst_error(sites),
    }


def _ratio(found: dict[str, list[float]], name: str, unit: str) -> float:
    """Median over the turns of the ratio within a turn."""
    return float(np.median([a / b for a, b in zip(found[name], found[unit], strict=False)]))


def _worst_error(sites: int) -> dict[str, float]:
    """Largest difference from float64's einsum over 100003 values of standard deviation 1, both ways of mixing."""
    models = _models(sites, 100_003)
    errors = {}
    for name, matrix in matrices(sites).items():
        worst = 0.0
        for in_place in (False, True):
            given = [{key: tensor.clone() for key, tensor in model.items()} for model in models]
            got = mix(matrix, given, in_place)
            for key in models[0]:
                stack = torch.stack([model[key] for model in models]).double().numpy()
                exact = np.einsum("kj,jd->kd", matrix, stack)
                worst = max(worst, float(np.abs(exact - torch.stack([model[key] for model in got]).numpy()).max()))
        errors[name] = worst
    return errors


def _memory(sites: int, values: int, repeats: int) -> dict[str, Any]:
    """Peak resident memory of a general mix in place, above what the models take."""
    matrix = matrices(sites)["general"]
    mix(matrix, _models(sites, 4096), in_place=True)  # loads the libraries' code
    models = _models(sites, values)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mix(matrix, models, in_place=True)
    extra = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"extra_bytes_in_place": extra, "model_bytes": 4 * values, "block_bytes": 8 * mixing._BLOCK_VALUES}


def table_of(results: dict[str, Any]) -> str:
    """Seconds and ratios, and whether the targets are met."""
    rows = []
    for name, seconds in results["seconds"].items():
        kind = name.partition(",")[0]
        cloning = results["to_cloning"][name]
        target = TARGETS.get(kind) if name != NAIVE else None
        verdict = "" if target is None else f"{'met' if cloning <= target else 'missed'} (at most {target:g})"
        rows.append([name, f"{seconds:.3f}", f"{cloning:.2f}", f"{results['to_copying'][name]:.2f}", verdict])
    extra, model, block = (results[key] / 1e6 for key in ("extra_bytes_in_place", "model_bytes", "block_bytes"))
    worst = max(results["worst_error"].values())
    return (
        f"{results['sites']} models of {results['values']} float32, {results['threads']} torch thread(s), medians of "
        f"{results['repeats']} turns:\n\n"
        + markdown(["operation", "seconds", "to cloning", "to copying", "target, to cloning"], rows)
        + f"\n\nExtra peak memory of a general mix in place: {extra:.1f} MB (target: at most one model and the block, "
        f"{model:.1f} + {block:.1f} MB: {'met' if extra <= model + block else 'missed'}). Largest difference from "
        f"float64's einsum: {worst:.1e} for values of standard deviation 1."
    )


def command(
    sites: Annotated[int, typer.Option(help="Number of models.")] = 20,
    values: Annotated[int, typer.Option(help="float32 values of a model.")] = 5_000_000,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 7,
    out: OutOption = None,
) -> None:
    """Mixing K models, as a multiple of cloning and of copying them."""
    facts = machine()
    results = measure(sites, values, repeats)
    write_json(out, "mixing", facts, results)
    say(table_of(results))


if __name__ == "__main__":
    chosen = {"times": _times, "memory": _memory}[sys.argv[1]]
    sys.stdout.write(json.dumps(chosen(**json.loads(sys.argv[2]))))
