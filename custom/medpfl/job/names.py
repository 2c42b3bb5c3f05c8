# SPDX-License-Identifier: Apache-2.0
"""What a job's files are called, and the classes of FLARE's parts that they name."""

SERVER_FILE, CLIENT_FILE = "config_fed_server.json", "config_fed_client.json"
MODEL_FILE = "model.safetensors"
"""Where a job that evaluates holds the given model: this name in ``app/config``."""

CONTROLLER = "medpfl.flare.controller.MixingController"
EVALUATION_CONTROLLER = "medpfl.flare.evaluation.EvaluationController"
EXECUTOR = "medpfl.flare.executor.SiteExecutor"
ENCODE = "medpfl.flare.filters.EncodeUpdate"
DECODE = "medpfl.flare.filters.DecodeUpdate"
KNOWS_MESSAGES = "knows_medpfl"
"""Class attribute of a filter that was written for this package's messages: true. Others are refused by name."""


def foreign_filter(path: object) -> str:
    """The sentence that refuses a filter that was not."""
    return (
        f"the filter '{path}' was not written for MedPFL's messages, and so it is refused: FLARE's privacy filters "
        "take whole weights and BatchNorm's statistics for differences, which destroys a model without a word"
    )
