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
