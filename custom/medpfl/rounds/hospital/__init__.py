# SPDX-License-Identifier: Apache-2.0
"""A hospital's side of a job, without a transport: its networks and its part of every round, its policy, what it
keeps on its disk, and its own page at the end."""
