# SPDX-License-Identifier: Apache-2.0
"""The code that pages show: Python is run, JSON and YAML can be read, and every component in them takes the arguments
that it is shown with. (Commands: test_commands_in_docs.py. CONTRIBUTING.md's method: test_contributing.py.)"""

import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvflare.recipe import ProdEnv, SimEnv

import medpfl
from medpfl.component import find_class
from medpfl.demo.phantom import write_phantoms
from medpfl.flare.recipes import MedPFLRecipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
RUN = {"recipes.md", "using-models.md", "CONTRIBUTING.md"}
FENCED = re.compile(r"^( *)```(python|json|yaml)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def fenced(page: Path, language: str) -> list[str]:
    found = FENCED.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(block) for _, named, block in found if named == language]


def indented(page: Path) -> Iterator[str]:
    """Blocks without a fence that are JSON, or a part of it."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for block in re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE):
        if re.match(r'["{\[]', block.strip()):
            yield textwrap.dedent(block)


def read(block: str) -> Any:
    """JSON, or a part of it: members of an object, of which "..." leaves some out, or one alternative a line."""
    block = re.sub(r",\s*\.\.\.\s*$", "", block)
    alternatives = ",".join(f"{{{line.rstrip(',')}}}" for line in block.strip().splitlines())
    for text in (block, f"{{{block.strip().rstrip(',')}}}", f"[{alternatives}]"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            told = error
    raise told


def components(content: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Class and arguments of all that is named by ``path``, however deep."""
    if isinstance(content, dict):
        path = content.get("path")
        if isinstance(path, str) and re.fullmatch(r"medpfl(\.\w+)+\.[A-Z]\w+", path):
            given = content.get("args", {})
            yield path, given if isinstance(given, dict) else {}
    for inner in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from components(inner)


def misfits(content: Any) -> list[str]:
    told = []
    for path, given in components(content):
        takes = inspect.signature(find_class(path, "a page")).parameters
        told += [f"{path} has no argument '{name}'" for name in given if name not in takes]
    return told


def test_every_python_block_is_on_a_page_whose_blocks_are_run() -> None:
    assert {page.name for page in PAGES if fenced(page, "python")} == RUN


def contents(page: Path) -> list[Any]:
    found = [read(block) for block in (*fenced(page, "json"), *indented(page))]
    return found + [yaml.safe_load(block) for block in fenced(page, "yaml")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_json_and_yaml_can_be_read_and_components_take_their_arguments(page: Path) -> None:
    assert not [told for content in contents(page) for told in misfits(content)]


def test_a_component_with_another_argument_is_found() -> None:
    shown = '"components": [{"id": "a", "path": "medpfl.core.mixers.TrimmedMean", "args": {"trimmed": 0.25}}]'
    assert misfits(read(shown)) == ["medpfl.core.mixers.TrimmedMean has no argument 'trimmed'"]
    assert len([one for page in PAGES for content in contents(page) for one in components(content)]) > 50


@pytest.mark.slow
def test_the_pages_python_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """docs/recipes.md and, with a model that came of it, docs/using-models.md. FLARE's environments are left to
    tests/simulator: the exported job runs in process, at three of the four hospitals, for one round of two steps."""
    monkeypatch.chdir(tmp_path)
    sites = write_phantoms(tmp_path / "sites")
    Path("sites", f"{sites[0]}.yaml").unlink()
    executed: list[Any] = []

    class Run:
        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def get_result(self) -> str:
            return str(self.folder)

    def execute(recipe: MedPFLRecipe, env: Any) -> Run:
        executed.append(env)
        recipe.export("jobs")
        for side, long, short in (("server", '"rounds": 12', '"rounds": 1'), ("client", '"steps": 15', '"steps": 2')):
            file = Path("jobs", "organ", "app", "config", f"config_fed_{side}.json")
            assert long in file.read_text()
            file.write_text(file.read_text().replace(long, short))
        return Run(medpfl.simulate("jobs/organ", "sites").folder)

    monkeypatch.setattr(MedPFLRecipe, "execute", execute)
    (recipe,) = fenced(ROOT / "docs" / "recipes.md", "python")
    names: dict[str, Any] = {}
    exec(compile(recipe, "recipes.md", "exec"), names)
    assert isinstance(executed[0], SimEnv) and executed[0].clients == sites
    assert "hospital-d" in capsys.readouterr().out
    (model,) = Path("results").rglob("hospital-d/**/personal-best.safetensors")
    shutil.copy(model, tmp_path)
    (use,) = fenced(ROOT / "docs" / "using-models.md", "python")
    exec(compile(use, "using-models.md", "exec"), {})
    assert capsys.readouterr().out.startswith("['background', 'organ']")
    # The indented lines for a real federation: the same recipe, with an environment that takes these arguments.
    (lines,) = re.findall(r"(?:^    .*\n|^\n(?=    ))+(?=\n)", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
    assert "ProdEnv(" in lines
    compile(textwrap.dedent(lines), "recipes.md", "exec")
    (call,) = re.findall(r"ProdEnv\((.*?)\)\)", lines)
    inspect.signature(ProdEnv).bind("kits/lead", **{one.split("=")[0].strip(): 1 for one in call.split(",")[1:]})
