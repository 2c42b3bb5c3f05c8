# SPDX-License-Identifier: Apache-2.0
"""Server components, one file each: the rule that mixes the hospitals' copies of one slot."""

from medpfl.core.mixers.attentive import AttentiveMessages
from medpfl.core.mixers.cluster_mean import ClusterMean
from medpfl.core.mixers.contract import Mixer, NoDefault, RoundInfo
from medpfl.core.mixers.control_variates import ControlVariates
from medpfl.core.mixers.coordinate_median import CoordinateMedian
from medpfl.core.mixers.identity import Identity
from medpfl.core.mixers.knowledge_transfer import KnowledgeTransfer
from medpfl.core.mixers.mean import Mean
from medpfl.core.mixers.mean_of_latest import MeanOfLatest
from medpfl.core.mixers.network_prox import NetworkProx
from medpfl.core.mixers.relaxed_mean import RelaxedMean
from medpfl.core.mixers.server_adam import ServerAdam
from medpfl.core.mixers.soft_pull import SoftPull
from medpfl.core.mixers.statistics_distance import StatisticsDistance
from medpfl.core.mixers.trimmed_mean import TrimmedMean

__all__ = [
    "AttentiveMessages",
    "ClusterMean",
    "ControlVariates",
    "CoordinateMedian",
    "Identity",
    "KnowledgeTransfer",
    "Mean",
    "MeanOfLatest",
    "Mixer",
    "NetworkProx",
    "NoDefault",
    "RelaxedMean",
    "RoundInfo",
    "ServerAdam",
    "SoftPull",
    "StatisticsDistance",
    "TrimmedMean",
]
