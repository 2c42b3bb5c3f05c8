# SPDX-License-Identifier: Apache-2.0
"""``medpfl site init`` on a BIDS folder: what it writes loads, is sound, and keeps a subject in one split."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hospitals import save, scan
from medpfl.check.reading import inspect
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.init.answers import Answers, parse_classes
from medpfl.data.init.bids import from_bids
from medpfl.data.init.write import write_site_file
from medpfl.data.site_file import load_site_file
from medpfl.data.subgroups import groupings

MAPS = "derivatives/manual"


def write(folder: Path, subjects: int = 6, sessions: int = 2) -> Path:
    """Subjects with T1w and T2w scans, a label map of each T1w, and a table of them."""
    lines = ["participant_id\tage\tdiagnosis"]
    for number in range(subjects):
        subject = f"sub-{number:02}"
        lines.append(f"{subject}\t{40 + number}\t{('control', 'patient')[number % 2] if number else 'n/a'}")
        for session in range(sessions):
            name = f"{subject}_ses-{session}"
            image, label = scan(number * sessions + session)
            anat = f"{subject}/ses-{session}/anat"
            save(folder / anat / f"{name}_T1w.nii.gz", image)
            save(folder / anat / f"{name}_T2w.nii.gz", image + 1)
            save(folder / MAPS / anat / f"{name}_desc-manual_dseg.nii.gz", label)
            save(folder / MAPS / anat / f"{name}_space-MNI152_dseg.nii.gz", label[1:])
            save(folder / MAPS / anat / f"{name}_desc-brain_mask.nii.gz", np.ones_like(label))
    (folder / "participants.tsv").write_text("\n".join(lines) + "\n")
    (folder / "dataset_description.json").write_text('{"Name": "small", "BIDSVersion": "1.9.0"}')
    return folder


def init(place: Path, output: Path, classes: list[str] | None = None, **flags: str) -> tuple[dict[str, Any], Any]:
    """The declared dataset, and its splits as they are checked."""
    answers = Answers({"site": "here", "dataset": "data", **flags}, parse_classes(classes or []))
    write_site_file(place, output, answers)
    inspection = inspect("data", load_site_file(output, "here").datasets["data"])
    assert not inspection.problems
    return yaml.safe_load(output.read_text())["datasets"]["data"], inspection.splits


@pytest.mark.slow
def test_scans_with_the_label_maps_of_derivatives(tmp_path: Path) -> None:
    """Segmentations on the scan's own voxels count, masks of the brain and other spaces do not."""
    dataset, splits = init(write(tmp_path / "bids"), tmp_path / "site.yaml")
    assert dataset["labels"] == {0: "background", 1: "label-1"} and dataset["split"]["group"] == "patient"
    items = json.loads((tmp_path / dataset["datalist"]).read_text())["training"]
    assert len(items) == 12 and sum(split.cases for split in splits.values()) == 12
    assert items[3] == {
        "age": "41",
        "diagnosis": "patient",
        "image": "bids/sub-01/ses-1/anat/sub-01_ses-1_T1w.nii.gz",
        "label": f"bids/{MAPS}/sub-01/ses-1/anat/sub-01_ses-1_desc-manual_dseg.nii.gz",
        "patient": "sub-01",
    }
    text = (tmp_path / "site.yaml").read_text()
    assert "12 T1w scans of 6 subjects; not used: T2w" in text
    listing = load_site_file(tmp_path / "site.yaml", "here").datasets["data"].cases(_Raising())
    owners = {split: {case.group for case in cases} for split, cases in listing.items()}
    assert not owners["train"] & owners["test"] and all(len(owners[split]) < len(listing[split]) for split in owners)


class _Raising:
    def add(self, sentence: str) -> None:
        raise AssertionError(sentence)


@pytest.mark.slow
def test_a_column_of_participants_is_the_class(tmp_path: Path) -> None:
    folder = write(tmp_path / "bids", 8, 1)
    dataset, splits = init(folder, tmp_path / "site.yaml", label="diagnosis")
    assert dataset["label"] == {"column": "diagnosis", "classes": {"control": ["control"], "patient": ["patient"]}}
    assert sum(split.cases for split in splits.values()) == 7  # of one subject it is not known


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "bids", 3, 1)
    twice = folder / MAPS / "sub-01/ses-0/anat/sub-01_ses-0_desc-other_dseg.nii.gz"
    save(twice, scan(0)[1])
    with pytest.raises(
        DataError, match=r"sub-01_ses-0_T1w\.nii\.gz: it has several label maps, .*manual_dseg.*other_dseg"
    ):
        init(folder, tmp_path / "site.yaml")
    for file in folder.rglob("*dseg*"):
        file.unlink()
    for file in folder.rglob("*mask*"):
        file.unlink()
    with pytest.raises(SiteFileError, match=r"--label is needed: Which column of participants\.tsv is to be predicted"):
        init(folder, tmp_path / "site.yaml")
    (folder / "participants.tsv").write_text("participant_id\tage\nsub-00\n")
    with pytest.raises(DataError, match=r"participants\.tsv:2: expected 2 cells, got 1"):
        init(folder, tmp_path / "site.yaml")
    (folder / "participants.tsv").unlink()
    with pytest.raises(DataError, match=r"bids: found no label map .* and no column of participants\.tsv"):
        init(folder, tmp_path / "site.yaml")
    assert not (tmp_path / "site.yaml").exists()


@pytest.mark.slow
def test_files_that_are_links_into_a_store_keep_their_names(tmp_path: Path) -> None:
    """As DataLad keeps files: the link is called as the scan is, and its target is a hash, with or without a suffix."""
    folder = write(tmp_path / "bids", sessions=1)
    (tmp_path / "bids" / ".git" / "annex").mkdir(parents=True)
    for number, path in enumerate(sorted(folder.rglob("*.nii.gz"))):
        path.rename(store := folder / ".git" / "annex" / f"SHA256-s{number}")
        path.symlink_to(store)
    dataset, splits = init(folder, tmp_path / "site.yaml")
    items = json.loads((tmp_path / dataset["datalist"]).read_text())["training"]
    assert items[1]["image"] == "bids/sub-01/ses-0/anat/sub-01_ses-0_T1w.nii.gz"
    assert sum(split.cases for split in splits.values()) == 6


def named(folder: Path, *maps: str, scans: tuple[str, ...]) -> dict[str, str]:
    """Scan to label map of a subject whose files are called so, in a data set that is a derivative itself."""
    root, (image, label) = folder / "derivatives" / "prep", scan(0)
    for name in scans:
        save(root / "sub-01" / "anat" / f"sub-01{name}_T1w.nii.gz", image)
    for name in maps:
        save(root / MAPS / "sub-01" / "anat" / f"sub-01{name}_dseg.nii.gz", label)
    _, text = from_bids(root, root / "list.json", Answers())
    items = json.loads(text)["training"]
    return {Path(item["image"]).name: Path(item["label"]).name for item in items}


def test_a_label_map_is_one_scans(tmp_path: Path) -> None:
    """The plain scan's map is not that of the scan with contrast agent, though nothing in its name speaks against it.
    Of two runs nothing says whose it is: the patient may have moved between them."""
    found = named(tmp_path / "a", "", scans=("", "_ce-gad"))
    assert found == {"sub-01_T1w.nii.gz": "sub-01_dseg.nii.gz"}
    runs = ("_run-1", "_run-2")
    assert len(named(tmp_path / "b", *runs, scans=runs)) == 2
    words = r"does not say whether it is the label map of sub-01_run-1_T1w\.nii\.gz or of sub-01_run-2_T1w\.nii\.gz"
    with pytest.raises(DataError, match=words):
        named(tmp_path / "c", "", scans=runs)


def test_label_maps_that_show_other_things_are_not_mixed(tmp_path: Path) -> None:
    """Who lacks the segmentation of lesions has a mask of the brain all the same, whose 1 is no lesion."""
    folder = write(tmp_path / "bids", 4, 1)
    lacking = folder / MAPS / "sub-03/ses-0/anat/sub-03_ses-0_desc-manual_dseg.nii.gz"
    lacking.unlink()
    entries, text = from_bids(folder, folder / "list.json", Answers())
    labels = [Path(item["label"]).name for item in json.loads(text)["training"]]
    assert labels == [f"sub-0{number}_ses-0_desc-manual_dseg.nii.gz" for number in range(3)]
    assert "1 without a label are left out" in str(entries[1])
    others = [
        lacking.with_name("sub-03_ses-0_desc-tissues_dseg.nii.gz"),
        Path(str(lacking).replace("manual/", "prep/")),
    ]
    for other in others:
        save(other, scan(3)[1])
        words = rf"{other.name}: by its name or folder it may show something else than .*sub-00"
        with pytest.raises(DataError, match=words):
            from_bids(folder, folder / "list.json", Answers())
        other.unlink()


def test_what_is_not_known_of_a_subject_is_no_value(tmp_path: Path) -> None:
    """BIDS writes n/a: neither a number of which subgroups could make bands, nor a group of its own."""
    folder = write(tmp_path / "bids", 4, 1)
    table = folder / "participants.tsv"
    table.write_text(table.read_text().replace("\t41\t", "\tn/a\t"))
    init(folder, tmp_path / "site.yaml")
    content = yaml.safe_load((tmp_path / "site.yaml").read_text())
    content["datasets"]["data"]["subgroups"] = ["diagnosis", {"column": "age", "edges": [42]}]
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(content))
    by_diagnosis, by_age = groupings(load_site_file(tmp_path / "site.yaml", "here").datasets["data"])  # type: ignore[arg-type]
    assert by_diagnosis.groups == ("control", "patient", "not known")
    assert by_age.groups == ("below 42", "42 and above", "not known")
