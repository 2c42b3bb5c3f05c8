# SPDX-License-Identifier: Apache-2.0
"""Which server component mixes which slot: the references' and the method's own, and what the job names instead."""

from collections.abc import Mapping, Sequence

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mixer, NoDefault
from medpfl.methods.contract import Method
from medpfl.methods.references import AVERAGE, CHOSEN, REFERENCES
from medpfl.methods.returned import components_of


def mixers_of(method: Method, references: Sequence[str], named: Mapping[str, Mixer]) -> dict[str, Mixer]:
    """Slot to component of a whole job; the references' slots come first.

    Args:
        references: names of the references that ride along; one that the method itself is counts once.
        named: slot to the component that the job names in place of the usual one.

    Raises:
        ConfigError: there is no such reference or slot, a slot needs a component that is not named, or a component
            takes gradients where the method sends weights, or the other way round; or the method has a reference's
            names.
    """
    own = components_of(method)
    _check_names(method, own)
    ridden = [_reference(name) for name in references if not isinstance(method, _reference(name))]
    owners: dict[str, Method] = {slot: kind() for kind in ridden for slot in kind().components()}
    for slot, mixer in named.items():
        if slot not in own and slot not in owners:
            known = ", ".join([*owners, *own])
            raise ConfigError(f"component '{slot}': {type(method).__name__} has no such slot; the slots are: {known}")
        usual = {**owners.get(slot, method).components(), **own}[slot]
        if slot not in own and isinstance(usual, Mixer) and not usual.travels:
            raise ConfigError(f"component '{slot}': remove it; this slot stays at the hospitals and nothing mixes it")
        _check_taken(method, slot, mixer, usual)
    owners.update(dict.fromkeys(own, method))
    found = {slot: named[slot] if slot in named else default_mixer(owner, slot) for slot, owner in owners.items()}
    _check_exchanged(method, {slot: found[slot] for slot in own})
    return found


def _check_exchanged(method: Method, own: Mapping[str, Mixer]) -> None:
    """What is exchanged within a round or sent in a way of its own are slots of the method, and what hospitals are
    shown reaches the server: another name would be passed over, and nothing exchanged."""
    kind, known = type(method).__name__, ", ".join(own)
    for what in ("refined", "shown", "waiting", "delivered", "probabilities", "anew"):
        for slot in getattr(method, what):
            if slot not in own:
                raise ConfigError(f"{kind}'s '{what}' names slot '{slot}', which it does not have; its slots: {known}")
    for slot in method.shown:
        if not own[slot].travels:
            raise ConfigError(
                f"component '{slot}': {kind} shows every hospital all hospitals' models of this slot, and "
                f"{type(own[slot]).__name__} keeps them at the hospitals: take a component that mixes them"
            )


def _check_names(method: Method, own: Mapping[str, Mixer | NoDefault]) -> None:
    """By its slots a hospital sees which references ride along, and by their models' names everybody tells those apart.
    So they are the references' also where none rides along."""
    kind, deployed = type(method).__name__, [*method.deploys, *method.diagnoses]
    if AVERAGE in deployed:
        raise ConfigError(f"{kind} calls a model '{AVERAGE}', as the average of all models is called: rename it")
    if CHOSEN in deployed:
        raise ConfigError(f"{kind} calls a model '{CHOSEN}', as the model of a hospital's choice is called: rename it")
    if twice := [name for name in method.diagnoses if name in method.deploys]:
        raise ConfigError(f"{kind} calls a number '{twice[0]}', as it calls a model: rename it")
    for reference in (one for one in REFERENCES.values() if not isinstance(method, one)):
        finetuned = [] if reference.fine_tuned is None else [f"{reference.fine_tuned}_finetuned"]
        for what, mine, theirs in (
            ("slot", list(own), list(reference().components())),
            ("model or a number", deployed, [*reference.deploys, *finetuned]),
        ):
            if taken := [name for name in mine if name in theirs]:
                raise ConfigError(
                    f"{kind} calls a {what} '{taken[0]}', as the reference {reference.__name__} has it: rename it"
                )


def _reference(name: str) -> type[Method]:
    if name not in REFERENCES:
        raise ConfigError(f"there is no reference '{name}'; there are: {', '.join(REFERENCES)}")
    return REFERENCES[name]


def default_mixer(method: Method, slot: str) -> Mixer:
    """The method's own component of one of its slots.

    Raises:
        ConfigError: it has none; the sentence says what to name.
    """
    own = components_of(method)
    if slot not in own:
        raise ConfigError(
            f"'components' of {type(method).__name__} must name a server component for its slot '{slot}', such as "
            f"Mean(); it names: {', '.join(own) or 'none'}"
        )
    usual = own[slot]
    if isinstance(usual, NoDefault):
        raise ConfigError(f"{type(method).__name__} has no default for slot '{slot}': {usual.advice}")
    return usual


def _check_taken(method: Method, slot: str, mixer: Mixer, usual: Mixer | NoDefault) -> None:
    sent = "weights" if isinstance(usual, NoDefault) else usual.takes
    if mixer.takes != sent:
        raise ConfigError(
            f"component '{slot}': {type(mixer).__name__} takes {mixer.takes}, but {type(method).__name__} as it is "
            f"configured sends {sent}"
        )
