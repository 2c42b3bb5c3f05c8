# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, one file per verb of ``medpfl bench``. They may import everything; only the command line imports them."""
