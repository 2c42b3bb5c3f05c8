# SPDX-License-Identifier: Apache-2.0
"""Image files with class labels, with masks, or both; masks go back in their size."""
