# SPDX-License-Identifier: Apache-2.0
"""Privacy: what keeps from the server, or from anybody, what a hospital's numbers say of its patients.

By noise (differential privacy): what a job may ask for, and the account of what it has cost; and by encryption."""

from medpfl.privacy.record import DPSGD
from medpfl.privacy.update import ClippedNoise

__all__ = ["DPSGD", "ClippedNoise"]
