# SPDX-License-Identifier: Apache-2.0
"""``medpfl site init``: look at a folder or a table, ask what cannot be seen there, and write a site file."""
