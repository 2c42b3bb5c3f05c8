# SPDX-License-Identifier: Apache-2.0
"""What can be mixed without being seen: a matrix that does not depend on the tensors that it mixes."""

from collections.abc import Mapping

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mixer


def check_encryptable(mixers: Mapping[str, Mixer], clips: bool, codecs: bool) -> None:
    """Refuse a job whose server would have to see what the hospitals encrypt.

    Args:
        mixers: slot to its component.
        clips: whether the server is to shorten updates that are too long.
        codecs: whether the job has codecs.

    Raises:
        ConfigError: naming the component or the setting.
    """
    for slot, mixer in mixers.items():
        if mixer.travels and (type(mixer).mix is not Mixer.mix or mixer.remembers is not None):
            raise ConfigError(
                f"component '{slot}': {type(mixer).__name__} needs the hospitals' tensors as they are, and the "
                "controller's 'encryption' keeps them from the server; encrypted ones can be mixed by a matrix that "
                "does not depend on them: Mean, SoftPull, StatisticsDistance"
            )
    if clips:
        raise ConfigError(
            "the controller's clip_updates needs the lengths of updates, and its 'encryption' keeps them from the "
            "server; leave one of the two out"
        )
    if codecs:
        raise ConfigError(
            "the job's codecs work on tensors as they are, and the controller's 'encryption' makes ciphertexts of "
            "them, which no codec can make smaller; leave one of the two out"
        )
