# SPDX-License-Identifier: Apache-2.0
"""Architectures that papers name and MONAI does not provide."""
