# SPDX-License-Identifier: Apache-2.0
"""The tables of ``benchmarks attacks --skin``: those of the attacks on generated images."""

from benchmarks.attacks import table_of as table_of
