# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' command, run from a checkout: ``python -m benchmarks``, one verb each."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import attacks, choice, mirroring, privacy_verbs, split
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError

app = typer.Typer(no_args_is_help=True, help="Benchmarks; each prints its numbers as ratios inside one run.")
app.add_typer(split.app, name="split")
app.command("attacks")(attacks.command)
app.command("choice")(choice.command)
app.command("mirroring")(mirroring.command)
app.command("privacy")(privacy_verbs.heart)
app.command("privacy-skin")(privacy_verbs.skin)

SeedsOption = Annotated[int, typer.Option(help="Number of seeds.")]
OutOption = Annotated[Path | None, typer.Option(help="JSON file for the numbers and the machine's facts.")]


@app.command("table")
def table(
    file: Annotated[Path, typer.Argument(help="A result: docs/results/mixing.json, a comparison's .json.xz.")],
) -> None:
    """Print a stored result's tables as Markdown, without measuring anything."""
    from benchmarks.tables import tables_of

    say(tables_of(file))


@app.command("mixing")
def bench_mixing(
    sites: Annotated[int, typer.Option(help="Number of models.")] = 20,
    values: Annotated[int, typer.Option(help="float32 values of a model.")] = 5_000_000,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 7,
    out: OutOption = None,
) -> None:
    """Mixing K models, as a multiple of cloning and of copying them."""
    from benchmarks import common, mixing

    facts = common.machine()
    results = mixing.measure(sites, values, repeats)
    common.write_json(out, "mixing", facts, results)
    say(mixing.table_of(results))


@app.command("encryption")
def bench_encryption(
    sites: Annotated[int, typer.Option(help="Number of hospitals.")] = 4,
    values: Annotated[str, typer.Option(help="Parameters of the networks, separated by commas.")] = "100000,1000000",
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    out: OutOption = None,
) -> None:
    """Mixing models that the server cannot see: bytes, seconds and exactness, beside mixing them in the clear."""
    from benchmarks import common, encryption

    facts = common.machine()
    results = encryption.measure(sites, [int(size) for size in values.split(",")], repeats)
    common.write_json(out, "encryption", facts, results)
    say(encryption.table_of(results))


@app.command("fuzz")
def bench_fuzz(
    count: Annotated[int, typer.Option(help="Mutations.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the mutations.")] = 0,
) -> None:
    """Mutated replies, requests and state files through the real way in; exit code 1 if anything gets through."""
    from benchmarks import fuzz

    found = fuzz.run(count, seed)
    say(fuzz.told(found))
    raise typer.Exit(1 if found.faults else 0)


@app.command("convolutions")
def bench_convolutions(
    out: Annotated[Path | None, typer.Option(help="File to append to, a line for each convolution at fault.")] = None,
    order: Annotated[str, typer.Option(help="channels_last or contiguous.")] = "channels_last",
    table: Annotated[Path | None, typer.Option(help="Only print the table of an earlier sweep.")] = None,
) -> None:
    """Which convolutions write outside their memory on this processor (needs a C compiler; a few minutes)."""
    from benchmarks import convolution_sweep

    if (out is None) == (table is None) or order not in ("channels_last", "contiguous"):
        raise typer.BadParameter("give either --out or --table; the order is channels_last or contiguous")
    if table is not None:
        say(convolution_sweep.table_of(table))
    elif out is not None:
        raise typer.Exit(convolution_sweep.guarded_sweep(out, order))


@app.command("rounds")
def bench_rounds(
    sites: Annotated[int, typer.Option(help="Number of hospitals.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of each job; the first is not counted.")] = 15,
    values: Annotated[int, typer.Option(help="float32 values of the model, about.")] = 100_000,
    interval: Annotated[float, typer.Option(help="task_request_interval of our job, seconds.")] = 0.1,
    out: OutOption = None,
) -> None:
    """A round without training in POC: this package's controller beside FLARE's stock FedAvg recipe."""
    from benchmarks import common
    from benchmarks import rounds as bench

    facts = common.machine()
    results = bench.measure(sites, rounds, values, interval, say)
    common.write_json(out, "rounds", facts, results)
    say(bench.table_of(results))


@app.command("pfllib")
def bench_pfllib(
    pfllib: Annotated[Path, typer.Option(help="Checkout of github.com/TsingZ0/PFLlib; it needs h5py installed.")],
    rounds: Annotated[int, typer.Option(help="Rounds of a run; the first is not counted.")] = 7,
    repeats: Annotated[int, typer.Option(help="How often the arms start anew; medians are reported.")] = 3,
    out: OutOption = None,
) -> None:
    """FedAvg and Ditto in process: this package's engine beside PFLlib's own code and the bare loop."""
    from benchmarks import common
    from benchmarks import pfllib as bench

    facts = common.machine()
    results = bench.measure(pfllib, rounds, repeats, say)
    common.write_json(out, "pfllib", facts, results)
    say(bench.table_of(results))


@app.command("reading")
def bench_reading(
    images: Annotated[int, typer.Option(help="Number of JPEG files.")] = 1000,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    budget_mb: Annotated[float, typer.Option(help="Memory budget for the data larger than it, MB.")] = 100,
    out: OutOption = None,
) -> None:
    """Reading images, as a multiple of the training that waits for them; memory beside its budget."""
    from benchmarks import common, reading

    facts = common.machine()
    results = reading.measure(images, repeats, budget_mb)
    common.write_json(out, "reading", facts, results)
    say(reading.table_of(results))


@app.command("caching")
def bench_caching(
    data: Annotated[Path | None, typer.Option(help="As for 'medpfl demo hippocampus'.")] = None,
    volumes: Annotated[int, typer.Option(help="Hippocampus volumes.")] = 40,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    out: OutOption = None,
) -> None:
    """Loading data whose prepared cases are kept on disk, as a multiple of loading them without."""
    from benchmarks import caching, common

    facts = common.machine()
    results = caching.measure(data, volumes, repeats)
    common.write_json(out, "caching", facts, results)
    say(caching.table_of(results))


@app.command("augmenting")
def bench_augmenting(
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 5,
    out: OutOption = None,
) -> None:
    """A training step with augmentation, as a multiple of one without, in 2-D and 3-D."""
    from benchmarks import augmenting, common

    facts = common.machine()
    results = augmenting.measure(repeats)
    common.write_json(out, "augmenting", facts, results)
    say(augmenting.table_of(results))


@app.command("gpu")
def bench_gpu(
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    small: Annotated[bool | None, typer.Option(help="Small networks; default: where there is no GPU.")] = None,
    out: OutOption = None,
) -> None:
    """Training on this machine's GPU, or processor, beside a bare loop; the methods' rounds; peak memory."""
    from benchmarks import common, gpu
    from medpfl.core.devices import training_device

    facts = common.machine()
    results = gpu.measure(repeats, training_device().type == "cpu" if small is None else small)
    common.write_json(out, "gpu", facts, results)
    say(gpu.table_of(results))


@app.command("prox")
def bench_prox(
    sites: Annotated[int, typer.Option(help="Number of models.")] = 20,
    values: Annotated[int, typer.Option(help="float32 values of a model's personal part.")] = 1_000_000,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 6,
    out: OutOption = None,
) -> None:
    """pFedNet's update of the personal models, exact in Gram space, beside the paper's ADMM."""
    from benchmarks import common, prox

    facts = common.machine()
    results = prox.measure(sites, values, repeats)
    common.write_json(out, "prox", facts, results)
    say(prox.table_of(results))


@app.command("codecs")
def bench_codecs(
    values: Annotated[int, typer.Option(help="float32 values of the update.")] = 10_000_000,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 5,
    out: OutOption = None,
) -> None:
    """Speed and size of every codec; CER's exact solver beside the paper's ADMM."""
    from benchmarks import codecs, common

    facts = common.machine()
    results = codecs.measure(values, repeats, say)
    common.write_json(out, "codecs", facts, results)
    say(codecs.table_of(results))


@app.command("teaching")
def bench_teaching(
    images: Annotated[int, typer.Option(help="Number of generated images.")] = 480,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 5,
    out: OutOption = None,
) -> None:
    """A local round of CusFL, as a multiple of local training of the same network."""
    from benchmarks import common, teaching

    facts = common.machine()
    results = teaching.measure(images, repeats)
    common.write_json(out, "teaching", facts, results)
    say(teaching.table_of(results))


@app.command("moments")
def bench_moments(
    studies: Annotated[str, typer.Option(help="Names, separated by commas; see benchmarks/moments.py.")] = (
        "heart,label-skew,feature-shift,phantom"
    ),
    seeds: SeedsOption = 5,
    out: OutOption = None,
) -> None:
    """Adam's moments where a round replaces the weights: kept, forgotten, or mixed as the weights are."""
    from benchmarks import common, moments

    facts = common.machine()

    def keep(scores: moments.Results) -> None:
        common.write_json(out, "moments", facts, {"scores": scores})

    scores = moments.measure(studies.split(","), seeds, moments.finished(out), keep)
    say(moments.table_of({"scores": scores}))


@app.command("messenger")
def bench_messenger(
    images: Annotated[int, typer.Option(help="Number of generated images.")] = 160,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    out: OutOption = None,
) -> None:
    """MH-pFLID's messenger beside the hospitals' networks: weights, multiplications, bytes, and time of a round."""
    from benchmarks import common, messenger

    facts = common.machine()
    results = messenger.measure(images, repeats)
    common.write_json(out, "messenger", facts, results)
    say(messenger.table_of(results))


@app.command("phantom")
def bench_phantom(seeds: SeedsOption = 3, out: OutOption = None) -> None:
    """softpull_phantom against local training, FedAvg and FedAvg + fine-tuning, over several seeds."""
    from benchmarks import common, phantom

    facts = common.machine()
    results = phantom.measure(seeds, say)
    common.write_json(out, "phantom", facts, results)
    say(phantom.table_of(results))


@app.command("fedsm")
def bench_fedsm(
    rounds: Annotated[int, typer.Option(help="Rounds of each method and turn; the first is not counted.")] = 4,
    repeats: Annotated[int, typer.Option(help="Turns; the median is reported.")] = 5,
    seeds: Annotated[int, typer.Option(help="Seeds of the selector's accuracy; 0: leave it out.")] = 3,
    out: OutOption = None,
) -> None:
    """A round of FedSM as a multiple of one of FedAvg, its bytes beside NVFlare's example, its selector's accuracy."""
    from benchmarks import common, fedsm

    facts = common.machine()
    results = fedsm.measure(rounds, repeats, say)
    results["selector_accuracy"] = {str(seed): fedsm.selector_accuracy(seed) for seed in range(seeds)}
    common.write_json(out, "fedsm", facts, results)
    say(fedsm.table_of(results))


@app.command("faults")
def bench_faults(
    only: Annotated[str, typer.Option(help="Only the faults whose words hold this.")] = "",
    out: OutOption = None,
) -> None:
    """Every fault that a federation must survive, done to four provisioned hospitals on this machine."""
    from benchmarks import common, faults

    facts = common.machine()
    found = []
    for one in faults.measure(only):
        found.append(one)
        say(f"{one.fault}: {one.verdict} ({one.seconds:.0f} s)")
        common.write_json(out, "faults", facts, faults.as_results(found, out))
    say(faults.table_of(faults.as_results(found, None)))
    if any(one.verdict.isupper() or "NOTHING" in one.verdict for one in found):
        raise typer.Exit(1)


@app.command("soak")
def bench_soak(
    rounds: Annotated[int, typer.Option(help="Rounds of the job.")] = 300,
    hospitals: Annotated[int, typer.Option(help="Number of hospitals, 2 to 4.")] = 4,
    interval: Annotated[float, typer.Option(help="Seconds between two looks at the processes.")] = 3.0,
    out: OutOption = None,
) -> None:
    """Many rounds on provisioned hospitals: does memory, a thread, a file or a socket grow, and what is left behind.

    With --out, a picture beside the JSON file, too; exit code 1 if anything grew beyond its limit or was left."""
    from benchmarks import common, soak

    facts = common.machine()
    results = soak.measure(rounds, hospitals, interval, say)
    common.write_json(out, "soak", facts, results)
    if out is not None:
        soak.draw(results, out.with_suffix(".svg"))
    say(soak.table_of(results))
    raise typer.Exit(1 if soak.faults(results) else 0)


@app.command("heart")
def bench_heart(
    data: Annotated[Path | None, typer.Option(help="Folder with the UCI processed.*.data files.")] = None,
    flamby: Annotated[Path | None, typer.Option(help="Folder with FLamby's heart_seed<N>.csv.")] = None,
    seeds: SeedsOption = 5,
    out: OutOption = None,
) -> None:
    """FLamby's Fed-Heart-Disease protocol, with SoftPull beside it."""
    from benchmarks import common, heart

    facts = common.machine()
    results = heart.measure(data, seeds, flamby, say)
    common.write_json(out, "heart", facts, results)
    say(heart.table_of(results))


@app.command("fedap")
def bench_fedap(
    seeds: SeedsOption = 5,
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = 25,
    out: OutOption = None,
) -> None:
    """FedAP on 20 hospitals with unlike labels: does W find who shares them, and does it help; and what it costs."""
    from benchmarks import common, fedap

    facts = common.machine()
    results = {"study": fedap.measure(seeds, rounds, say, out), "cost": fedap.cost()}
    common.write_json(out, "fedap", facts, results)
    say(fedap.table_of(results))


def main() -> None:
    """A MedPFLError is one sentence on stderr and exit code 1, as of ``medpfl``."""
    try:
        app(prog_name="python -m benchmarks")
    except MedPFLError as error:
        Console(stderr=True).print(f"benchmarks: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
