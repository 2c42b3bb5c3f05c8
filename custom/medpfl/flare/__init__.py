# SPDX-License-Identifier: Apache-2.0
"""The thin shell around the round loop for NVIDIA FLARE 2.9: controller, executor, wire format, allow list."""
