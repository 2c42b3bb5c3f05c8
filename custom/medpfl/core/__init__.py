# SPDX-License-Identifier: Apache-2.0
"""Tensors in, tensors out: mixing, groups, seeds. Imports torch and numpy only."""
