# SPDX-License-Identifier: Apache-2.0
"""What torch refuses on a GPU where the same bits are asked for is computed otherwise, to the same results."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import medpfl.models
from medpfl.core.devices import training_device
from medpfl.core.errors import ConfigError
from medpfl.core.repeatable import Repeatable, repeatable
from medpfl.models.contract import Architecture
from medpfl.models.tabnet import sparsemax
from medpfl.tasks.losses.entropy import CrossEntropy, Focal
from medpfl.tasks.losses.overlap import DiceCE

pytestmark = pytest.mark.slow

functional = nn.functional
NETWORKS = sorted(
    {
        kind
        for module in pkgutil.iter_modules(medpfl.models.__path__)
        for kind in vars(importlib.import_module(f"medpfl.models.{module.name}")).values()
        if isinstance(kind, type) and issubclass(kind, Architecture) and not inspect.isabstract(kind)
    },
    key=lambda kind: kind.__name__,
)
CHOOSE = {"Auto", "ByHospital", "OwnChoice", "MonaiNet"}
"""Which are made of other networks of this package, or are any of MONAI's."""
REFUSED = (
    *("upsample_linear", "upsample_bilinear", "upsample_bicubic", "upsample_trilinear", "grid_sampler", "cumsum"),
    *("_adaptive_avg_pool", "avg_pool3d_backward", "adaptive_max_pool", "fractional_max_pool", "max_unpool"),
    *("reflection_pad", "_ctc_loss", "histc", "kthvalue"),
)
"""By the list at ``torch.use_deterministic_algorithms``: the beginnings of their names; and a map's cross-entropy."""


class Refusing(TorchDispatchMode):
    """torch's refusal, on any device: the operations below torch's functions, and those of their gradients."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name.startswith(REFUSED) or (name.startswith("nll_loss2d_forward") and args[3] != 0):
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


MASKS = torch.arange(2 * 6 * 8).view(2, 6, 8) % 3
CLASSES = torch.tensor([0.5, 1.0, 2.0])
OPERATIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "DiceCE": ((2, 3, 6, 8), lambda x: DiceCE()(x, MASKS.to(x.device))),
    "CrossEntropy": ((2, 3, 6, 8), lambda x: CrossEntropy()(x, MASKS.to(x.device))),
    "Focal": ((2, 3, 6, 8), lambda x: Focal()(x, MASKS.to(x.device))),
    "weights and ignored": (
        (2, 3, 6, 8),
        lambda x: functional.cross_entropy(x, MASKS.to(x.device), weight=CLASSES.to(x.device), ignore_index=1),
    ),
    "sum": ((2, 3, 6, 8), lambda x: functional.cross_entropy(x, MASKS.to(x.device), reduction="sum")),
    "sparsemax": ((5, 7), sparsemax),
    "trilinear": ((2, 2, 3, 4, 5), nn.Upsample(scale_factor=2, mode="trilinear", align_corners=False)),
    "bilinear": ((2, 2, 3, 4), lambda x: functional.interpolate(x, (7, 5), mode="bilinear", align_corners=True)),
    "pooled": ((2, 2, 9, 12), nn.AdaptiveAvgPool2d((6, 5))),
    "pooled volumes": ((2, 2, 6, 8, 5), nn.AdaptiveAvgPool3d((3, None, 2))),
    "means of volumes": ((2, 2, 6, 8, 5), nn.AvgPool3d(2, 2)),
    "overlapping means": ((2, 2, 6, 8, 5), nn.AvgPool3d((3, 2, 3), (2, 1, 2), ceil_mode=True)),
    "pooled series": ((2, 2, 9), nn.AdaptiveAvgPool1d(4)),
}


def run(name: str, device: str) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of the sum of its squares."""
    shape, operation = OPERATIONS[name]
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    outputs = operation(inputs)
    outputs.square().sum().backward()
    assert inputs.grad is not None
    return outputs.detach().cpu(), inputs.grad.cpu()


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_that_repeat_themselves(name: str, device: str) -> None:
    expected = run(name, "cpu")
    training_device()  # asks for the same bits, on a GPU
    with Repeatable() if device == "cpu" else repeatable(torch.device(device)):
        run(name, device)  # matrices are made once, by torch's own operations on the processor
        with Refusing():
            found = run(name, device)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if name != "Focal":
        with pytest.raises(RuntimeError, match="does not have a deterministic"), Refusing():
            run(name, "cpu")


INPUTS = (((3, 64, 64),), ((1, 16, 16, 16), (1, 32, 32, 32)), ((3, 128),), ((10,),))
"""Of each kind the smallest that a network takes: its operations are the same with larger ones."""
SMALL: dict[str, dict[str, Any]] = {
    "AlexNet": {"hidden": 32},
    "UNETR": {"feature_size": 4, "hidden_size": 24, "mlp_dim": 24, "num_heads": 2},
    "ViT": {"hidden_size": 24, "mlp_dim": 24, "num_heads": 2, "num_layers": 2},
}
"""Which have the same operations at any width."""
STEPPED = [
    pytest.param(kind, id=kind.__name__, marks=[pytest.mark.convolutions] * ("norm" not in kind.__annotations__))
    for kind in NETWORKS
]
"""Those with a norm make a step with each processor's convolutions in tests/models/test_monai_networks.py, all of them;
which operations they ask for does not depend on the processor."""


def taken(kind: type[Architecture], shapes: Sequence[tuple[int, ...]]) -> tuple[nn.Module, Tensor] | None:
    """The network, and the first inputs that it takes; None where it takes others. Its matrices are made."""
    for shape in shapes:
        try:
            network, inputs = kind(**SMALL.get(kind.__name__, {})).build(shape, 3), torch.randn(2, *shape)
            with Repeatable():
                network(inputs)
        except (ConfigError, RuntimeError, ValueError, IndexError):
            continue
        return network, inputs
    return None


@pytest.mark.parametrize("kind", STEPPED)
def test_no_network_of_ours_needs_what_is_refused(kind: type[Architecture]) -> None:
    """Whatever inputs it takes, in a step of training."""
    tried = [found for shapes in INPUTS if (found := taken(kind, shapes))]
    for network, inputs in tried:
        with Repeatable(), Refusing():
            outputs = network(inputs)
            (outputs if isinstance(outputs, Tensor) else outputs[0]).square().sum().backward()
    assert tried or kind.__name__ in CHOOSE


def test_a_processor_computes_as_it_did() -> None:
    assert not isinstance(repeatable(torch.device("cpu")), Repeatable)
