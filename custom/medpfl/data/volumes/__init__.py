# SPDX-License-Identifier: Apache-2.0
"""Volumes: NIfTI files or DICOM series with label maps; segmentations go back in their geometry."""
