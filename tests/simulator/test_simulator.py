# SPDX-License-Identifier: Apache-2.0
"""A packed job runs in FLARE's own simulator, a process for each hospital, and gives what ``simulate`` gives."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bounded_fedavg import BoundedFedAvg
from medpfl.core.errors import MedPFLError
from medpfl.data.site_file import ENVIRONMENT_VARIABLE
from medpfl.flare.pack import pack
from medpfl.job import EvaluationJob, Job, load_job, write_evaluation_job
from medpfl.rounds.simulate import simulate_evaluation
from small_jobs import write_table_sites
from tools import assert_same, outcome, run, write_job

pytestmark = pytest.mark.simulator


@pytest.fixture
def two_sites(table_sites: dict[str, Path]) -> dict[str, Path]:
    """Every hospital is a process more, which compiles its own copy of what was packed."""
    return {site: table_sites[site] for site in ("anna", "berta")}


def simulator(job: Path, sites: dict[str, Path], workspace: Path) -> None:
    """FLARE's simulator with a job folder."""
    command = ["-m", "nvflare.cli", "simulator", str(job), "-w", str(workspace)]
    bounded([*command, "-c", ",".join(sites), "-t", str(len(sites))], sites, workspace)


def bounded(command: list[str], sites: dict[str, Path], workspace: Path) -> str:
    """Python with a hard time limit and one more try: one in some thirty simulations loses a client for ever."""
    folder = next(iter(sites.values())).parent
    environment = {
        **os.environ,
        ENVIRONMENT_VARIABLE: str(folder),
        "HOME": str(workspace.parent),
        "OMP_NUM_THREADS": "1",
    }
    for attempt in (1, 2):
        try:
            done = subprocess.run(
                [sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                cwd=workspace.parent,
            )
        except subprocess.TimeoutExpired:
            if attempt == 2:
                raise
            continue
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout
    raise AssertionError("unreachable")


# What a user's job.py says. The two folders are not in PYTHONPATH, so the simulator's processes find neither.
RECIPE = """
import sys
sys.path[:0] = sys.argv[3:]
from bounded_fedavg import BoundedFedAvg
from nvflare.recipe import SimEnv
from small_jobs import small_job
import medpfl

job = small_job(method=BoundedFedAvg(lr=0.05, batch_size=8, bound=0.1))
recipe = medpfl.MedPFLRecipe(
    method=job.method, task=job.task, settings=job.settings, name=job.name, min_clients=job.min_clients,
    components=job.components,
)
run = recipe.execute(SimEnv(clients=sys.argv[2].split(","), workspace_root=sys.argv[1]))
print("RESULTS", medpfl.load_result(run.get_result()).folder)
"""


@pytest.mark.timeout(300)
def test_a_recipe_in_the_simulator_equals_simulate(
    make_job: Callable[..., Job], two_sites: dict[str, Path], tmp_path: Path
) -> None:
    """With a method from somebody else's package, whose code is packed too."""
    job = make_job(method=BoundedFedAvg(lr=0.05, batch_size=8, bound=0.1))
    custom = pack(write_job(job, tmp_path / "job"), tmp_path / "packed") / "app" / "custom"
    assert (custom / "medpfl" / "flare" / "controller.py").is_file()
    assert {path.name for path in custom.iterdir()} == {"medpfl", "medpfl_pack.json", "bounded_fedavg"}
    paths = [str(Path(inspect.getfile(kind)).parents[up]) for kind, up in ((BoundedFedAvg, 1), (write_table_sites, 0))]
    command = ["-c", RECIPE, str(tmp_path / "workspace"), ",".join(two_sites), *paths]
    said = bounded(command, two_sites, tmp_path / "workspace")
    results = Path(said.partition("RESULTS ")[2].splitlines()[0])
    assert_same(outcome(results), run(job, two_sites, tmp_path / "simulated"))


@pytest.mark.timeout(300)
def test_packed_evaluation_job_equals_simulate(
    make_job: Callable[..., Job], two_sites: dict[str, Path], tmp_path: Path
) -> None:
    """At one hospital, which asks nothing of others: tests/poc evaluates a model at several."""
    run(make_job(rounds=1), two_sites, tmp_path / "trained")
    model = tmp_path / "trained" / "home" / "anna" / "small" / "models" / "personal-best.safetensors"
    packed = pack(write_evaluation_job(model, tmp_path / "job"), tmp_path / "packed")
    job = load_job(packed)
    assert isinstance(job, EvaluationJob)
    one = {"berta": two_sites["berta"]}
    simulator(packed, one, tmp_path / "workspace")
    results = next((tmp_path / "workspace" / "server").rglob("results/summary.json")).parent
    simulate_evaluation(job, one, tmp_path / "simulated", tmp_path / "home")
    assert outcome(results) == outcome(tmp_path / "simulated")


def test_packing_twice_is_refused(make_job: Callable[..., Job], tmp_path: Path) -> None:
    source = write_job(make_job(), tmp_path / "job")
    folder = pack(source, tmp_path / "packed")
    assert load_job(folder).name == "small"
    with pytest.raises(MedPFLError, match="exists already"):
        pack(source, tmp_path / "packed")
