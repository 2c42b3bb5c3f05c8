# SPDX-License-Identifier: Apache-2.0
"""CusFL: every hospital trains a model of its own; the federated feature extractor only teaches it.

Wicaksana, Yan, Yang, Liu, Fan, Cheng, "Customized Federated Learning for Multi-Source Decentralized Medical Image
Classification", IEEE JBHI 26(11), 2022. The network is h(f(x)), extractor and head; g projects f's output. A hospital
minimises  L_task + lambda2 L_sim,  L_sim = 1 - cos(g_xi(f_xi(x)), g(f(x))), and sends f and g; the server makes xi of
them (Eq. 5), and xi never replaces anything. Deviation: lambda2 is capped, because at the start L_sim is about 0 and
the paper's rule would weigh its gradient by millions. Two variants of ours, off unless asked for: ``teacher`` and
``warm_up``.
"""

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.frozen import training_only
from medpfl.core.groups import under
from medpfl.core.mixers import MeanOfLatest, Mixer
from medpfl.data.samples import Samples
from medpfl.methods.contract import Batch, Build, Method, Site
from medpfl.methods.moon import contrast
from medpfl.models.extractor import Extractor
from medpfl.models.split import find_body, watched
from medpfl.privacy.contract import Cover


def similarity_loss(teacher: Tensor, own: Tensor) -> Tensor:
    """Eq. (3): mean of 1 - cosine of the rows, B x D each; in [0, 2]."""
    return (1 - torch.cosine_similarity(teacher.float(), own.float())).mean()


def weight_for(ratio: float, task: Tensor, aligned: Tensor, cap: float) -> Tensor:
    """lambda2 with  ratio = lambda2 L_aligned / (L_task + lambda2 L_aligned), at most ``cap``; without gradient."""
    task, aligned = task.detach().float(), aligned.detach().float()
    tiny = torch.finfo(torch.float32).tiny
    return (ratio / (1 - ratio) * task / aligned.clamp_min(tiny)).clamp(max=cap)


def spread(vectors: Tensor) -> Tensor:
    """1 - |mean of the rows' directions|^2, B x D, in [0, 1]: 0 where every sample is given the same direction.

    Not the paper's. Nothing in L_sim keeps g from that, and where it happens the teacher says nothing.
    """
    return 1 - torch.nn.functional.normalize(vectors.detach().float(), dim=1).mean(dim=0).square().sum()


def pooled(features: Tensor) -> Tensor:
    """Global mean over the positions of a map, B x C x ... to B x C; float32, as g's weights are, whatever the network
    computes in."""
    return (features.flatten(2).mean(dim=2) if features.dim() > 2 else features).float()


class Guide(nn.Module):
    """g(f(x)): the extractor, and the projection if there is one."""

    def __init__(self, extractor: Extractor, projection: nn.Module | None):
        super().__init__()
        self.extractor, self.projection = extractor, projection

    def forward(self, inputs: Tensor) -> Tensor:
        features = pooled(self.extractor(inputs))
        return features if self.projection is None else self.projection(features)


class Alignment(nn.Module):
    """What the last round's batches saw on average: the realised ratio, lambda2, the alignment loss, and by how much
    g's vectors differ (``spread``).

    Args:
        warm_up: whether there is one. Then it also says whether f has ``parted`` from f_xi, once, after it.
    """

    kept = ("ratio", "weight", "loss", "spread")

    def __init__(self, warm_up: bool = False) -> None:
        super().__init__()
        for name in (*self.kept, *(("parted",) if warm_up else ())):
            self.register_buffer(name, torch.zeros(()))


@dataclass(frozen=True, kw_only=True)
class CusFL(Method):
    """Slot "federated" (``MeanOfLatest``): f and g up, xi down. Private: the personal network (and the tutor), whose
    head never travels; the personal network alone predicts.

    Args:
        ratio: r, the alignment's share of the loss, in [0, 1). 0 is local training.
        ratios: hospital to its own r.
        cap: largest lambda2, > 0.
        split: path of the module that ends the extractor. None: "layer2" of a ResNet; else the last module to give
            the smallest feature map (a UNet's encoder).
        projection: width of g's output, >= 1; None: no projection.
        alignment: "cosine", or "contrastive": MOON's loss, which also pushes away from the hospital's last model.
        temperature: of the contrastive loss, > 0.
        frozen: False: xi moves towards the hospital, too, while it teaches; what it has become is not sent.
        aligned_rounds: the last round with a teacher; in later ones hospitals fine-tune alone. None: the job's last.
        teacher: what f_xi is made of. "aggregated", Eq. (5): the personal networks' f. "trained", a variant of ours:
            f of a network "tutor" that every hospital starts from f_xi and trains on the labels, with a head that
            stays at home; a hint of it is in the paper's Fig. 2.
        warm_up: rounds before which f is replaced by f_xi, and in which nothing is aligned: until then hospitals share
            f and keep their heads (FedPer). It is once more replaced before the first round after them in which the
            hospital trains. A variant of ours; in the paper, 0, nothing is ever replaced.
    """

    batch_size: int = 32
    ratio: float = 0.5
    ratios: dict[str, float] = field(default_factory=dict)
    cap: float = 10.0
    split: str | None = None
    projection: int | None = 128
    alignment: Literal["cosine", "contrastive"] = "cosine"
    temperature: float = 0.5
    frozen: bool = True
    aligned_rounds: int | None = None
    teacher: Literal["aggregated", "trained"] = "aggregated"
    warm_up: int = 0

    deploys: ClassVar = {"personal": "personal"}
    cover: ClassVar = Cover(derived=("federated",))
    after_steps: ClassVar = ("personal",)
    diagnoses: ClassVar = tuple(f"alignment_{name}" for name in Alignment.kept)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in {"ratio": self.ratio, **{f"ratio of {k}": v for k, v in self.ratios.items()}}.items():
            if not 0 <= value < 1:
                raise ConfigError(f"CusFL's {name} must be in [0, 1), got {value}")
        for name in ("cap", "temperature"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"CusFL's {name} must be above 0, got {getattr(self, name)}")
        for name, least in (("projection", 1), ("aligned_rounds", 0), ("warm_up", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"CusFL's {name} must be at least {least}, got {value}")
        if self.teacher == "trained" and self.privacy is not None and self.privacy.level == "record":
            raise ConfigError("CusFL's trained teacher takes further steps on every batch, which DPSGD does not count")

    @property
    def named_hospitals(self) -> Collection[str]:
        return self.ratios

    def models(self, build: Build) -> dict[str, nn.Module]:
        guides = ("federated", "previous") if self.alignment == "contrastive" else ("federated",)
        made: dict[str, nn.Module] = {name: self._guide(build) for name in guides}
        projection = self._guide(build).projection
        own = {} if projection is None else {"projection": projection}
        tutor = {"tutor": build.network()} if self.teacher == "trained" else {}
        return {"personal": build.network(), **own, **made, **tutor, "alignment": Alignment(self.warm_up > 0)}

    def _guide(self, build: Build) -> Guide:
        """f and g with the job's initial weights."""
        network = build.network()
        default: str | None = getattr(getattr(build.task, "architecture", None), "extractor", None)
        path = self.split or default or find_body(network, build.input_shape, first=True)
        extractor = Extractor(network, path, build.input_shape)
        if self.projection is None:
            return Guide(extractor, None)
        return Guide(extractor, build.seeded(partial(_projection, extractor.channels, self.projection)))

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"federated": under(models, "federated")}

    def components(self) -> dict[str, Mixer]:
        return {"federated": MeanOfLatest(uniform=True)}

    @property
    def anew(self) -> tuple[str, ...]:
        return ("federated",)

    def local_round(self, site: Site) -> None:
        teacher, models = site.models["federated"], site.models
        models.train()
        for name in ("federated", "previous"):
            if name in models:
                models[name].eval()
        ratio = self.ratios.get(site.name, self.ratio)
        if site.round <= self.warm_up or (self.aligned_rounds is not None and site.round > self.aligned_rounds):
            ratio = 0.0
        shared = {key: tensor.clone() for key, tensor in teacher.state_dict().items()}
        if self.warm_up:
            parted = models["alignment"].get_buffer("parted")  # a hospital may not be asked as soon as warm-up ends
            if not parted:
                _put_extractor(shared, models["personal"])
            parted.fill_(site.round > self.warm_up)
        if "tutor" in models:
            _put_extractor(shared, models["tutor"])
        with training_only(teacher) if self.frozen else nullcontext():
            seen = [self._step(site, batch, ratio) for batch in site.training_batches()]
        for name, value in zip(Alignment.kept, torch.stack(seen).mean(dim=0), strict=True):
            models["alignment"].get_buffer(name).copy_(value)
        sent = _trained(models, "tutor" if "tutor" in models else "personal")
        site.outbox["federated"] = {f"federated.{key}": tensor for key, tensor in sent.items()}
        if "previous" in models:
            models["previous"].load_state_dict(_trained(models, "personal"))

    def _step(self, site: Site, batch: Batch, ratio: float) -> Tensor:
        """A batch of Eq. (4), and of the tutor's training; returns what ``Alignment`` keeps of it."""
        if "tutor" in site.models:
            with site.autocast():
                learnt = site.task.loss(site.models["tutor"](batch.inputs), batch.targets)
            site.step("tutor", learnt)
        personal, teacher = site.models["personal"], site.models["federated"]
        assert isinstance(teacher, Guide)
        with site.autocast():
            with watched(personal, teacher.extractor.path, lambda found: pooled(found).clone()) as seen:
                outputs = personal(batch.inputs)
            task = site.task.loss(outputs, batch.targets)
            if ratio:
                with torch.set_grad_enabled(not self.frozen):
                    taught = teacher(batch.inputs)
                own = project(seen[0], site.models)  # f ends where its last module first has run
                if self.alignment == "cosine":
                    aligned = similarity_loss(taught, own)
                else:
                    with torch.no_grad():
                        before = site.models["previous"](batch.inputs)
                    aligned = contrast(own, taught, before, self.temperature)
        if not ratio:
            site.step("personal", task)
            return torch.zeros(len(Alignment.kept), device=site.device)
        weight = weight_for(ratio, task, aligned, self.cap)
        others = ("projection",) if "projection" in site.models else ()
        site.step("personal", task + weight * aligned, *others, *(() if self.frozen else ("federated",)))
        site.last_loss = task  # comparable with other methods'
        share = weight * aligned.detach()
        return torch.stack([share / (task.detach() + share), weight, aligned.detach(), spread(own)]).float()

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """Means over the batches of the last round: realised ratio, lambda2, alignment loss, spread of g's vectors."""
        kept = models["alignment"]
        return {f"alignment_{name}": float(kept.get_buffer(name)) for name in Alignment.kept}


def project(features: Tensor, models: nn.ModuleDict) -> Tensor:
    """The hospital's own g, if there is one."""
    own: Tensor = models["projection"](features) if "projection" in models else features
    return own


def _projection(width: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))


def _put_extractor(guide: Mapping[str, Tensor], network: nn.Module) -> None:
    """Replace the network's f, running statistics included, by that of a ``Guide``'s entries."""
    prefix = "extractor.network."
    found = {key.removeprefix(prefix): tensor for key, tensor in guide.items() if key.startswith(prefix)}
    network.load_state_dict({**network.state_dict(), **found})


def _trained(models: nn.ModuleDict, network: str) -> dict[str, Tensor]:
    """f of that network and the hospital's own g, under the names that they have in a ``Guide``."""
    places = {"extractor.network": models[network].state_dict()}
    if "projection" in models:
        places["projection"] = models["projection"].state_dict()
    found = {}
    for key in models["federated"].state_dict():
        place = next(place for place in places if key.startswith(f"{place}."))
        found[key] = places[place][key.removeprefix(f"{place}.")]
    return found
