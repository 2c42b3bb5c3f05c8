# SPDX-License-Identifier: Apache-2.0
"""Benchmarks and the code of studies: run from a checkout (``python -m benchmarks``), not installed at hospitals.

They may import everything; nothing in the package ``medpfl`` imports them.
"""
