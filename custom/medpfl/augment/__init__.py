# SPDX-License-Identifier: Apache-2.0
"""Augmentation: what networks see of a sample while they train, changed at random; a job lists the components."""
