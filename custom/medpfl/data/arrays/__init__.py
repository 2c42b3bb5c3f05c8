# SPDX-License-Identifier: Apache-2.0
"""Rows of .npz files with labels."""
