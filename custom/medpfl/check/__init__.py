# SPDX-License-Identifier: Apache-2.0
"""What a data steward is shown before a hospital joins: everything read once, counted, and every problem named."""
