# SPDX-License-Identifier: Apache-2.0
"""Demo hospitals: generated phantoms, and site files for public data that the user has downloaded."""
