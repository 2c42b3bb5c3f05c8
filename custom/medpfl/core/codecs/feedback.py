# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a codec lost is added to the next update, so that the sum of what was sent stays right.

Used by the hospital on its way up and by the server on its way down, each with a residual of its own (Sattler et al.).
"""

from collections.abc import Mapping

from torch import Tensor

from medpfl.core.codecs.base import Codec, tensors_of, vector_of


def encode_with_feedback(
    codec: Codec, update: Mapping[str, Tensor], residual: Mapping[str, Tensor], seed: int = 0
) -> tuple[bytes, dict[str, Tensor]]:
    """The message for ``update`` plus ``residual``, and the residual for the next one.

    Nothing is remembered here: who sends keeps the new residual, once the message is sure to be sent.

    Args:
        residual: of the message before, with the same entries; empty at first.

    Raises:
        CodecError: as ``Codec.encode``.
    """
    wanted = {key: tensor + residual[key] if residual else tensor for key, tensor in update.items()}
    reduced = codec.reduce(vector_of(wanted), seed)
    sent = tensors_of(reduced, wanted)
    return codec.message(wanted, reduced), {key: tensor - sent[key] for key, tensor in wanted.items()}
