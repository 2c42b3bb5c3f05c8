# SPDX-License-Identifier: Apache-2.0
"""Methods x seeds on one task, in process: the comparison file, its runs, the statistics and the report."""
