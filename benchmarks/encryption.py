# SPDX-License-Identifier: Apache-2.0
"""``benchmarks encryption``: what it costs that the server does not see models, and how exact the mixed models are.

For networks of several sizes: bytes as multiples of the plain ones, processor seconds of every step beside those of the
step in the clear, whole rounds of a small job in one process, and the relative error of what a hospital decrypts
against mixing in the clear, with all hospitals and with one absent.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from benchmarks.common import OutOption, machine, markdown, write_json
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError

MOST_ERROR = 1e-6
"""Of a decrypted model, relative to mixing in the clear."""
T = TypeVar("T")
State = dict[str, Any]


def measure(sites: int, values: Sequence[int], repeats: int) -> dict[str, Any]:
    """Everything, for networks of about so many parameters."""
    for name, value, least in (("sites", sites, 3), ("values", min(values), 100), ("repeats", repeats, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    import torch

    torch.set_num_threads(1)
    return {
        "sites": sites,
        "repeats": repeats,
        "networks": [{**_steps(sites, size, repeats), **_rounds(sites, size, repeats)} for size in values],
    }


def _network(size: int) -> Any:
    """Two hidden layers with BatchNorm between them, of about ``size`` parameters."""
    from torch import nn

    width = round((size + 12.25) ** 0.5 - 3.5)  # width^2 + 7 width parameters
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(),
                         nn.Linear(width, 1, bias=False))  # fmt: skip


def _copies(sites: int, size: int) -> tuple[State, list[str], list[State]]:
    """Initial tensors, the names of buffers, and what each hospital would send: a step of training's size away."""
    import torch

    torch.manual_seed(0)
    network = _network(size)
    start = {f"model.{key}": tensor.clone() for key, tensor in network.state_dict().items()}
    buffers = [f"model.{key}" for key, _ in network.named_buffers()]
    generator = torch.Generator().manual_seed(1)

    def moved(tensor: Any) -> Any:
        if not tensor.is_floating_point():
            return tensor + 7
        return tensor + 0.02 * torch.randn(tensor.shape, generator=generator).abs()

    return start, buffers, [{key: moved(tensor) for key, tensor in start.items()} for _ in range(sites)]


def matrices(sites: int) -> dict[str, Any]:
    """Component to its matrix, with all hospitals and without the second; FedAP's comes from statistics."""
    import torch

    from medpfl.core.mixers import Mean, RoundInfo, SoftPull, StatisticsDistance
    from medpfl.core.mixing import restrict

    names = tuple(f"hospital-{number}" for number in range(sites))
    everybody = RoundInfo(names, np.arange(1.0, sites + 1), (True,) * sites)
    generator = torch.Generator().manual_seed(2)
    fedap = StatisticsDistance(lam=0.5)
    told = [
        {
            "1.mean": torch.randn(16, generator=generator).double(),
            "1.variance": torch.rand(16, generator=generator).double() + 0.5,
        }
        for _ in names
    ]
    fedap.take_statistics(told, everybody)
    found = {}
    for name, mixer in {"mean": Mean(), "SoftPull": SoftPull(0.6), "FedAP": fedap}.items():
        matrix = mixer.matrix(everybody)
        found[name] = matrix
        found[f"{name}, one absent"] = restrict(matrix, [number != 1 for number in range(sites)])
    return found


def _timed(what: Callable[[], T], times: list[float]) -> T:
    started = time.process_time()
    result = what()
    times.append(time.process_time() - started)
    return result


def _steps(sites: int, size: int, repeats: int) -> dict[str, Any]:
    from medpfl.core.mixing import mix
    from medpfl.privacy.ckks import Key
    from medpfl.rounds.messages import Message, byte_count, table
    from medpfl.rounds.protocol.replies import TrainReply
    from medpfl.rounds.protocol.requests import TrainRequest
    from medpfl.rounds.sealing import Seal, check_sealed, mix_sealed

    start, buffers, sent = _copies(sites, size)
    roster = [f"hospital-{number}" for number in range(sites)]
    seal = Seal(roster[0], Key.new(), {"model": start}, buffers, roster)
    expected, plain = table({"model": start}), byte_count({"model": start})
    trained = TrainReply(round=1, metrics=(), loss={}, notes=(), seconds=0.0)
    request = TrainRequest(run="benchmark", round=2, rounds=2, best={})
    seconds: dict[str, list[float]] = {}
    sealed = [seal.close(Message(trained, {"model": state})) for state in sent]
    ways = matrices(sites)
    mixed: Mapping[str, list[State]] = {}

    def check_all() -> None:
        for site, one in zip(roster, sealed, strict=True):
            check_sealed(site, one.slots, expected, buffers)

    for _ in range(repeats):
        _timed(partial(seal.close, Message(trained, {"model": sent[0]})), seconds.setdefault("encrypt", []))
        _timed(check_all, seconds.setdefault("check", []))
        received = [one.slots["model"] for one in sealed]
        mixed = {
            name: _timed(partial(mix_sealed, matrix, received), seconds.setdefault(f"mix, {name}", []))
            for name, matrix in ways.items()
        }
        answer = Message(request, {"model": mixed["mean"][0]})
        _timed(partial(seal.open, answer), seconds.setdefault("decrypt", []))
        for name, matrix in ways.items():
            _timed(partial(mix, matrix, sent), seconds.setdefault(f"mix in the clear, {name}", []))
    down = {name: byte_count({"model": rows[0]}) / plain for name, rows in mixed.items()}
    return {
        "parameters": sum(t.numel() for key, t in start.items() if key not in buffers),
        "plain_bytes": plain,
        "up": round(byte_count(sealed[0].slots) / plain, 2),
        "down": round(max(down.values()), 2),
        "seconds": {name: round(float(np.median(times)), 4) for name, times in seconds.items()},
        "errors": {name: _error(seal, request, rows, mix(ways[name], sent)) for name, rows in mixed.items()},
    }


def _error(seal: Any, request: Any, rows: Sequence[State], expected: Sequence[State]) -> dict[str, float]:
    """The worst over the hospitals: of any tensor, the length of the difference by the tensor's; and the largest
    difference of all by the largest value of all."""
    import torch

    from medpfl.rounds.messages import Message

    lengths, largest = [], []
    for row, plain in zip(rows, expected, strict=True):
        if not any(tensor.dtype == torch.uint8 for tensor in row.values()):
            continue  # who was never there has nothing to decrypt
        found = seal.open(Message(request, {"model": row})).slots["model"]
        pairs = [(found[key].double(), t.double()) for key, t in plain.items() if t.is_floating_point()]
        lengths += [float((one - other).norm() / other.norm()) for one, other in pairs]
        largest.append(max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs))
    return {"length": float(f"{max(lengths):.3g}"), "largest": float(f"{max(largest):.3g}")}


# -- whole rounds -----------------------------------------------------------------------------------------------------


def _rounds(sites: int, size: int, repeats: int) -> dict[str, Any]:
    """Processor seconds of a round in one process, all hospitals one after another and the server, in which almost
    nothing is learnt; without and with encryption, in turns."""
    from medpfl.core.mixers import Mean
    from medpfl.job import Job
    from medpfl.job.settings import Settings
    from medpfl.methods.fedavg import FedAvg
    from medpfl.privacy.keys import make_key
    from medpfl.tasks.tabular import Tabular

    width = round((size + 7.84) ** 0.5 - 2.8)
    task, method = Tabular(dataset="table", hidden=(width, width)), FedAvg(steps=1, batch_size=16)
    found: dict[str, list[float]] = {"plain": [], "encrypted": []}
    with tempfile.TemporaryDirectory(prefix="medpfl-") as folder:
        place = Path(folder)
        key, _ = make_key(place)
        files = _sites(place, sites, key)
        for kind in found:
            settings = Settings(
                rounds=repeats + 1, references=(), finetune=0, encryption="ckks" if kind == "encrypted" else None
            )
            job = Job("cost", sites, settings, {"fedavg": Mean()}, method, task)
            found[kind] = _rounds_of(job, files, place / kind)
    seconds = {kind: round(float(np.median(times)), 4) for kind, times in found.items()}
    return {"round_seconds": seconds, "round": round(seconds["encrypted"] / seconds["plain"], 2)}


def _rounds_of(job: Any, files: Mapping[str, Path], place: Path) -> list[float]:
    """Seconds of each round but the first."""
    from medpfl.rounds.simulate import simulate

    ends: list[float] = []
    simulate(job, files, place / "results", place / "home", lambda _: ends.append(time.process_time()), test=False)
    return np.diff(ends).tolist()


def _sites(place: Path, sites: int, key: Path) -> dict[str, Path]:
    from medpfl.deployed.evaluate import write_text

    files = {}
    generator = np.random.default_rng(0)
    for number in range(sites):
        site = f"hospital-{number}"
        rows = [f"{a:.4f},{b:.4f},{c:.4f},{int(a > 0)}" for a, b, c in generator.normal(size=(60, 3))]
        write_text(place / f"{site}.csv", "\n".join(["a,b,c,ill", *rows]) + "\n")
        files[site] = place / f"{site}.yaml"
        write_text(
            files[site],
            f"site: {site}\nkeys: {key}\ndatasets:\n  table:\n    kind: table\n    files: [{site}.csv]\n"
            "    features: {a: number, b: number, c: number}\n"
            "    label: {column: ill, classes: {well: [0], ill: [1]}}\n",
        )
    return files


# -- tables -----------------------------------------------------------------------------------------------------------


def table_of(results: Mapping[str, Any]) -> str:
    """Markdown: bytes and rounds, seconds, errors."""
    networks = results["networks"]
    heads = [f"{one['parameters'] / 1e6:.2g} M parameters" for one in networks]
    sent = [
        ["a hospital sends, x", *(f"{one['up']:.1f}" for one in networks)],
        ["a hospital is sent, x (at most)", *(f"{one['down']:.1f}" for one in networks)],
        ["plain, MB", *(f"{one['plain_bytes'] / 1e6:.2f}" for one in networks)],
        ["a round, plain, s", *(f"{one['round_seconds']['plain']:.2f}" for one in networks)],
        ["a round, encrypted, s", *(f"{one['round_seconds']['encrypted']:.2f}" for one in networks)],
        ["a round, x", *(f"{one['round']:.1f}" for one in networks)],
    ]
    seconds = [[name, *(f"{one['seconds'][name]:.3f}" for one in networks)] for name in networks[0]["seconds"]]
    errors = [
        [f"{name}: {what}", *(f"{one['errors'][name][key]:.1e}" for one in networks)]
        for name in networks[0]["errors"]
        for key, what in (("length", "length of a tensor's difference by its own"), ("largest", "largest by largest"))
    ]
    worst = max(value for one in networks for error in one["errors"].values() for value in error.values())
    met = "met" if worst < MOST_ERROR else "missed"
    where = f"{results['sites']} hospitals, one thread, processor time, medians of {results['repeats']} turns"
    return "\n\n".join(
        [
            f"{where}:",
            markdown(["bytes and rounds", *heads], sent),
            markdown(["step, seconds", *heads], seconds),
            markdown(["relative error", *heads], errors),
            f"Largest relative error {worst:.1e}; target: below {MOST_ERROR:g}: {met}.",
        ]
    )


def command(
    sites: Annotated[int, typer.Option(help="Number of hospitals.")] = 4,
    values: Annotated[str, typer.Option(help="Parameters of the networks, separated by commas.")] = "100000,1000000",
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    out: OutOption = None,
) -> None:
    """Mixing models that the server cannot see: bytes, seconds and exactness, beside mixing them in the clear."""
    facts = machine()
    results = measure(sites, [int(size) for size in values.split(",")], repeats)
    write_json(out, "encryption", facts, results)
    say(table_of(results))
