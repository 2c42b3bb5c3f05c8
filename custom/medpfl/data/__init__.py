# SPDX-License-Identifier: Apache-2.0
"""A hospital's own side: its site file, its readers and its splits. Nothing here is ever read from a job."""
