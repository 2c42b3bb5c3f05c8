# SPDX-License-Identifier: Apache-2.0
"""Trackers that ship: a job's numbers in TensorBoard, MLflow and Weights & Biases, one file each.

Written by the server alone.
"""
