# SPDX-License-Identifier: Apache-2.0
"""FedAP's shipped studies: the official OrganCMNIST protocol, UCI HAR, and pretraining, each on generated files of the
same format."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from benchmarks.blobs import write_blobs
from medpfl import store
from medpfl.cli import app
from medpfl.core.errors import ConfigError, DataError
from medpfl.data.arrays.declare import Arrays
from medpfl.data.declared import SPLITS
from medpfl.data.preparation import Spec
from medpfl.data.series.declare import Series
from medpfl.data.site_file import load_site_file
from medpfl.demo import organc
from medpfl.demo.har import ACTIVITIES, SIGNALS, cut_by_time, write_har
from medpfl.demo.organc import CLIENTS, ENVIRONMENT_VARIABLE, write_organc
from medpfl.job import Job, load_job
from medpfl.methods.fedap import FedAP
from medpfl.results.files import read_summary
from medpfl.results.tables import result_table
from medpfl.rounds.pretrain import pretrain
from medpfl.rounds.simulate import simulate

IMAGES = Spec("class", ("images",), (28, 28))

JOBS = Path(__file__).resolve().parents[2] / "jobs"


def shortened(name: str, rounds: int = 2) -> Job:
    """A shipped job with fewer rounds, and W from the last one on where it waits for running statistics."""
    job = load_job(JOBS / name)
    assert isinstance(job, Job)
    mixer = job.mixers["model"]
    if mixer.from_round > 1:  # type: ignore[attr-defined]
        mixer = replace(mixer, from_round=rounds)  # type: ignore[type-var]
    return replace(job, components={"model": mixer}, settings=replace(job.settings, rounds=rounds, finetune=1))


# -- OrganCMNIST ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def organ_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of OrganCMNIST's format, with 1/26 of its rows, and lists of 20 clients that cover all of it."""
    folder = tmp_path_factory.mktemp("organc")
    truth = write_blobs(folder / "organcmnist.npz", {"train": 500, "val": 92, "test": 318}, classes=11)
    order = np.random.default_rng(0).permutation(len(truth)).tolist()
    (folder / "organc_alpha0.05.json").write_text(json.dumps([order[k::40] for k in range(40)]))
    return folder / "organcmnist.npz"


def md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes()).hexdigest()


def test_another_file_than_the_protocols_is_refused(
    organ_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"'train_images': expected uint8 \(13000, 28, 28\), got uint8 \(500, 28, 28\)"):
        write_organc(tmp_path / "sites", organ_file)
    monkeypatch.setattr(organc, "ROWS", {"train": 500, "val": 92, "test": 318})
    sentence = f"it is not the file of the protocol: expected MD5 {organc.MD5}, got {md5(organ_file)}"
    with pytest.raises(DataError, match=sentence):
        write_organc(tmp_path / "sites", organ_file)
    with pytest.raises(DataError, match=r"no such file\. Download OrganCMNIST \(28 x 28\) of MedMNIST v2"):
        write_organc(tmp_path / "sites", tmp_path / "nowhere.npz")
    (tmp_path / "lists.json").write_text(json.dumps([[0], [1]]))
    with pytest.raises(DataError, match="expected the lists of 20 clients, got 1"):
        write_organc(tmp_path / "sites", organ_file, tmp_path / "lists.json", md5(organ_file))
    assert not (tmp_path / "sites").exists()


@pytest.mark.slow
def test_table_4_runs_end_to_end_on_a_file_of_its_format(
    organ_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split, pretraining on a fifth, FedAP with its weights: as the job does it with 400 rounds."""
    monkeypatch.setattr(organc, "ROWS", {"train": 500, "val": 92, "test": 318})
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(organ_file.parent))
    sites = tmp_path / "sites"
    names = write_organc(sites, md5=md5(organ_file))
    assert len(names) == CLIENTS and names[0] == "client-01" and (sites / "labels.svg").is_file()
    arguments = ["pretrain", str(JOBS / "fedap_organc"), "--sites", str(sites), "-o", str(tmp_path / "p.safetensors")]
    done = CliRunner().invoke(app, [*arguments, "--epochs", "1", "--declare"])
    assert done.exit_code == 0 and "declared as 'organc_lenet5' in 20 site files" in done.output, done.output
    assert store.read_meta(tmp_path / "p.safetensors")["samples"] == pytest.approx(0.2 * 460, abs=20)
    files = {name: sites / f"{name}.yaml" for name in names}
    simulate(shortened("fedap_organc"), files, tmp_path / "results", tmp_path / "home")
    table = result_table(read_summary(tmp_path / "results"))
    assert table.labels == ["Local", "FedAvg", "FedAvg before the mean", "FedAvg + fine-tuning", "Personal"]
    assert table.values.shape == (20, 5)
    assert np.isfinite(table.values).all()
    with np.load(tmp_path / "results" / "mixing.npz") as stored:
        matrix = stored["model/00002"]
        assert stored["roster"].tolist() == names
    np.testing.assert_allclose(matrix.sum(axis=1), 1)
    np.testing.assert_allclose(matrix.diagonal(), 0.5)
    assert (matrix != matrix.T).any() and len(np.unique(matrix.round(9))) > 150


def test_the_official_lists_fit_the_protocol() -> None:
    """The lists themselves, where they are: 23,660 rows, each once, clients of one size."""
    file = Path(os.environ.get(ENVIRONMENT_VARIABLE, "nowhere")) / organc.LISTS
    if not file.is_file():
        pytest.skip(f"the official index lists are not in ${ENVIRONMENT_VARIABLE}")
    from medpfl.data.partition import check_disjoint
    from medpfl.demo.index_lists import read_lists

    splits = read_lists(file, ["train", "test"])
    check_disjoint(splits)
    rows = [row for parts in splits.values() for part in parts.values() for row in part]
    assert sorted(rows) == list(range(sum(organc.ROWS.values()))) and len(splits) == CLIENTS
    assert {len(parts["test"]) for parts in splits.values()} == set(range(592, 596))


# -- UCI HAR ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def har_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout of UCI HAR with three subjects; a window's values say subject, activity and place in time."""
    root = tmp_path_factory.mktemp("har") / "UCI HAR Dataset"
    rng = np.random.default_rng(0)
    for part, subjects in (("train", [1, 3]), ("test", [2])):
        folder = root / part / "Inertial Signals"
        folder.mkdir(parents=True)
        subject = np.repeat(subjects, 6 * 12)
        activity = np.tile(np.repeat(np.arange(1, 7), 12), len(subjects))
        np.savetxt(root / part / f"subject_{part}.txt", subject, fmt="%d")
        np.savetxt(root / part / f"y_{part}.txt", activity, fmt="%d")
        for place, name in enumerate(SIGNALS):
            wave = np.sin(np.arange(128) * activity[:, None] / 9 + place)
            noise = 0.1 * rng.normal(size=(len(subject), 128))
            np.savetxt(folder / f"{name}_{part}.txt", wave + noise, fmt=" %.7e")
    return root


def test_har_windows_are_those_of_the_files_and_neighbours_are_kept_apart(har_folder: Path, tmp_path: Path) -> None:
    assert write_har(tmp_path, har_folder) == ["subject-01", "subject-02", "subject-03"]
    dataset = load_site_file(tmp_path / "subject-03.yaml", "subject-03").dataset("har", Series)
    data = dataset.load(Spec("class", ("windows",)))
    assert data.class_names == list(ACTIVITIES) and data.splits["train"].inputs.shape[1:] == (9, 128)
    with np.load(tmp_path / "subject-03.npz") as stored:
        x, split, activity = stored["x"], stored["split"], stored["activity"]
    raw = np.loadtxt(har_folder / "train" / "Inertial Signals" / "body_gyro_y_train.txt")[72:]  # subject 3 comes second
    kept, expected = cut_by_time(np.repeat(np.arange(1, 7), 12), "subject-03")
    np.testing.assert_allclose(x[:, SIGNALS.index("body_gyro_y")], raw[kept], rtol=1e-6)
    assert split.tolist() == expected.tolist()
    for code in range(1, 7):
        places = {part: kept[(split == part) & (activity == code)] for part in ("train", "validation", "test")}
        assert places["train"].max() + 1 < places["validation"].min()  # one window, that both overlap, is left out
        assert places["validation"].max() + 1 < places["test"].min()
        assert sum(map(len, places.values())) == 10


def test_har_subjects_shared_by_a_few_hospitals(har_folder: Path, tmp_path: Path) -> None:
    assert write_har(tmp_path, har_folder, hospitals=2) == ["hospital-1", "hospital-2"]
    alone = tmp_path / "alone"
    write_har(alone, har_folder)

    def parts(path: Path) -> dict[str, set[bytes]]:
        with np.load(path) as stored:
            return {part: {row.tobytes() for row in stored["x"][stored["split"] == part]} for part in SPLITS}

    for name, subjects in (("hospital-1", ("01", "03")), ("hospital-2", ("02",))):
        own = [parts(alone / f"subject-{number}.npz") for number in subjects]
        together = parts(tmp_path / f"{name}.npz")
        assert together == {part: set().union(*(each[part] for each in own)) for part in SPLITS}


def test_har_windows_of_a_subject_are_one_patients(har_folder: Path, tmp_path: Path) -> None:
    """Each window passed for a patient, so that intervals were as narrow as those of a hundred patients."""
    for hospitals, name, counts, least in ((2, "hospital-1", [2, 2, 2], 2), (None, "subject-03", [1, 1, 1], 1)):
        write_har(tmp_path / name, har_folder, hospitals=hospitals)
        site = load_site_file(tmp_path / name / f"{name}.yaml", name)
        data = site.load("har", Spec("class", ("windows",)))
        assert [len(set(samples.patients.tolist())) for samples in data.splits.values()] == counts
        assert site.policy.least_scored == least


@pytest.mark.slow
def test_har_trains_with_a_hospital_a_subject(har_folder: Path, tmp_path: Path) -> None:
    names = write_har(tmp_path / "sites", har_folder)
    files = {name: tmp_path / "sites" / f"{name}.yaml" for name in names}
    for name in ("fedap_har", "ffedap_har"):
        job = replace(shortened(name), min_clients=3)
        simulate(job, files, tmp_path / name / "results", tmp_path / name / "home")
        assert result_table(read_summary(tmp_path / name / "results")).values.shape == (3, 5)


@pytest.mark.slow
def test_har_trains_with_another_network_at_each_hospital(har_folder: Path, tmp_path: Path) -> None:
    names = write_har(tmp_path / "sites", har_folder, hospitals=3)
    job = load_job(JOBS / "mhpflid_har")
    assert isinstance(job, Job)
    job = replace(job, method=replace(job.method, steps=4), settings=replace(job.settings, rounds=2))
    simulate(job, {n: tmp_path / "sites" / f"{n}.yaml" for n in names}, tmp_path / "results", tmp_path / "home")
    assert np.isfinite(result_table(read_summary(tmp_path / "results")).values).all()


def test_har_files_that_are_not_whole(har_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file\. Download the dataset 'Human Activity Recognition Using"):
        write_har(tmp_path, tmp_path / "nowhere")
    with pytest.raises(DataError, match="subject-09: 3 windows of activity 1 are too few for three splits"):
        cut_by_time(np.array([1, 1, 1]), "subject-09")


# -- pretraining ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pretraining_learns_from_the_training_parts_only_and_says_what_it_did(tmp_path: Path) -> None:
    from benchmarks.studies import write_cut

    fractions = {"train": 0.5, "test": 0.5}
    sites = tmp_path / "sites"
    write_blobs(tmp_path / "data.npz", {"train": 300}, classes=3, noise=0.1)
    names = write_cut(tmp_path / "data.npz", sites, "organc", "dirichlet", 2, 1.0, fractions, 0)
    files = {name: sites / f"{name}.yaml" for name in names}
    job = shortened("ffedap_organc")
    job = replace(job, method=FedAP(lr=0.05, batch_size=16, optimizer="sgd"))
    seen: list[float] = []
    tensors, about = pretrain(job, files, 1.0, 12, lambda epoch, loss: seen.append(loss))
    again, _ = pretrain(job, files, 1.0, 12)
    assert store.fingerprint(tensors) == store.fingerprint(again) == about.sha256
    assert about.samples == 150 and about.kind == "checkpoint" and len(seen) == 12
    network = job.task.network(load_site_file(files[names[0]]).dataset("organc", Arrays).load(IMAGES))
    network.load_state_dict(tensors)
    right = []
    for path in files.values():
        test = load_site_file(path).dataset("organc", Arrays).load(IMAGES).splits["test"]
        with torch.inference_mode():
            right += (network.eval()(test.inputs[:]).argmax(dim=1) == test.targets).tolist()
    assert np.mean(right) > 0.6  # of three classes
    for share, epochs in ((0.0, 1), (1.1, 1), (0.5, 0)):
        with pytest.raises(ConfigError, match="must be"):
            pretrain(job, files, share, epochs)
    content = yaml.safe_load(files[names[1]].read_text())
    content["datasets"]["organc"]["classes"] = {"other": [0], "class-1": [1], "class-2": [2]}
    files[names[1]].write_text(yaml.safe_dump(content))
    with pytest.raises(DataError, match="its classes or the shape of its inputs differ"):
        pretrain(job, files, 1.0, 1)


@pytest.mark.slow
def test_pretrain_declares_under_the_jobs_name_only(tmp_path: Path) -> None:
    arguments = ["pretrain", str(JOBS / "fedap_har"), "--sites", str(tmp_path), "-o", str(tmp_path / "x.safetensors")]
    done = CliRunner().invoke(app, [*arguments, "--declare"])
    assert done.exit_code == 1 and "job 'fedap_har' uses 0 checkpoints" in str(done.exception)
