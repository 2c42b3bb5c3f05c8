# SPDX-License-Identifier: Apache-2.0
"""The server's side of a job, without a transport: who takes part, whose answers count, what is mixed, checkpoints."""
