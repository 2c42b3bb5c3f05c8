# SPDX-License-Identifier: Apache-2.0
"""A hospital's answers where one of FLARE's own privacy filters acts on them: differences, and apart what stays whole.

FLARE's filters take a message of the kind ``WEIGHT_DIFF``, or each such part of a ``COLLECTION``. An answer that none
of them acts on is as ``flare.wire`` makes it.
"""

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.filters.exclude_vars import ExcludeVars

from medpfl.core.errors import ConfigError
from medpfl.flare.leaving import acting_on, name_of
from medpfl.flare.wire import arrays_of, put_parts, to_shareable
from medpfl.rounds.differences import apart, neither, statistics_of
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import SEPARATOR, Message, Slots
from medpfl.rounds.protocol.replies import InitReply, Reply, StatisticsReply
from medpfl.rounds.protocol.requests import Request


def answer(reply: Message[Reply], received: Message[Request], runner: SiteRunner, fl_ctx: FLContext) -> Shareable:
    """The answer as it is handed to the hospital's filters.

    Args:
        received: the request that it answers.
        runner: has answered it.

    Raises:
        ConfigError: a filter acts on it that this job's answers cannot be made ready for; it names the filter.
    """
    filters = acting_on(received.header.task, fl_ctx)
    if not filters or not reply.slots:
        return to_shareable(reply)
    name = name_of(filters[0])
    if isinstance(reply.header, InitReply):  # initial values, equal everywhere: nothing of them was learnt here
        if reply.header.encryption is not None:
            raise ConfigError(
                f"the filter '{name}' acts on differences of weights, and this job's hospitals send ciphertexts, which "
                "would pass it by: the job cannot run behind that filter"
            )
        if entry := neither(runner.models, reply.slots):
            raise ConfigError(
                f"the filter '{name}' acts on differences of weights, and this job's hospitals send '{entry}', which "
                "is none: the job cannot run behind that filter"
            )
        return put_parts(reply, {}, reply.slots, Shareable())
    if isinstance(reply.header, StatisticsReply):
        raise ConfigError(
            f"the filter '{name}' acts on differences of weights, and this job asks for statistics of the data, which "
            "would pass it by: they do not leave"
        )
    # What networks hold fixed is not sent, so that the server has it as it was: a filter's noise would move it.
    trained = {slot: {k: t for k, t in state.items() if k not in runner.fixed} for slot, state in reply.slots.items()}
    differences, whole = apart(trained, received.slots, statistics_of(runner.models), runner.gradients)
    for one in filters:
        whole = _without(one, whole, fl_ctx)
    return put_parts(reply, differences, whole, Shareable())


def _without(one: Filter, whole: Slots, fl_ctx: FLContext) -> Slots:
    """What a filter that excludes variables by name leaves of those that are apart from the differences."""
    if not isinstance(one, ExcludeVars):
        return whole
    dxo = DXO(DataKind.WEIGHT_DIFF, data=arrays_of(whole))
    left = one.process_dxo(dxo, Shareable(), fl_ctx)
    names = (left or dxo).data
    found = {
        slot: {key: t for key, t in state.items() if f"{slot}{SEPARATOR}{key}" in names}
        for slot, state in whole.items()
    }
    return {slot: state for slot, state in found.items() if state}
