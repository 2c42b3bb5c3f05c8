# SPDX-License-Identifier: Apache-2.0
"""The documentation site: built as CONTRIBUTING.md says, where a link or anchor that leads nowhere ends the build."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

import medpfl
import medpfl.api

ROOT = Path(__file__).resolve().parents[2]
MARKDOWN = re.compile(r"\s*([-*] |\d+\. |\||```|:::|#+ )")
HTML = re.compile(
    r"a|article|b|blockquote|br|code|dd|del|details|div|d[lt]|em|h[1-6]|hr|i|img|label|li|nav|ol|p|path|pre|small|span|"
    r"strong|su[bp]|summary|svg|table|tbody|t[dhr]|thead|ul"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The site's pages: path to HTML."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert built.returncode == 0, built.stderr
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in folder.rglob("*.html")}


def articles(pages: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What stands on the pages that are somebody's text, without code."""
    for name, page in pages.items():
        found = re.search(r"<article.*?</article>", page, flags=re.DOTALL)
        if found and not name.startswith("source/"):
            yield name, re.sub(r"<pre.*?</pre>|<code.*?</code>", "", found[0], flags=re.DOTALL)


def test_every_public_name_is_in_the_reference() -> None:
    named = re.findall(r"^::: medpfl\.(?:\w+\.)*(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert set(named) >= set(medpfl.__all__) - {"__version__"} and len(named) == len(set(named))


def test_every_page_has_its_line_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert not [name for name in named if f": {name}\n" not in menu and not name.startswith("results/compare-")]


@pytest.mark.slow
def test_every_page_is_there_and_the_reference_says_what_the_docstrings_say(pages: dict[str, str]) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        place = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert str(place.with_name("index.html") if page.name == "README.md" else place) in pages
    text = " ".join(unescape(re.sub(r"<[^>]+>", "", pages["api.html"])).split())
    for name in set(medpfl.__all__) - {"__version__"}:
        public = medpfl.api.compare if name == "compare" else getattr(medpfl, name)  # in Python also the package's name
        first = (public.__doc__ or "").strip().splitlines()[0].replace("``", "")
        assert first and " ".join(first.split()) in text, name


@pytest.mark.slow
def test_the_first_page_is_the_readme_whose_links_lead_on(pages: dict[str, str]) -> None:
    links = set(re.findall(r'href="([^"#:]+)', pages["index.html"]))
    assert {"concepts.html", "roles/lead.html", "results/compare-phantom.html", "contributing.html"} <= links
    assert "source/jobs/softpull_phantom.html" in re.findall(r'href="([^"#:]+)', pages["concepts.html"])
    assert "config_fed_server.json" in pages["source/jobs/softpull_phantom.html"]


@pytest.mark.slow
def test_no_page_fetches_anything_from_elsewhere(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        fetched = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)", page
        )
        assert not fetched and 'class="mermaid"' not in page, (name, fetched)


@pytest.mark.slow
def test_what_reads_as_a_list_or_a_table_in_a_checkout_is_one_on_the_site(pages: dict[str, str]) -> None:
    assert len(list(articles(pages))) > 100
    for name, text in articles(pages):
        for paragraph in re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", text, flags=re.DOTALL):
            assert not [line for line in paragraph.splitlines() if MARKDOWN.match(line)], (name, paragraph)
        tags = re.findall(r"<([A-Za-z][\w-]*)", text)
        assert not [tag for tag in tags if not HTML.fullmatch(tag)], name  # no <word> that was meant as text
