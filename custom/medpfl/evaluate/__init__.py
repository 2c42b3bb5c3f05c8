# SPDX-License-Identifier: Apache-2.0
"""Metrics of models at a hospital, what a job leaves behind, and the report. No nvflare."""
