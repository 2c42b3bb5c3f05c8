# SPDX-License-Identifier: Apache-2.0
"""What decisions are scored by. One file for what belongs together; ``base`` says what a metric is."""
