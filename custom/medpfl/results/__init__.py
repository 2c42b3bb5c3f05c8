# SPDX-License-Identifier: Apache-2.0
"""What a job leaves behind, and its tables and reports."""
