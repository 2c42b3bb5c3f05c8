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


_PRIVACY = {"ExcludeVars": "exclude_vars", "PercentilePrivacy": "percentile_privacy", "SVTPrivacy": "svt_privacy"}
HONOURED = frozenset(
    f"nvflare.app_common.filters.{name}" for kind, file in _PRIVACY.items() for name in (kind, f"{file}.{kind}")
)
"""FLARE's filters that can act on a hospital's answers: updates travel as differences where one does (see
``rounds.differences``)."""


def foreign_filter(path: object) -> str:
    """The sentence that refuses a filter that cannot act on our messages, or not at this place."""
    if path in HONOURED:
        return (
            f"the filter '{path}' can act on what a hospital answers, on its way out there (a hospital's "
            "'task_result_filters'), and nowhere else: models that are sent to hospitals are no differences"
        )
    return (
        f"the filter '{path}' was not written for MedPFL's messages, and so it is refused: it could destroy a model "
        f"without a word. Of FLARE's own filters a hospital's answers can pass {', '.join(_PRIVACY)}"
    )


def not_both(path: str, other: str) -> str:
    """The sentence that refuses a filter for differences where another takes whole messages."""
    return (
        f"the filter '{path}' acts on updates as differences, and '{other}' takes whole messages: they cannot stand "
        "in one job"
    )
