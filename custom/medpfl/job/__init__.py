# SPDX-License-Identifier: Apache-2.0
"""A job folder (meta.json, app/config/*.json): what it may say, read, checked and written, without nvflare."""

from medpfl.job.contents import EvaluationJob, Job
from medpfl.job.reading import load_config, load_job, load_trackers
from medpfl.job.writing import write_evaluation_job, write_job

__all__ = ["EvaluationJob", "Job", "load_config", "load_job", "load_trackers", "write_evaluation_job", "write_job"]
