# SPDX-License-Identifier: Apache-2.0
"""The words of reports: each is explained once a page, and every metric of ours has a word."""

import re
from pathlib import Path

from medpfl.results.glossary import WORDS, Glossary, spelled
from medpfl.results.report import write_page
from medpfl.tasks.metrics.measure import Measure
from summaries import result, summary


def marked(glossary: Glossary, text: str) -> list[str]:
    return [piece.text for piece in glossary.pieces(text) if piece.anchor]


def test_a_word_is_marked_where_it_first_stands_and_the_longest_wins() -> None:
    glossary = Glossary()
    assert marked(glossary, "FedAvg + fine-tuning, FedAvg") == ["FedAvg", "fine-tuning"]
    assert marked(glossary, "FedAvg before the mean") == ["FedAvg before the mean"]
    assert marked(glossary, "the test surface Dice, dice of liver") == ["surface Dice", "dice"]
    assert marked(glossary, "fedavg, indices, locally") == []
    assert [piece.text for piece in glossary.used] == [
        "Dice",
        "FedAvg",
        "FedAvg before the mean",
        "fine-tuning",
        "surface Dice",
    ]
    assert all(piece.meaning == WORDS[piece.text] for piece in glossary.used)


def test_a_hospital_is_no_word(tmp_path: Path) -> None:
    """Of hospitals called alpha, beta, gamma and delta the last one was explained as the delta of privacy."""
    glossary = Glossary(["delta", "st-gain"])
    assert marked(glossary, "delta and st-gain kept their own model: chance, deltas, Dice") == ["chance", "Dice"]
    job = summary((result("delta", "local", 0.5, None), 0.5))
    assert "In differential privacy" not in write_page(tmp_path, job, [], {}, []).read_text()


def test_the_score_of_several_labels_is_a_word_of_its_own() -> None:
    """ "macro auc" was explained, and written, by its second half alone."""
    assert spelled("macro auc") == "macro AUC" and marked(Glossary(), "test macro auc") == ["macro auc"]


def test_the_pieces_are_the_text() -> None:
    text = "At ſ-local <FedAvg>, the 95 % interval of the gain: é"
    assert "".join(piece.text for piece in Glossary().pieces(text)) == text


def test_metrics_are_spelled_as_in_sentences() -> None:
    assert [spelled(name) for name in ("dice", "hd95 of Liver", "balanced accuracy", "something of yours")] == [
        "Dice", "HD95 of Liver", "balanced accuracy", "something of yours",
    ]  # fmt: skip


def test_every_metric_is_explained() -> None:
    page = Path(__file__).parents[2] / "docs" / "losses-and-metrics.md"
    rows = page.read_text().partition("## Metrics")[2]
    names = re.findall(r"^\| `(\w+)` \| \w+ \| (?:yes|no) \|", rows, re.MULTILINE)
    assert len(names) > 15
    for name in names:
        assert marked(Glossary(), Measure().called(name.removesuffix("_1"))), name


def test_each_link_of_the_page_leads_to_its_word_and_none_elsewhere(tmp_path: Path) -> None:
    page = write_page(tmp_path, summary((result("anna", "local", 0.5, None), 0.5)), [], {}, []).read_text()
    links = re.findall(r'<a class="word" href="#([^"]+)"><abbr title="[^"]+">', page)
    assert "word-local" in links and len(set(links)) == len(links)
    assert sorted(links) == sorted(re.findall('<dt id="([^"]+)">', page))
    assert not re.findall(r'(?:href|src)="(?!#|data:)', page)
