# SPDX-License-Identifier: Apache-2.0
"""Where a person's console writes what a server sends: FLARE's own file transfer, between two of FLARE's cells, with a
server that says whatever it likes."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.streaming.file_downloader import ObjectDownloader, add_file
from nvflare.fuel.hci.client import cli
from nvflare.fuel.hci.client.api import AdminAPI
from nvflare.fuel.hci.client.api_spec import CommandContext
from nvflare.fuel.hci.client.api_status import APIStatus
from nvflare.fuel.hci.client.cli import AdminClient
from nvflare.fuel.hci.client.config import secure_load_admin_config
from nvflare.fuel.hci.client.file_transfer import FileTransferModule
from nvflare.fuel.hci.cmd_arg_utils import split_to_args
from nvflare.fuel.hci.proto import MetaKey, ProtoKey

from cells import Cells
from medpfl.cli import main
from medpfl.flare.console import Guard, check_console
from medpfl.flare.kits import read_kit
from medpfl.flare.provision import Provisioned, provision

ROOT = Path(__file__).resolve().parents[2]


class Console:
    """What of FLARE's ``AdminAPI`` a download uses, its ``download_file`` itself; the server's answer is ``said``."""

    download_file = AdminAPI.download_file

    def __init__(self, cells: Cells, folder: Path):
        self.cell = cells.of("console")
        self.file_download_progress_timeout = 10.0
        self.session_abort_signal = Signal()
        self.logger = logging.getLogger(__name__)
        self.module = FileTransferModule(str(folder), str(folder))
        self.said: dict[str, object] = {}

    def download(self, job: str) -> dict[str, Any]:
        return self.module.pull_folder(["download_job", job], self._context())  # type: ignore[no-any-return]

    def do_command(self, command: str) -> object:
        return self.module.pull_binary_file(split_to_args(command), self._context())

    def server_execute(self, command: str, cmd_ctx: CommandContext | None = None) -> object:
        if cmd_ctx is None:
            return {ProtoKey.STATUS: APIStatus.SUCCESS, ProtoKey.META: self.said}
        cmd_ctx.get_requester().send_request(self, None, cmd_ctx)
        return cmd_ctx.get_command_result()

    def fire_session_event(self, event: str, text: str) -> None:
        pass

    def debug(self, text: str) -> None:
        pass

    def _print_hci(self, text: str) -> None:
        pass

    def _context(self) -> CommandContext:
        context = CommandContext()
        context.set_api(self)
        context.set_command_entry(self)
        return context

    def full_command_name(self) -> str:
        return "download_job"


PATCHED = [(FileTransferModule, "_tx_path"), (FileTransferModule, "pull_binary_file"), (AdminClient, "__init__")]


@pytest.fixture
def flares(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """FLARE's own again afterwards."""
    for kind, name in PATCHED:
        monkeypatch.setattr(kind, name, getattr(kind, name))
    return monkeypatch


@pytest.fixture
def console(cells: Cells, tmp_path: Path, flares: pytest.MonkeyPatch) -> Console:
    Guard()
    folder = tmp_path / "kit" / "transfer"
    folder.mkdir(parents=True)
    return Console(cells, folder)


@pytest.fixture
def offer(cells: Cells, console: Console, tmp_path: Path) -> Iterator[Any]:
    """Let the server offer files by these names."""
    sent = tmp_path / "sent"
    sent.write_text("from the server")
    made: list[ObjectDownloader] = []

    def offer(names: list[str], transaction: str = "1234") -> None:
        made.append(ObjectDownloader(num_receivers=1, cell=cells.server, timeout=30.0))
        files = [[name, add_file(made[-1], file_name=str(sent))] for name in names]
        source = cells.server.get_fqcn()
        console.said = {MetaKey.FILES: files, MetaKey.TX_ID: transaction, MetaKey.SOURCE_FQCN: source}

    yield offer
    for one in made:
        one.delete_transaction()


def test_what_a_server_sends_arrives_in_the_folder(console: Console, offer: Any, tmp_path: Path) -> None:
    offer(["meta.json", "models/a.safetensors", "two words"])
    got = console.download("job")
    assert got[ProtoKey.STATUS] == APIStatus.SUCCESS
    folder = tmp_path / "kit" / "transfer" / "job"
    assert got[ProtoKey.META][MetaKey.LOCATION] == str(folder)
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == ["meta.json", "models/a.safetensors", "two words"]
    assert (folder / "meta.json").read_text() == "from the server"


@pytest.mark.parametrize(
    "name", ["{home}/.bashrc", "../../../home/.bashrc", "models/../../../../home/.bashrc", "..", "."]
)
def test_a_server_writes_to_no_other_place(console: Console, offer: Any, tmp_path: Path, name: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("the lead's own")
    offer(["meta.json", name.format(home=home)])
    got = console.download("job")
    assert got[ProtoKey.STATUS] == APIStatus.ERROR_RUNTIME
    assert "refused: the server names a file outside of the download's folder" in got[ProtoKey.DETAILS]
    assert (home / ".bashrc").read_text() == "the lead's own"
    assert [path.name for path in home.iterdir()] == [".bashrc"]
    assert not list((tmp_path / "kit" / "transfer").iterdir())  # of what came before it, too


@pytest.mark.parametrize("names", [["a"], ["a", "../outside"]])
def test_a_server_deletes_and_replaces_no_folder(
    console: Console, offer: Any, tmp_path: Path, names: list[str]
) -> None:
    """After a failed download FLARE deletes the folder of the transaction, which the server names."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis").write_text("years of work")
    (tmp_path / "kit" / "transfer" / "job__").mkdir()  # so that the way below goes through a folder that is there
    offer(names, transaction="/../../../own")
    console.download("job")
    assert (own / "thesis").read_text() == "years of work"
    assert [path.name for path in own.iterdir()] == ["thesis"]


def test_what_hospitals_and_the_server_say_moves_no_cursor(
    tmp_path: Path, flares: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLARE's own console, with what a hospital answers to check_status."""
    flares.setattr(cli, "AdminAPI", lambda **_: None)
    Guard()
    told = cli.AdminClient({"uid_source": "cert", "username": "lead"}, cli_history_dir=str(tmp_path))
    row = ["hospital-a", "job\x1b[2J\x1b]52;c;ZXZpbA==\x07", "ü\u202eno"]
    told.print_resp({ProtoKey.DATA: [{ProtoKey.TYPE: ProtoKey.TABLE, ProtoKey.ROWS: [["NAME", "JOB", "STATUS"], row]}]})
    told.print_resp({ProtoKey.DETAILS: "two\tlines:\nDone\x9b2J"})
    said = capsys.readouterr().out
    assert "job?[2J?]52;c;ZXZpbA==?" in said and "ü?no" in said and "two\tlines:\nDone?2J" in said
    assert not [one for one in said if not one.isprintable() and one not in "\n\t"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Provisioned:
    return provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits"))


@pytest.mark.slow
def test_every_persons_kit_is_made_so(made: Provisioned) -> None:
    people = [person.kit for person in made.people if person.kit.role == "admin"]
    assert len(people) == 2
    for kit in people:
        assert check_console(kit).status == "ok"
        with pytest.MonkeyPatch.context() as context:
            for kind, name in PATCHED:
                context.setattr(kind, name, None)
            read = secure_load_admin_config(Workspace(str(kit.folder)))  # as the console and FLARE's session do
            assert [type(one) for one in read.handlers] == [Guard]
            assert all(getattr(kind, name) is not None for kind, name in PATCHED)
        assert read.get_admin_config()["idle_timeout"] == 900.0  # what FLARE had written is still there


@pytest.mark.slow
def test_a_kit_that_was_made_before(
    made: Provisioned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def allow(*more: str) -> object:
        monkeypatch.setattr("sys.argv", ["medpfl", "site", "allow", str(kit), *more])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    kit = next(person.kit.folder for person in made.people if person.role == "lead")
    (kit / "local" / "resources.json").unlink()
    found = check_console(read_kit(kit))
    assert found.status == "problem" and found.mend == f"medpfl site allow {kit}"
    for _ in range(2):
        assert allow() in (0, None)
        assert "what the server sends stays in the folder of downloads" in " ".join(capsys.readouterr().out.split())
        assert check_console(read_kit(kit)).status == "ok"
    assert len(secure_load_admin_config(Workspace(str(kit))).handlers) == 1
    assert allow("--class", "numpy.ndarray") == 1
    assert "is a person's kit, which builds nothing that a job names" in " ".join(capsys.readouterr().err.split())
