# SPDX-License-Identifier: Apache-2.0
"""One federation of provisioned hospitals (start.sh, mutual TLS, a folder each), shared by these tests.

hospital-c accepts no code inside jobs; the others do.
"""

import json
import os
import shutil
import ssl
import subprocess
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from nvflare.recipe import ProdEnv
from nvflare.recipe.run import Run
from nvflare.recipe.utils import add_experiment_tracking

from medpfl import MedPFLRecipe, load_result
from medpfl.core.codecs import CER, STC, Chain
from medpfl.demo.phantom import write_phantoms
from medpfl.flare.allow import allow
from medpfl.flare.doctor import examine
from medpfl.flare.home import ENVIRONMENT_VARIABLE as HOME_VARIABLE
from medpfl.flare.hospitals import HospitalFederation
from medpfl.flare.identity import handshake
from medpfl.flare.kits import read_kit
from medpfl.flare.pack import pack
from medpfl.flare.provision import provision
from medpfl.job import Job, load_job
from medpfl.job.codecs import Codecs
from medpfl.results.files import read_lines
from medpfl.results.trackers.scalars import scalars
from medpfl.results.trackers.tensorboard import FOLDER
from medpfl.rounds.hospital.details import read_details
from medpfl.rounds.hospital.page import PAGE
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job, write_table_sites
from tensorboard_files import shown
from theft import AT_HOSPITAL, AT_SERVER, write_theft
from tools import assert_same, deploy_to, interrupt, outcome, run, write_job

pytestmark = [pytest.mark.poc, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
SITES = ["hospital-a", "hospital-b", "hospital-c"]
VOLUMES = ["hospital-a", "hospital-c"]
FLARE_DEFAULT = Path("/tmp/nvflare")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Site files that declare two datasets each: volumes and a table."""
    folder = tmp_path_factory.mktemp("sites")
    tables = {site: yaml.safe_load(file.read_text()) for site, file in write_table_sites(folder, SITES).items()}
    assert write_phantoms(folder)[:3] == SITES
    files = {site: folder / f"{site}.yaml" for site in SITES}
    for site, file in files.items():
        content = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**content, "datasets": {**content["datasets"], **tables[site]["datasets"]}}))
    return files


@pytest.fixture(scope="module")
def federation(hospitals: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HospitalFederation]:
    before, threads = sorted(FLARE_DEFAULT.rglob("*")), set(threading.enumerate())
    shipped = (ROOT / "poc" / "project.yml").read_text().splitlines()
    project = tmp_path_factory.mktemp("project") / "project.yml"
    project.write_text("\n".join(line for line in shipped if "hospital-d" not in line))
    up = HospitalFederation(
        project,
        hospitals["hospital-a"].parent,
        SITES,
        workspace=tmp_path_factory.mktemp("federation"),
        allow_code=SITES[:2],
    )
    volume = tmp_path_factory.mktemp("volume")  # of the real federation in whose container this one is tried, say
    os.environ[HOME_VARIABLE] = str(volume)
    with up:
        del os.environ[HOME_VARIABLE]
        yield up
        started = up._members()
        assert len(started) >= 2 * (1 + len(SITES))  # a daemon and what it watches, at the server and each hospital
    assert not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not up._members()
    # FLARE's threads of a session that is still open: this process would wait for them for ever
    assert not [one for one in set(threading.enumerate()) - threads if one.name.startswith("conn_mgr")]
    for name in ("server", *SITES):  # the daemons ended by themselves, because FLARE told them to
        assert "shutdown.\n" in up._console(name).read_text()
        assert not (up.kit(name) / "daemon_pid.fl").exists()
    assert sorted(FLARE_DEFAULT.rglob("*")) == before
    assert not list(volume.iterdir())  # all that it kept lay in its own workspace
    assert (up.kit("server") / "storage" / "jobs").is_dir()


@pytest.fixture(scope="module")
def jobs(federation: HospitalFederation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, str]]:
    """Four jobs, submitted at once: each job and its id. The first has codecs; the last one is a theft, which the
    server would allow."""
    folder = tmp_path_factory.mktemp("jobs")
    phantom = load_job(ROOT / "jobs" / "softpull_phantom")
    phantom = replace(
        phantom,
        name="volumes",
        codecs=Codecs(STC(0.2), Chain(CER(0.1), STC(0.1))),
        settings=replace(phantom.settings, rounds=2, finetune=1),
        method=replace(phantom.method, steps=3),
    )
    made = [phantom, replace(small_job(), name="with-code")]
    made.append(replace(small_job(task=Tabular(dataset="unknown")), name="no-such-data"))
    folders = {job.name: write_job(job, folder / job.name) for job in made}
    deploy_to(folders["volumes"], VOLUMES)
    deploy_to(folders["no-such-data"], SITES[:2])
    folders["with-code"] = pack(folders["with-code"], folder / "packed")
    version = folders["with-code"] / "app" / "custom" / "medpfl" / "__init__.py"
    version.write_text(version.read_text().replace('__version__ = "', '__version__ = "from-the-job-'))
    submitted = {job.name: (job, federation.submit(folders[job.name])) for job in made}
    allow(federation.kit("server"), AT_SERVER)
    theft = deploy_to(write_theft(folder / "theft", secret(federation), 2), SITES[:2])
    return {**submitted, "theft": (phantom, federation.submit(theft))}


@pytest.fixture(scope="module")
def by_recipe(federation: HospitalFederation, jobs: dict[str, tuple[Job, str]]) -> tuple[Job, Run]:
    """A recipe with FLARE's tracking, submitted beside ``jobs``: plain JSON, for hospital-c takes no code."""
    made = replace(small_job(min_clients=3), name="by-recipe")
    recipe = MedPFLRecipe(
        method=made.method, task=made.task, settings=made.settings, name=made.name, min_clients=made.min_clients,
        components=made.components,
    )  # fmt: skip
    add_experiment_tracking(recipe, "tensorboard")
    lead = federation.lead
    return made, recipe.execute(ProdEnv(str(federation.kit(lead)), login_timeout=30, username=lead))


def secret(federation: HospitalFederation) -> Path:
    """A file of a hospital's machine that its site file does not declare."""
    file = federation.workspace / "patients.npy"
    if not file.exists():
        np.save(file, np.random.default_rng(7).random(64))
    return file


def wait(federation: HospitalFederation, job_id: str, expected: str = "COMPLETED") -> None:
    deadline = time.monotonic() + 200
    while not (status := federation.status(job_id)).startswith("FINISHED"):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert status == f"FINISHED:{expected}", federation.decisive_lines(job_id)


def test_whoever_logs_in_again_leaves_no_session_open(federation: HospitalFederation) -> None:
    before = federation.session
    federation.log_in(federation.submitter)
    assert before.api.closed and not federation.session.api.closed
    assert len(federation.session.get_system_info().client_info) == len(SITES)


def test_each_hospital_has_a_folder_of_its_own(federation: HospitalFederation) -> None:
    assert sorted(path.name for path in federation.workspace.iterdir() if path.is_dir()) == sorted(
        ["centre", "server", *SITES, federation.lead, federation.admin]
    )
    for site in SITES:
        kit = federation.kit(site)
        site_file = yaml.safe_load((kit / "local" / f"{site}.yaml").read_text())
        for path in (site_file["datasets"]["organ"]["datalist"], *site_file["datasets"]["blood"]["files"]):
            assert (kit / "local" / path).resolve().is_relative_to(federation.workspace / site / "data")
        datalist = json.loads((federation.workspace / site / "data" / site / "datalist.json").read_text())
        assert (federation.workspace / site / "data" / site / datalist["test"][0]["image"]).is_file()
        assert read_kit(kit).key.read_bytes() != read_kit(federation.kit("server")).key.read_bytes()


def test_a_job_gives_what_simulate_gives(
    federation: HospitalFederation, jobs: dict[str, tuple[Job, str]], hospitals: dict[str, Path], tmp_path: Path
) -> None:
    job, job_id = jobs["volumes"]
    wait(federation, job_id)
    two = {site: hospitals[site] for site in VOLUMES}
    assert_same(outcome(federation.download(job_id)), run(replace(job, min_clients=2), two, tmp_path / "simulated"))
    for site in VOLUMES:
        assert f"of {site}" in (federation.models(site, "volumes") / "personal-best.md").read_text()
        log = (federation.run_folder(site, job_id) / "log.txt").read_text()
        # The job's own process has a connection of its own, with the kit's certificates.
        assert f"{federation.port} SSL {federation.server}] is created" in log
    at_server = [path for path in federation.kit("server").rglob("*") if path.is_file()]
    downloaded = [path for path in (federation.workspace / "downloads" / job_id).rglob("*") if path.is_file()]
    for site in VOLUMES:  # each has its page with pictures of its patients, and nobody else has any of it
        models = federation.models(site, "volumes")
        simulated = tmp_path / "simulated" / "home" / site / "volumes" / "models"
        pictures = read_details(models / "chosen-best.safetensors").pictures
        assert pictures and pictures == read_details(simulated / "chosen-best.safetensors").pictures
        page = (models / PAGE).read_text()
        assert (models / PAGE).stat().st_mode & 0o077 == 0 and all(one.png in page for one in pictures)
        secrets = [secret for one in pictures for secret in (one.png[40:100].encode(), b64decode(one.png)[30:90])]
        for path in at_server + downloaded:
            assert path.name != PAGE and not any(secret in path.read_bytes() for secret in secrets), path


def test_a_recipe_in_a_federation_equals_simulate_and_is_seen_in_tensorboard(
    by_recipe: tuple[Job, Run], hospitals: dict[str, Path], tmp_path: Path
) -> None:
    job, running = by_recipe
    results = load_result(running.get_result()).folder
    assert running.get_status() == "FINISHED:COMPLETED"
    assert_same(outcome(results), run(job, hospitals, tmp_path / "simulated"))
    wanted = [one._replace(value=float(np.float32(one.value))) for one in scalars(read_lines(results))]
    assert shown(results / FOLDER) == sorted(wanted)
    assert {one.site for one in wanted} == {*SITES, "mean", "server"}


def test_a_hospital_refuses_a_job_with_code_and_the_others_go_on(
    federation: HospitalFederation, jobs: dict[str, tuple[Job, str]], hospitals: dict[str, Path], tmp_path: Path
) -> None:
    job, job_id = jobs["with-code"]
    wait(federation, job_id)
    deployed = str(federation.session.get_job_meta(job_id)["job_deploy_detail"])
    assert "hospital-c: NVFLARE_ERROR: BYOC not permitted" in deployed and deployed.count("ERROR") == 1
    downloaded = federation.download(job_id)
    events = json.loads((downloaded / "summary.json").read_text())["events"]
    said = "takes no part: it is not connected, or it refused the job"
    assert {"round": 0, "site": "hospital-c", "event": said} in events
    two = {site: hospitals[site] for site in SITES[:2]}
    assert_same(outcome(downloaded), run(job, two, tmp_path / "simulated"))
    assert not list(federation.kit("hospital-c").rglob("medpfl_pack.json"))  # the code did not get there
    assert len(list(federation.kit("hospital-a").rglob("medpfl_pack.json"))) == 1
    # Where the package is installed, it is what runs: FLARE puts the job's copy behind it.
    assert "from-the-job" not in (downloaded / "summary.json").read_text()
    assert "from-the-job" not in (federation.models("hospital-a", "with-code") / "personal-best.md").read_text()


def test_no_path_and_no_file_leaves_a_hospital(
    federation: HospitalFederation, jobs: dict[str, tuple[Job, str]]
) -> None:
    """FLARE's defaults upload a hospital's error log, and let the project admin read files of its kit."""
    job_id = jobs["no-such-data"][1]
    wait(federation, job_id, "EXECUTION_EXCEPTION")
    place = str(federation.workspace / "hospital-b")
    assert f"{place}/kit/local" in (federation.run_folder("hospital-b", job_id) / "error_log.txt").read_text()
    sent = [path for path in federation.kit("server").rglob("*") if path.is_file()]
    assert not [path for path in sent if place.encode() in path.read_bytes() or "ERRORLOG_" in path.name]
    assert b"dataset 'unknown' is not declared at this hospital" in b"".join(path.read_bytes() for path in sent)
    wait(federation, jobs["with-code"][1])
    file = "medpfl/with-code/models/personal-best.csv"
    assert (federation.kit("hospital-b") / file).is_file()
    admin = federation._open_session(federation.admin)
    try:
        said = str(admin.cat_target("hospital-b", file=file))
        assert (federation.kit("hospital-b") / file).read_text()[:20] not in said
    finally:
        admin.close()


def test_a_file_that_no_site_file_declares_does_not_leave_a_hospital(
    federation: HospitalFederation, jobs: dict[str, tuple[Job, str]]
) -> None:
    """Where hospitals allow FLARE's default classes, the same job brings the array into the lead's download."""
    job_id = jobs["theft"][1]
    wait(federation, job_id, "ABNORMAL")
    said = (federation.run_folder("hospital-b", job_id) / "error_log.txt").read_text()
    assert "ComponentNotAuthorized" in said and f"'{AT_HOSPITAL[0]}'" in said
    array = np.load(secret(federation)).tobytes()
    assert array in secret(federation).read_bytes()
    federation.download(job_id)
    downloaded = federation.workspace / "downloads" / job_id
    assert (downloaded / "meta.json").is_file()
    for place in (downloaded, federation.kit("server")):
        assert not [path for path in place.rglob("*") if path.is_file() and array[:64] in path.read_bytes()]


def test_a_hospital_takes_no_job_into_which_flare_would_put_something_of_its_machine(
    federation: HospitalFederation, tmp_path: Path
) -> None:
    """The server has an app of its own, so that only the hospitals see what names the variable."""
    folder = deploy_to(write_job(replace(small_job(), name="with-variable"), tmp_path / "job"), SITES[:2])
    shutil.copytree(folder / "app", folder / "app_of_hospitals")
    file = folder / "app_of_hospitals" / "config" / "config_fed_client.json"
    text = file.read_text()
    assert text.count('"dataset": "') == 1
    file.write_text(text.replace('"dataset": "', '"dataset": "{WORKSPACE} '))
    meta = json.loads((folder / "meta.json").read_text())
    meta["deploy_map"] = {"app": ["server"], "app_of_hospitals": SITES[:2]}
    (folder / "meta.json").write_text(json.dumps(meta))
    job_id = federation.submit(folder)
    deadline = time.monotonic() + 120
    while not federation.status(job_id).startswith("FINISHED"):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    told = str(federation.session.get_job_meta(job_id)["job_deploy_detail"])
    assert told.count("names a variable, which this site fills in for no job") == 2
    named = b"dataset '" + str(federation.workspace).encode()
    assert not [p for p in federation.kit("server").rglob("*") if p.is_file() and named in p.read_bytes()]


def test_the_wire_is_mutual_tls(federation: HospitalFederation) -> None:
    kit = read_kit(federation.kit("hospital-a"))
    assert handshake(kit, "localhost").endswith("with 'server.example.org'")
    with pytest.raises(ssl.SSLError, match="certificate required"):
        handshake(kit, "localhost", certificate=False)
    stranger = replace(kit, root=Path(ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(stranger, "localhost")


@pytest.mark.parametrize("name", ["hospital-a", "server", "lead@hospital-a.example.org"])
def test_the_doctor_finds_nothing_at_a_running_kit(federation: HospitalFederation, name: str) -> None:
    findings = list(examine(federation.kit(name)))
    assert not [finding for finding in findings if finding.status == "problem"]
    server = next(finding.text for finding in findings if finding.check == "server")
    assert "it runs: TLS" in server if name == "server" else "both sides' certificates accepted" in server


def test_the_doctor_tells_that_the_server_refuses_a_kit(federation: HospitalFederation, tmp_path: Path) -> None:
    """A certificate of another federation, with the same names."""
    other = provision(ROOT / "poc" / "project.yml", tmp_path).folder / "hospital-a"
    kit = tmp_path / "kit"
    shutil.copytree(federation.kit("hospital-a"), kit, ignore=shutil.ignore_patterns("*.fl"))  # it does not run
    for name in ("client.crt", "client.key"):
        shutil.copy(other / "startup" / name, kit / "startup" / name)
    problems = {finding.check: finding for finding in examine(kit) if finding.status == "problem"}
    assert problems.keys() == {"certificates", "server"}
    assert "was not issued by rootCA.pem" in problems["certificates"].text
    assert "refuses this kit's certificate" in problems["server"].text and problems["server"].mend


def test_the_leads_console(federation: HospitalFederation, tmp_path: Path) -> None:
    kit = federation.kit(federation.lead)
    folder = write_job(replace(small_job(), name="from-the-console"), kit / "transfer" / "jobs" / "from-the-console")
    deploy_to(folder, SITES[:2])
    commands = [federation.lead, "check_status server", "submit_job jobs/from-the-console"]
    commands += ["shutdown server", federation.lead, "bye", ""]
    done = subprocess.run(
        ["bash", "-c", federation.console_command()],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert "Registered clients: 3" in done.stdout and "Submitted job" in done.stdout, done.stdout + done.stderr
    assert "is not authorized for 'shutdown'" in done.stdout  # to shut down is the project admin's right
    newest = max(federation.session.list_jobs(), key=lambda entry: entry["submit_time"])
    assert newest["job_name"] == "from-the-console"  # it still runs when the federation is stopped


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    interrupt("hospitals", tmp_path, 90)
