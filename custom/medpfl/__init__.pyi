# SPDX-License-Identifier: Apache-2.0
"""Types of the public names, which ``__init__.py`` imports when they are first asked for."""

from medpfl.api import ComparisonResult as ComparisonResult
from medpfl.api import DataCheck as DataCheck
from medpfl.api import JobResult as JobResult
from medpfl.api import Model as Model
from medpfl.api import Svg as Svg
from medpfl.api import check_data as check_data
from medpfl.api import compare as compare
from medpfl.api import load_job as load_job
from medpfl.api import load_model as load_model
from medpfl.api import load_result as load_result
from medpfl.api import simulate as simulate
from medpfl.core.errors import MedPFLError as MedPFLError
from medpfl.data.site_file import SiteFile as SiteFile
from medpfl.data.site_file import load_site_file as load_site_file
from medpfl.flare.recipes import CusFLRecipe as CusFLRecipe
from medpfl.flare.recipes import FedAPRecipe as FedAPRecipe
from medpfl.flare.recipes import FedSMRecipe as FedSMRecipe
from medpfl.flare.recipes import MedPFLRecipe as MedPFLRecipe
from medpfl.flare.recipes import MHpFLIDRecipe as MHpFLIDRecipe
from medpfl.flare.recipes import PFedNetRecipe as PFedNetRecipe
from medpfl.job import Job as Job
from medpfl.job.settings import Settings as Settings
from medpfl.methods.cusfl import CusFL as CusFL
from medpfl.methods.fedap import FedAP as FedAP
from medpfl.methods.fedsm import FedSM as FedSM
from medpfl.methods.mh_pflid import MHpFLID as MHpFLID
from medpfl.methods.pfednet import PFedNet as PFedNet
from medpfl.methods.softpull import SoftPull as SoftPull
from medpfl.tasks import Classification as Classification
from medpfl.tasks import MultiLabel as MultiLabel
from medpfl.tasks import PartlyLabelled as PartlyLabelled
from medpfl.tasks import RegionSegmentation as RegionSegmentation
from medpfl.tasks import Regression as Regression
from medpfl.tasks import Segmentation as Segmentation
from medpfl.tasks import Survival as Survival
from medpfl.tasks import Tabular as Tabular
from medpfl.tasks import TimeSeries as TimeSeries

__version__: str
