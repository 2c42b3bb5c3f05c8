# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: what may be asked of it in a job, its noise, and the account of what it has cost."""

from medpfl.privacy.record import DPSGD
from medpfl.privacy.update import ClippedNoise

__all__ = ["DPSGD", "ClippedNoise"]
