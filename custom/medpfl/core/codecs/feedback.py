# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a codec lost is added to the next update, so that the sum of what was sent stays right.

Used by the hospital on its way up (Sattler et al.). On the way down differences to what the hospital holds do the same.
"""

from collections.abc import Mapping

from torch import Tensor

from medpfl.core.codecs.contract import Codec


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
    data, sent = codec.encode_and_tell(wanted, seed)
    return data, {key: tensor - sent[key] for key, tensor in wanted.items()}
