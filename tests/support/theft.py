# SPDX-License-Identifier: Apache-2.0
"""A job that carries a file of a hospital's machine to whoever submits it, by FLARE's own classes and without code.

The hospital's persistor reads whatever array the job names, the trainer takes it for its model and saves it unchanged,
and FLARE's evaluation across sites collects everybody's models into what the lead downloads.
"""

import json
from pathlib import Path

CYCLIC = "nvflare.app_common.ccwf"
AT_SERVER = (
    f"{CYCLIC}.CyclicServerController",
    "nvflare.app_common.workflows.cross_site_model_eval.CrossSiteModelEval",
)
PERSISTOR = "nvflare.app_common.np.np_model_persistor.NPModelPersistor"
AT_HOSPITAL = (
    f"{CYCLIC}.CyclicClientController",
    "nvflare.app_common.np.np_trainer.NPTrainer",
    "nvflare.app_common.np.np_validator.NPValidator",
    f"{CYCLIC}.comps.simple_model_shareable_generator.SimpleModelShareableGenerator",
    PERSISTOR,
)
"""All of them are in FLARE's default list."""


def write_theft(folder: Path, file: Path, sites: int) -> Path:
    """A job folder.

    Args:
        folder: to write.
        file: absolute path of a ``.npy`` file at the hospitals.
    """
    controller, trainer, validator, generator, persistor = AT_HOSPITAL
    files = {
        "meta.json": {
            "name": folder.name, "resource_spec": {}, "min_clients": sites, "deploy_map": {"app": ["@ALL"]},
        },
        "app/config/config_fed_server.json": {
            "format_version": 2,
            "workflows": [
                {"id": "cyclic", "path": AT_SERVER[0], "args": {"num_rounds": 1}},
                {"id": "evaluation", "path": AT_SERVER[1], "args": {}},
            ],
            "components": [],
        },
        "app/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [
                {
                    "tasks": ["cyclic_*"],
                    "executor": {
                        "path": controller,
                        "args": {
                            "learn_task_name": "train",
                            "persistor_id": "persistor",
                            "shareable_generator_id": "generator",
                        },
                    },
                },
                {"tasks": ["train", "submit_model"], "executor": {"path": trainer, "args": {"delta": 0}}},
                {"tasks": ["validate"], "executor": {"path": validator, "args": {}}},
            ],
            "components": [
                {"id": "persistor", "path": persistor, "args": {"source_ckpt_file_full_name": str(file)}},
                {"id": "generator", "path": generator, "args": {}},
            ],
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder
