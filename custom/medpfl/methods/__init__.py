# SPDX-License-Identifier: Apache-2.0
"""One file per method: what a hospital trains in a round, and which models it ends with. No nvflare, no monai."""
