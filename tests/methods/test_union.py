# SPDX-License-Identifier: Apache-2.0
"""Testing on several hospitals' cases together: balanced accuracy and AUC of the union, against scikit-learn."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from medpfl.core.errors import DataError
from medpfl.core.mixers import Identity
from medpfl.data.samples import SiteData, empty_like
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import evaluate_on, evaluate_on_all
from medpfl.methods.local import Local
from tools import Make, run


@pytest.mark.slow
def test_the_union_is_no_mean(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    run(make_job(mixers={"local": Identity()}, method=Local(lr=0.05, epochs=10)), table_sites, tmp_path)
    model = load_deployed(tmp_path / "home" / "anna" / "small" / "models" / "local-last.safetensors")
    data = {site: model.task.load(load_site_file(path)) for site, path in table_sites.items()}
    each, union = evaluate_on_all(model, data, "test")
    assert each == {site: evaluate_on(model, found, "test") for site, found in data.items()}

    tests = [found.splits["test"] for found in data.values()]
    truth = np.concatenate([test.targets[:].numpy() for test in tests])
    probability = torch.cat([model(test.inputs[:]).sigmoid()[:, 0] for test in tests]).detach().numpy()
    assert union.metrics["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(truth, probability > 0.5))
    assert union.metrics["auc"] == pytest.approx(roc_auc_score(truth, probability))
    sizes = [len(test) for test in tests]
    for metric, exact in (("accuracy", True), ("balanced_accuracy", False), ("auc", False)):
        mean = np.average([found.metrics[metric] for found in each.values()], weights=sizes)
        assert (abs(union.metrics[metric] - mean) < 1e-6) == exact
    assert len(union.cases) == sum(sizes)

    dora = data["dora"]
    empty = SiteData({**dora.splits, "test": empty_like(tests[0])}, dora.class_names, dora.preparation)
    with pytest.raises(DataError, match="the test split is empty"):
        evaluate_on_all(model, {**data, "dora": empty}, "test")
