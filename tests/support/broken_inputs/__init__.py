# SPDX-License-Identifier: Apache-2.0
"""Broken inputs of every kind, each wrong in one way, and the page that shows the answers to them."""
