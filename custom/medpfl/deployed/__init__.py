# SPDX-License-Identifier: Apache-2.0
"""Models in use: evaluate, keep, predict, export."""
