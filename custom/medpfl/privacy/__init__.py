# SPDX-License-Identifier: Apache-2.0
"""Privacy: what keeps from the server, or from anybody, what a hospital's numbers say of its patients."""
