# SPDX-License-Identifier: Apache-2.0
"""Recordings, cut into windows of one label."""
