# SPDX-License-Identifier: Apache-2.0
"""``benchmarks codecs``: what encoding and decoding costs and saves, and CER's exact solver beside the paper's ADMM.

All times are processor time of one thread, so that other work changes them less.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.common import OutOption, environment, machine, markdown, write_json
from medpfl.cli.terminal import say
from medpfl.core.codecs import CER, STC, Chain, Codec, DAdaQuant, Half, decode
from medpfl.core.codecs.cer import denoise, denoise_admm, objective
from medpfl.core.errors import MedPFLError

ADMM_ITERATIONS = 100
STC_SPEED, CER_SPEED_UP, LINEAR = 100.0, 30.0, 2.0
CODECS: dict[str, Codec] = {
    "fp16": Half(), "STC, p = 0.01": STC(0.01), "STC, p = 0.2": STC(0.2),
    "CER, gamma = 0.3": CER(0.3), "CER, gamma = 3": CER(3.0), "CER (0.3) + STC (0.01)": Chain(CER(0.3), STC(0.01)),
    "DAdaQuant, q = 1": DAdaQuant(1), "DAdaQuant, q = 16": DAdaQuant(16),
}  # fmt: skip


def measure(values: int, repeats: int, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Speeds and sizes for an update of ``values`` float32 (normal noise), and CER's solvers for as many and fewer."""
    for name, value, least in (("values", values, 1000), ("repeats", repeats, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    lengths = [values // 100, values // 10, values]
    say("first calls ...")
    first = _first_calls()
    say("codecs ...")
    coding = _coding(values, repeats)
    say("CER ...")
    return {
        "values": values, "repeats": repeats, "first_call_seconds": first, "codecs": coding,
        "cer_lengths": _lengths(lengths, repeats), "cer_admm": _against_admm(lengths[1], repeats),
    }  # fmt: skip


def _timed(job: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = job()
    return time.process_time() - started, result


def _coding(values: int, repeats: int) -> dict[str, dict[str, float]]:
    update = {"w": torch.randn(values, generator=torch.Generator().manual_seed(0))}
    raw = 4 * values
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CODECS}
    sizes = {}
    for turn in range(repeats + 1):  # in turns; the first warms up
        for name, codec in CODECS.items():
            encoding, data = _timed(partial(codec.encode, update))
            decoding, _ = _timed(partial(decode, data, update))
            sizes[name] = len(data)
            if turn:
                times[name].append((encoding, decoding))
    found = {}
    for name, pairs in times.items():
        encoding, decoding = (float(np.median(column)) for column in zip(*pairs, strict=True))
        found[name] = {
            "encode_mb_per_s": round(raw / 1e6 / encoding, 1),
            "decode_mb_per_s": round(raw / 1e6 / decoding, 1),
            "both_mb_per_s": round(raw / 1e6 / (encoding + decoding), 1),
            "ratio": round(raw / sizes[name], 2),
            "bits_per_value": round(8 * sizes[name] / values, 4),
        }
    return found


def _signals(length: int) -> dict[str, NDArray[np.float64]]:
    noise = np.random.default_rng(0).normal(size=length)
    return {"noise": noise, "walk": np.cumsum(noise), "ramp": np.arange(length) / 100.0}


def _lengths(lengths: list[int], repeats: int) -> dict[str, dict[str, float]]:
    """Nanoseconds of the exact solver per entry; gamma = 0.3 mean magnitudes."""
    times: dict[str, dict[str, list[float]]] = {}
    for turn in range(repeats + 1):
        for length in lengths:
            for name, signal in _signals(length).items():
                gamma = 0.3 * float(np.abs(signal).mean())
                seconds, _ = _timed(partial(denoise, signal, gamma))
                if turn:
                    times.setdefault(name, {}).setdefault(str(length), []).append(1e9 * seconds / length)
    return {
        name: {length: round(float(np.median(found)), 1) for length, found in by_length.items()}
        for name, by_length in times.items()
    }


def _against_admm(length: int, repeats: int) -> dict[str, float]:
    signal = _signals(length)["noise"]
    gamma = 0.3 * float(np.abs(signal).mean())
    times: dict[str, list[float]] = {"exact": [], "admm": []}
    for _ in range(max(1, repeats // 2)):
        seconds, exact = _timed(lambda: denoise(signal, gamma))
        times["exact"].append(seconds)
        seconds, iterated = _timed(lambda: denoise_admm(signal, gamma, ADMM_ITERATIONS))
        times["admm"].append(seconds)
    return {
        "length": length,
        "exact_seconds": float(np.median(times["exact"])),
        "admm_seconds": float(np.median(times["admm"])),
        "faster": round(float(np.median(times["admm"]) / np.median(times["exact"])), 1),
        "exact_objective": objective(exact, signal, gamma),
        "admm_objective": objective(iterated, signal, gamma),
    }


def _first_calls() -> dict[str, list[float]]:
    """Seconds, of the processor and on the clock, that all codecs' first messages take in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        cached = environment(NUMBA_CACHE_DIR=folder)
        found = {}
        for name in ("compiling", "from disk"):
            command = [sys.executable, "-m", "benchmarks.codecs"]
            done = subprocess.run(command, env=cached, capture_output=True, text=True, check=False)
            if done.returncode:
                raise MedPFLError(f"measuring the first call failed: {done.stderr.strip()[-300:]}")
            found[name] = [round(seconds, 2) for seconds in json.loads(done.stdout)]
    return found


def _call_all() -> list[float]:
    processor, started = time.process_time(), time.perf_counter()
    update = {"w": torch.randn(1000)}
    for codec in CODECS.values():
        decode(codec.encode(update), update)
    return [time.process_time() - processor, time.perf_counter() - started]


def table_of(results: dict[str, Any]) -> str:
    """Speeds, sizes and ratios, and whether the targets are met."""
    rows = []
    for name, codec in results["codecs"].items():
        target = ""
        if name.startswith("STC"):
            target = f"{'met' if codec['both_mb_per_s'] >= STC_SPEED else 'missed'} (at least {STC_SPEED:g})"
        speeds = [f"{codec[key]:.0f}" for key in ("encode_mb_per_s", "decode_mb_per_s", "both_mb_per_s")]
        rows.append([name, *speeds, target, f"{codec['bits_per_value']:.3f}", f"{codec['ratio']:.1f}"])
    lengths = results["cer_lengths"]
    spread = max(max(by.values()) / min(by.values()) for by in lengths.values())
    admm, first = results["cer_admm"], results["first_call_seconds"]
    lower = admm["exact_objective"] <= admm["admm_objective"] * (1 + 1e-12)
    return (
        f"An update of {results['values']} float32 (normal noise), processor time of one thread, medians of "
        f"{results['repeats']} turns; MB of the update as it is:\n\n"
        + markdown(
            ["codec", "encode MB/s", "decode MB/s", "both MB/s", "target for both", "bits per value", "ratio"], rows
        )
        + "\n\nCER's exact solver, ns per entry:\n\n"
        + markdown(
            ["signal", *(f"{int(length):,}" for length in lengths["noise"])],
            [[name, *(f"{value:g}" for value in by.values())] for name, by in lengths.items()],
        )
        + f"\n\nLinear: {'met' if spread <= LINEAR else 'missed'} (time per entry within a factor {LINEAR:g}; "
        f"{spread:.2f}). Beside the paper's ADMM with {ADMM_ITERATIONS} iterations and a banded solve, on "
        f"{admm['length']:,} entries of noise: {admm['exact_seconds']:.3f} s and {admm['admm_seconds']:.2f} s, "
        f"{admm['faster']:g} times as fast ({'met' if admm['faster'] >= CER_SPEED_UP else 'missed'}: at least "
        f"{CER_SPEED_UP:g}), objective {admm['exact_objective']:.6f} and {admm['admm_objective']:.6f} "
        f"({'met' if lower else 'missed'}: lower or equal).\n\nThe first messages of all codecs in a fresh process: "
        f"{first['compiling'][0]:.1f} s of the processor when everything is compiled ({first['compiling'][1]:.1f} s on "
        f"the clock), {first['from disk'][0]:.2f} s afterwards."
    )


def command(
    values: Annotated[int, typer.Option(help="float32 values of the update.")] = 10_000_000,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 5,
    out: OutOption = None,
) -> None:
    """Speed and size of every codec; CER's exact solver beside the paper's ADMM."""
    facts = machine()
    results = measure(values, repeats, say)
    write_json(out, "codecs", facts, results)
    say(table_of(results))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_call_all()))
