# SPDX-License-Identifier: Apache-2.0
"""MedPFL: personalised federated learning for hospitals, on NVIDIA FLARE."""

__version__ = "0.1.0"
