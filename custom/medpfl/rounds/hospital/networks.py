# SPDX-License-Identifier: Apache-2.0
"""A hospital's networks in a job: those of its method and of the references beside it, and the slots they make up."""

from collections.abc import Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError, ProtocolError, shown
from medpfl.core.frozen import frozen_entries
from medpfl.core.groups import check_slots, describe, without
from medpfl.core.tied import first_names, once, own_state
from medpfl.methods.contract import Build, Method
from medpfl.methods.returned import networks_of, outbox_of, slots_of
from medpfl.rounds.messages import SEPARATOR, Slots, copy_out, flatten, gather, load


class Networks:
    """All networks, with the job's initial weights.

    Args:
        methods: the job's, then the references.
        served: slot that the server mixes to whether it travels.

    Raises:
        ConfigError: two methods use one name, one deploys a network that it does not have, the slots are not those that
            the server mixes, or all of one is frozen.
    """

    def __init__(self, methods: Sequence[Method], build: Build, served: Mapping[str, bool], device: torch.device):
        self.methods, self.device = methods, device
        self.models = nn.ModuleDict()
        self.owner: dict[str, Method] = {}
        """Network to the method that made it."""
        self.slots: dict[str, list[str]] = {}
        """Slot to its entries; a tensor that layers share is one entry."""
        for method in methods:
            self._add(method, build)
        self.models.to(device)
        check_slots(self.models, self.slots)
        self.slots = once(self.models, self.slots)
        self._check_served(served)
        self.travelling = [slot for slot, travels in served.items() if travels and slot in self.slots]
        self._own = list(own_state(self.models))
        # Held by nobody but the networks: after a failed task these let go of them.
        self._weights = {key: ref(t) for key, t in self.models.named_parameters(remove_duplicate=False)}
        sent = {key for slot in self.travelling for key in self.slots[slot]}
        kept = set(methods[0].kept(self.models))
        self.private = [key for key in self._own if key not in sent or key in kept]
        """Entries that only this hospital holds, or holds otherwise than they are sent."""

    def _add(self, method: Method, build: Build) -> None:
        mine = nn.ModuleDict(networks_of(method, build))
        for name, network in method.deploys.items():
            if network not in mine:
                raise ConfigError(
                    f"{type(method).__name__} deploys '{name}' from its network '{network}', which it does not have; "
                    f"its networks are: {', '.join(mine)}"
                )
        for name in mine:
            if name in self.owner:
                raise ConfigError(f"{type(method).__name__} uses the model name '{name}', which is taken")
            self.owner[name] = method
        self.models.update(dict(mine.items()))
        frozen = frozen_entries(mine)
        for slot, keys in slots_of(method, mine).items():
            self.slots[slot] = without(keys, frozen)
            if keys and not self.slots[slot]:
                raise ConfigError(
                    f"start's frozen leaves nothing of {type(method).__name__}'s slot '{slot}' to travel: take a "
                    "module of it out of 'frozen', or another method"
                )

    def _check_served(self, served: Mapping[str, bool]) -> None:
        may_lack = {slot for method in self.methods for slot in method.components()}  # a network may have no such part
        kind = type(self.methods[0]).__name__
        for name in served:
            if name not in self.slots and name not in may_lack:
                known = ", ".join(self.slots)
                raise ConfigError(f"the server mixes slot '{name}', which {kind} does not have; its slots are: {known}")
        for name in self.slots:
            if name not in served:
                raise ConfigError(f"{kind} has slot '{name}', but the server mixes no such slot")

    def describe(self) -> str:
        """For the log: the slots and their sizes."""
        return describe(self.models, self.slots, self.travelling)

    def state(self) -> dict[str, Tensor]:
        """The networks' tensors as they are now, each once; see ``core.tied``."""
        state = self.models.state_dict()
        return {key: state[key] for key in self._own}

    def check_held(self, method: Method) -> None:
        """After a method's training: the weights are the tensors that they were. An optimiser that is kept moves these,
        and others in their place would not be trained from the next round on.

        Raises:
            ConfigError: naming the method and the weight.
        """
        now = dict(self.models.named_parameters(remove_duplicate=False))
        for key in [*self._weights, *now]:
            if key not in now or key not in self._weights or self._weights[key]() is not now[key]:
                raise ConfigError(
                    f"{type(method).__name__} puts another tensor or network in the place of '{key}' while it trains, "
                    "which no optimiser or file would know of in the next round: make networks in 'models' alone, and "
                    "copy values into them (load_state_dict, copy_)"
                )

    def gather(self, state: Mapping[str, Tensor] | None = None, into: Slots | None = None) -> Slots:
        """Copies of what travels; ``state``: of the networks now, where it is at hand; ``into``: see
        ``messages.gather``."""
        return gather(state or self.state(), self.slots, self.travelling, into)

    def take(self, slots: Slots, wanted: Sequence[str] | None = None) -> None:
        """Copy what the server sent into the networks in place.

        Args:
            wanted: the slots that it is to send, whole; None: all that travel.

        Raises:
            ProtocolError: it sent something else: what is private is not the server's to write, and an entry of another
                shape or type could be copied without a word.
        """
        state, sent = self.state(), flatten(slots)
        expected = {
            f"{slot}{SEPARATOR}{key}": state[key]
            for slot in (self.travelling if wanted is None else wanted)
            for key in self.slots[slot]
        }
        for name in sorted(sent.keys() - expected.keys()):
            raise ProtocolError(f"entry {shown(name)} does not travel in this job, and the server sent it")
        for name, entry in expected.items():
            if name not in sent:
                raise ProtocolError(f"entry '{name}' is missing in what the server sent")
            if (sent[name].shape, sent[name].dtype) != (entry.shape, entry.dtype):
                raise ProtocolError(
                    f"entry '{name}': expected shape {list(entry.shape)} {entry.dtype}, "
                    f"got {list(sent[name].shape)} {sent[name].dtype} of the server"
                )
        load(self.models, slots)

    def of(self, method: Method) -> nn.ModuleDict:
        """The networks that one of the methods made."""
        return nn.ModuleDict({key: self.models[key] for key, owner in self.owner.items() if owner is method})

    def untrained(self) -> list[str]:
        """Entries that travel and are not trained: BatchNorm's statistics, counters."""
        trained = dict(self.models.named_parameters())
        return [key for slot in self.travelling for key in self.slots[slot] if key not in trained]

    def fixed(self) -> list[str]:
        """Parameters that travel and that a network itself holds fixed (``requires_grad`` is False) beside others that
        are trained. One of which nothing is trained holds what its method sends, control variates say."""
        found: set[str] = set()
        for name, network in self.models.items():
            still = [key for key, weight in network.named_parameters() if not weight.requires_grad]
            if len(still) < sum(1 for _ in network.parameters()):
                found.update(f"{name}.{key}" for key in still)
        return [key for slot in self.travelling for key in self.slots[slot] if key in found]

    def sent_instead(self, method: Method, outbox: Mapping[str, Mapping[str, Tensor]]) -> Slots:
        """Copies of what a method sends instead of slots' tensors, but for frozen ones and further names.

        Raises:
            ConfigError: it is not what the slots hold: which entries, of which shapes and types.
        """
        first = first_names(self.models) if outbox else {}
        frozen = frozen_entries(self.models) if outbox else set()
        state = self.state() if outbox else {}
        found: Slots = {}
        for slot, given in outbox_of(method, outbox).items():
            if slot not in self.slots:
                raise _unsendable(
                    method, f"slot '{slot}', which it does not have; its slots are: {', '.join(self.slots)}"
                )
            found[slot] = {
                key: copy_out(tensor)
                for key, tensor in given.items()
                if first.get(key, key) == key and key not in frozen
            }
            for key in sorted(found[slot].keys() ^ set(self.slots[slot])):
                what = "without" if key in self.slots[slot] else "with"
                raise _unsendable(
                    method, f"slot '{slot}' {what} the entry '{key}'; it has: {', '.join(self.slots[slot])}"
                )
            for key, tensor in found[slot].items():
                if (tensor.shape, tensor.dtype) != (state[key].shape, state[key].dtype):
                    raise _unsendable(
                        method,
                        f"'{key}' of slot '{slot}' as {list(tensor.shape)} {tensor.dtype}; it is "
                        f"{list(state[key].shape)} {state[key].dtype}",
                    )
        return found


def _unsendable(method: Method, what: str) -> ConfigError:
    return ConfigError(f"{type(method).__name__} puts into 'site.outbox' {what}")
