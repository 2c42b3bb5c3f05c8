# SPDX-License-Identifier: Apache-2.0
"""Training script of the stock FedAvg job of ``benchmarks rounds``: sends back what it received."""

import nvflare.client as flare

if __name__ == "__main__":
    flare.init()
    while flare.is_running():
        flare.send(flare.FLModel(params=flare.receive().params))
