# SPDX-License-Identifier: Apache-2.0
"""Every method of the package in a job that takes milliseconds, at two hospitals with tables or images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from medpfl.core.mixers import AttentiveMessages, Mixer, SoftPull
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.apfl import APFL
from medpfl.methods.auto import Auto
from medpfl.methods.contract import Method
from medpfl.methods.cusfl import CusFL
from medpfl.methods.ditto import Ditto
from medpfl.methods.dsfl import DSFL
from medpfl.methods.fedamp import FedAMP
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedbn import FedBN
from medpfl.methods.feddf import FedDF
from medpfl.methods.fedmd import FedMD
from medpfl.methods.fedper import FedPer
from medpfl.methods.fedprox import FedProx
from medpfl.methods.fedrep import FedRep
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.fedsm import FedSM, FedSMEnsemble, FedSMExtra, FedSMPersonalised
from medpfl.methods.fine_tuned import FineTuned
from medpfl.methods.ifca import IFCA
from medpfl.methods.kt_pfl import KTpFL
from medpfl.methods.l2gd import L2GD
from medpfl.methods.lg_fedavg import LGFedAvg
from medpfl.methods.local import Local
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.methods.moe import MoE
from medpfl.methods.moon import Moon
from medpfl.methods.per_fedavg import PerFedAvg
from medpfl.methods.pfedme import PFedMe
from medpfl.methods.pfednet import PFedNet
from medpfl.methods.scaffold import Scaffold
from medpfl.methods.softpull import SoftPull as SoftPullMethod
from medpfl.models.resnet import ResNet
from medpfl.tasks import Classification
from medpfl.tasks.contract import Task
from pictures import TABLE, write_images
from small_jobs import for_few, write_table_sites
from tools import normed

CLASSES = {"nv": ["nv"], "bkl": ["bkl"], "mel": ["mel"]}
PICTURES = Classification("skin", size=(36, 36), architecture=ResNet(width=2, depth=10, pool=False))


@dataclass(frozen=True)
class Small:
    """A method with what it needs beside its training: arguments, components, images in place of tables."""

    kind: type[Method]
    args: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, Mixer] = field(default_factory=dict)
    images: bool = False

    def method(self, **training: Any) -> Method:
        return self.kind(**{"batch_size": 6, "lr": 0.01, **self.args, **training})

    def job(self, rounds: int = 2, **training: Any) -> Job:
        settings = Settings(rounds=rounds, references=(), finetune=2)
        task: Task = PICTURES if self.images else normed()
        return Job("small", 2, settings, dict(self.components), self.method(**training), task)


EVERY: dict[str, Small] = {
    "APFL": Small(APFL),
    "Auto": Small(Auto),
    "CusFL": Small(CusFL, {"split": "2", "projection": 3}),
    "CusFL, both taught": Small(CusFL, {"split": "2", "projection": 3, "frozen": False, "alignment": "contrastive"}),
    "Ditto": Small(Ditto),
    "DSFL": Small(DSFL, {"public": "shared"}, images=True),
    "FedAMP": Small(FedAMP, components={"anchor": AttentiveMessages(alpha=0.1, sigma=1.0)}),
    "FedAP": Small(FedAP),
    "FedAvg": Small(FedAvg),
    "FedBN": Small(FedBN),
    "FedDF": Small(FedDF, {"public": "shared"}, images=True),
    "FedMD": Small(FedMD, {"public": "shared"}, images=True),
    "FedPer": Small(FedPer),
    "FedProx": Small(FedProx, {"mu": 0.1}),
    "FedRep": Small(FedRep),
    "FedRoD": Small(FedRoD),
    "FedSM": Small(FedSM, {"selector_steps": 2}),
    "FedSM, local steps": Small(FedSM, {"selector_steps": 1, "selector_training": "local_steps"}),
    "FedSMEnsemble": Small(FedSMEnsemble, {"selector_steps": 2}),
    "FedSMExtra": Small(FedSMExtra, {"selector_steps": 2}),
    "FedSMPersonalised": Small(FedSMPersonalised, {"selector_steps": 2}),
    "FineTuned": Small(FineTuned),
    "IFCA": Small(IFCA),
    "KTpFL": Small(KTpFL, {"public": "shared"}, images=True),
    "L2GD": Small(L2GD, {"p": 0.3}, {"mixed": SoftPull(lam=0.5)}),
    "LGFedAvg": Small(LGFedAvg),
    "Local": Small(Local),
    "MHpFLID": Small(MHpFLID, {"epochs": 1, "distill_lr": 0.01}, images=True),
    "MoE": Small(MoE),
    "Moon": Small(Moon),
    "PerFedAvg": Small(PerFedAvg),
    "PerFedAvg, Hessian-free": Small(PerFedAvg, {"variant": "hessian-free"}),
    "PFedMe": Small(PFedMe, {"inner_steps": 2}),
    "PFedNet": Small(PFedNet),
    "PFedNet, alternating": Small(PFedNet, {"alternate": (1, 1)}),
    "Scaffold": Small(Scaffold),
    "SoftPull": Small(SoftPullMethod),
}


def write_both(folder: Path) -> dict[bool, dict[str, Path]]:
    """The hospitals' site files: those with images (True) and those with tables."""
    tables = write_table_sites(folder / "tables", ["anna", "berta"], rows=30)
    images = {name: with_images(folder / name, count) for name, count in (("anna", 24), ("berta", 18))}
    for file in (*tables.values(), *images.values()):
        for_few(file)
    return {False: tables, True: images}


def with_images(folder: Path, count: int) -> Path:
    """A hospital's site file with so many images of its own, and public ones."""
    write_images(folder / "own", count=count)
    write_images(folder / "shared", count=14)

    def declared(place: str) -> dict[str, Any]:
        return {
            **{key: value for key, value in TABLE.items() if key != "masks"},
            "files": f"{place}/images/*.png",
            "table": {"file": f"{place}/list.csv", "image": "id"},
            "label": {"column": "dx", "classes": CLASSES},
        }

    path = folder / "site.yaml"
    content = {"datasets": {"skin": declared("own"), "shared": {**declared("shared"), "public": True}}}
    path.write_text(yaml.safe_dump(content))
    return path
