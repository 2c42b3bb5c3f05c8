# SPDX-License-Identifier: Apache-2.0
"""Rows of tables: numbers and categories to one label."""
