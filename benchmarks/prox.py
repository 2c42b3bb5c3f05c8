# SPDX-License-Identifier: Apache-2.0
"""``benchmarks prox``: pFedNet's update of the personal models, exact in Gram space, beside the paper's ADMM.

The hospitals' models lie in four groups, and every hospital's neighbours are the three nearest of its group. All times
are processor time of one thread, so that other work on the machine changes them less.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.common import OutOption, machine, markdown, write_json
from medpfl.cli.terminal import say
from medpfl.core import graph as graphs
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import NetworkProx, RoundInfo
from medpfl.core.mixing import mix
from medpfl.core.network_lasso import gram, solve_gram, solve_stack

ENTRIES = 20  # tensors of a model, equally large
GROUPS = 4
PAPER_ITERATIONS = 50
SPEED_UP, PASSES = 100.0, 3.0
READ, MIX, UPDATE, GRAM, SOLVE = "one read", "one mix", "the update", "of it: Gram matrix", "of it: solution"
PAPER, IN_PLACE = f"the paper's ADMM, {PAPER_ITERATIONS} iterations", "the same, in place and in fewer passes"
Models = list[dict[str, Tensor]]


def measure(sites: int, values: int, repeats: int) -> dict[str, Any]:
    """Processor times (seconds, medians), ratios, and what either way reaches, for ``sites`` models of ``values``."""
    for name, value, least in (("sites", sites, 2 * GROUPS), ("values", values, ENTRIES), ("repeats", repeats, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    models = _models(sites, values)
    targets = [{key: tensor.clone() for key, tensor in model.items()} for model in models]
    roster = tuple(f"{number:03}" for number in range(sites))
    info = RoundInfo(roster, np.ones(sites), (True,) * sites)
    edges = graphs.nearest([np.array([1000.0 * (k % GROUPS) + (k * k) % 17]) for k in range(sites)], 3)
    products = gram(models)
    distances = [float(np.sqrt(products[i, i] + products[j, j] - 2 * products[i, j])) for i, j in edges]
    tau = 0.1 * float(np.mean(distances))
    component = NetworkProx(tau=tau, graph="given", edges=tuple((roster[i], roster[j]) for i, j in edges))
    solution = solve_gram(products, edges, tau)
    stack = torch.stack([torch.cat(list(model.values())) for model in models])
    jobs: dict[str, Callable[[], Any]] = {
        READ: lambda: [float(tensor.sum()) for model in models for tensor in model.values()],
        MIX: lambda: mix(solution.matrix, targets, in_place=True),
        UPDATE: lambda: component.mix(targets, info),
        GRAM: lambda: gram(models),
        SOLVE: lambda: solve_gram(products, edges, tau),
        PAPER: lambda: algorithm_4(stack, edges, tau),
        IN_PLACE: lambda: solve_stack(stack, edges, tau, 2, tolerance=0.0, iterations=PAPER_ITERATIONS),
    }
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):  # in turns, so that other work on the machine meets all alike; the first warms up
        for name, job in jobs.items():
            if name in (PAPER, IN_PLACE) and turn > max(1, repeats // 3):
                continue
            for model, target in zip(models, targets, strict=True):
                for key, tensor in model.items():
                    target[key].copy_(tensor)
            started = time.process_time()
            result = job()
            if turn:
                found[name].append(time.process_time() - started)
            if name == PAPER:
                paper = result
    seconds = {name: float(np.median(times)) for name, times in found.items()}
    reached = {name: _objective(stack, result, edges, tau) for name, result in
               (("exact", torch.from_numpy(solution.matrix).float() @ stack), ("paper", paper))}  # fmt: skip
    return {
        "sites": sites, "values": values, "repeats": repeats, "edges": len(edges), "tau": tau,
        "threads": torch.get_num_threads(), "iterations": solution.iterations, "error_bound": solution.error,
        "seconds": {name: round(value, 5) for name, value in seconds.items()},
        "faster_than_paper": round(seconds[PAPER] / seconds[UPDATE], 1),
        "faster_than_in_place": round(seconds[IN_PLACE] / seconds[UPDATE], 1),
        "to_one_read_and_mix": round(seconds[UPDATE] / (seconds[READ] + seconds[MIX]), 2),
        "objective": reached,
    }  # fmt: skip


def algorithm_4(start: Tensor, edges: graphs.Edges, tau: float, rho: float = 0.5) -> Tensor:
    """The paper's Algorithm 4 as its Eqs. (8) to (10) read, models as rows, in prox form (``NetworkProx``)."""
    incidence = torch.zeros(len(start), len(edges))
    incidence[edges[:, 0], torch.arange(len(edges))] = 1
    incidence[edges[:, 1], torch.arange(len(edges))] = -1
    inverse = torch.linalg.inv(torch.eye(len(start)) + rho * incidence @ incidence.T)
    split = dual = torch.zeros(len(edges), start.shape[1])
    for _ in range(PAPER_ITERATIONS):
        new: Tensor = inverse @ (start + incidence @ (rho * split - dual))
        apart = incidence.T @ new
        pushed = apart + dual / rho
        split = (1 - tau / rho / pushed.norm(dim=1, keepdim=True)).clamp_min(0) * pushed
        dual = dual + rho * (apart - split)
    return new


def _models(sites: int, values: int) -> Models:
    generator = torch.Generator().manual_seed(0)
    sizes = [values // ENTRIES + (index < values % ENTRIES) for index in range(ENTRIES)]

    def draw(scale: float) -> list[Tensor]:
        return [scale * torch.randn(size, generator=generator) for size in sizes]

    common = draw(1.0)
    groups = [draw(0.1) for _ in range(GROUPS)]
    own = [draw(0.05) for _ in range(sites)]
    return [
        {str(i): common[i] + groups[k % GROUPS][i] + own[k][i] for i in range(ENTRIES)} for k in range(sites)
    ]  # fmt: skip


def _objective(start: Tensor, found: Tensor, edges: graphs.Edges, tau: float) -> float:
    """In float64, a row at a time."""
    moved = sum(float((new.double() - old.double()).square().sum()) for old, new in zip(start, found, strict=True))
    apart = sum(float((found[i].double() - found[j].double()).norm()) for i, j in edges)
    return 0.5 * moved + tau * apart


def table_of(results: dict[str, Any]) -> str:
    """Times and ratios, and whether the targets are met."""
    seconds = results["seconds"]
    rows = [[name, f"{value:.4f}", f"{value / seconds[UPDATE]:.2f}"] for name, value in seconds.items()]
    speed, passes, reached = results["faster_than_paper"], results["to_one_read_and_mix"], results["objective"]
    return (
        f"{results['sites']} models of {results['values']} float32, {results['edges']} edges, {results['threads']} "
        f"torch thread(s), processor time, medians of {results['repeats']} turns:\n\n"
        + markdown(["operation", "seconds", "to the update"], rows)
        + f"\n\nThe update is {speed:g} times as fast as the paper's ADMM with {PAPER_ITERATIONS} iterations "
        f"({'met' if speed >= SPEED_UP else 'missed'}: at least {SPEED_UP:g}), "
        f"{results['faster_than_in_place']:g} times as fast as that ADMM in place, and takes {passes:g} times one read "
        f"and one mix ({'met' if passes <= PASSES else 'missed'}: at most {PASSES:g}). It stopped after "
        f"{results['iterations']} iterations with a proven relative error of {results['error_bound']:.1e} at most. "
        f"Objective: {reached['exact']:.6f} exact, {reached['paper']:.6f} by the paper's ADMM."
    )


def command(
    sites: Annotated[int, typer.Option(help="Number of models.")] = 20,
    values: Annotated[int, typer.Option(help="float32 values of a model's personal part.")] = 1_000_000,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 6,
    out: OutOption = None,
) -> None:
    """pFedNet's update of the personal models, exact in Gram space, beside the paper's ADMM."""
    facts = machine()
    results = measure(sites, values, repeats)
    write_json(out, "prox", facts, results)
    say(table_of(results))
