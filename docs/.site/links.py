# SPDX-License-Identifier: Apache-2.0
"""What mkdocs.yml adds to the pages of docs/: the README as the first page, the project's other pages, the notebooks as
pages, and a page for every file and folder outside docs/ that some page links to. The same links work in a checkout."""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
}
"""Page beside docs/ to its place in the site."""
LINK = re.compile(r"(?<=\]\()(?P<target>[^)#:\s]+)(?=(?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash"}


def place(target: str) -> str:
    """Where the site has a file or folder of the checkout; both are relative, with forward slashes."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/") and target.endswith(".ipynb"):
        return target.removeprefix("docs/").removesuffix(".ipynb") + ".md"
    return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}.md"


def targets(page: str, text: str) -> dict[str, str]:
    """The links of a page of the checkout that lead to something there: link to what it leads to."""
    found = {link: posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in LINK.findall(text)}
    return {link: target for link, target in found.items() if (ROOT / target).exists()}


def source(target: str) -> str:
    """A page that shows a file, or lists a folder and shows the files in it."""
    path = ROOT / target
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    lines = ["---", "search: {exclude: true}", "---", f"# {target}", ""]
    for file in files:
        if "__pycache__" not in file.parts and not file.name.startswith("."):
            inside = [] if file == path else [f"## {file.relative_to(path)}", ""]
            text = file.read_text(encoding="utf-8")
            lines += [*inside, f"````{LANGUAGES.get(file.suffix, 'text')}", text, "````", ""]
    return "\n".join(lines)


def notebook(target: str) -> str:
    """A page with a notebook's cells, and a link to the notebook itself."""
    cells = json.loads((ROOT / target).read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    parts = [
        text if cell["cell_type"] == "markdown" else f"````python\n{text}\n````"
        for cell, text in zip(cells, texts, strict=True)
    ]
    name = posixpath.basename(target)
    parts.insert(1, f'*This page is a notebook: <a href="{name}" download>download {name}</a> and run it.*')
    return "\n\n".join(parts) + "\n"


def written_at(file: File) -> str | None:
    """Where in the checkout a page's text was written; None: it is made from something outside docs/."""
    if file.abs_src_path is not None:
        return Path(file.abs_src_path).relative_to(ROOT).as_posix()
    target = f"docs/{file.src_uri.removesuffix('.md')}.ipynb"
    return target if (ROOT / target).exists() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for origin, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / origin)))
    for path in sorted((ROOT / "docs").rglob("*.ipynb")):
        target = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, place(target), content=notebook(target)))
    linked = set()
    for file in files.documentation_pages():
        linked |= set(targets(written_at(file) or "", file.content_string).values())
    for target in sorted(linked):
        if place(target).startswith("source/"):
            made = File.generated(config, place(target), content=source(target), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(made)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    written = written_at(page.file)
    if written is None:
        return markdown  # the text of a file elsewhere
    found = targets(written, markdown)
    start = posixpath.dirname(page.file.src_uri)
    return LINK.sub(
        lambda match: posixpath.relpath(place(found[match[0]]), start) if match[0] in found else match[0], markdown
    )
