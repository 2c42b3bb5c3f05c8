# SPDX-License-Identifier: Apache-2.0
"""Updates as few bytes: every codec encodes tensors to bytes and back, and remembers nothing."""

from collections.abc import Mapping

from torch import Tensor

from medpfl.core.codecs.cer import CER
from medpfl.core.codecs.chain import Chain
from medpfl.core.codecs.contract import Codec, decode_with
from medpfl.core.codecs.dadaquant import DAdaQuant
from medpfl.core.codecs.feedback import encode_with_feedback
from medpfl.core.codecs.half import Half
from medpfl.core.codecs.progress import Progress
from medpfl.core.codecs.stc import STC
from medpfl.core.errors import ConfigError

__all__ = [
    "CER", "STC", "Chain", "Codec", "DAdaQuant", "Half", "Progress", "check_known", "decode", "encode_with_feedback",
]  # fmt: skip

CODECS: dict[str, type[Codec]] = {kind.tag: kind for kind in (CER, DAdaQuant, Half, STC)}


def check_known(codec: Codec) -> None:
    """Whether a receiver can decode what it encodes.

    Raises:
        ConfigError: it is of another package.
    """
    if codec.tag not in CODECS:
        raise ConfigError(
            f"{type(codec).__name__} cannot be a job's codec: who receives a message finds the decoder by its tag, and "
            f"of '{codec.tag}' there is none; there are: {', '.join(CODECS)}"
        )


def decode(data: bytes, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a message; ``like`` has the names, shapes and types that are expected.

    Raises:
        CodecError: it is not a message, its codec is not known here, it was made for other tensors, or it is damaged.
    """
    return decode_with(CODECS, data, like)
