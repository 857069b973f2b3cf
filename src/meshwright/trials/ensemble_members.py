"""Which models make an ensemble."""

from collections.abc import Sequence
from typing import Any

from meshwright.devices.scope import homes_of
from meshwright.errors import EnsembleError
from meshwright.strategies.attach import attached

Signature = list[tuple[tuple[int | None, ...], str]]


def describe_member(number: int, model: Any) -> str:
    """How errors name a member."""
    return f"member {number} ({model.name!r})"


def check_members(members: Any) -> tuple[Any, ...]:
    """The members, if they can be trained side by side and answer together.

    Raises:
        EnsembleError: They cannot.
    """
    import keras

    if not isinstance(members, list | tuple) or not members:
        raise EnsembleError(
            f"Ensemble received {members!r} (a {type(members).__name__}) as members.",
            "It takes a list of at least one Keras model.",
            "Write, for example, mw.Ensemble([make_model(seed) for seed in range(3)]).",
        )
    for number, member in enumerate(members):
        if not isinstance(member, keras.Model):
            raise EnsembleError(
                f"Ensemble received {member!r} (a {type(member).__name__}) as member "
                f"{number}.",
                "Members are Keras models.",
                "Wrap layers in a model, for example keras.Sequential([...]).",
            )
        _check_state(number, member)
    _check_sharing(members)
    _check_optimizers(members)
    _check_ends(members, "inputs")
    _check_ends(members, "outputs")
    return tuple(members)


def check_compiled(members: Sequence[Any], verb: str) -> None:
    """Refuses members that have no loss.

    Raises:
        EnsembleError: There is one.
    """
    for number, member in enumerate(members):
        if not member.compiled:
            raise EnsembleError(
                f"{verb} found {describe_member(number, member)} not compiled.",
                "A member is trained and evaluated with a loss of its own.",
                "Call its compile(optimizer=..., loss=...).",
            )


def home_of_member(number: int, model: Any) -> str | None:
    """The device that a member was put on by hand, if it was.

    Raises:
        EnsembleError: Its layers are on several.
    """
    homes = sorted({name for _, name in homes_of(model)})
    if len(homes) > 1:
        raise EnsembleError(
            f"Ensemble received {describe_member(number, model)} with layers on "
            f"{', '.join(homes)}.",
            "A member works on one device.",
            "Build it in one mw.device(...) scope, or outside of any.",
        )
    return homes[0] if homes else None


def _check_state(number: int, member: Any) -> None:
    if not member.built:
        raise EnsembleError(
            f"Ensemble received {describe_member(number, member)}, which is not built.",
            "Members have their weights before they are brought to their devices.",
            "Give it a keras.Input, or call its build(input_shape).",
        )
    strategy = attached(member)
    if strategy is not None:
        raise EnsembleError(
            f"Ensemble received {describe_member(number, member)}, which {strategy!r} "
            "trains.",
            "An ensemble trains each member on one device.",
            "Make the member outside of the strategy's scope.",
        )


def _check_sharing(members: Sequence[Any]) -> None:
    owners: dict[int, int] = {}
    for number, member in enumerate(members):
        for variable in member.variables:
            other = owners.setdefault(id(variable), number)
            if other != number:
                _refuse_shared(members, other, number, variable)


def _check_optimizers(members: Sequence[Any]) -> None:
    owners: dict[int, int] = {}
    for number, member in enumerate(members):
        optimizer = getattr(member, "optimizer", None)
        other = owners.setdefault(id(optimizer), number)
        if optimizer is not None and other != number:
            raise EnsembleError(
                f"Ensemble received {describe_member(other, members[other])} and "
                f"{describe_member(number, member)}, which were compiled with the same "
                f"{type(optimizer).__name__}.",
                "An optimizer remembers things of each weight, so it trains one model.",
                "Compile each member with an optimizer of its own.",
            )


def _refuse_shared(
    members: Sequence[Any], first: int, second: int, variable: Any
) -> None:
    if members[first] is members[second]:
        raise EnsembleError(
            f"Ensemble received the same model {members[first].name!r} as members "
            f"{first} and {second}.",
            "Every member has weights of its own.",
            "Build the model again, or keras.models.clone_model(model) and compile it.",
        )
    raise EnsembleError(
        f"Ensemble received {describe_member(first, members[first])} and "
        f"{describe_member(second, members[second])}, which share {variable.path}.",
        "Every member has weights of its own, because all are trained at once.",
        "Build the layers of each member anew.",
    )


def _check_ends(members: Sequence[Any], which: str) -> None:
    """Compares what is known before anything runs; subclassed models do not tell."""
    known = [
        (number, member, _signature(ends))
        for number, member in enumerate(members)
        if (ends := getattr(member, which, None)) is not None
    ]
    for number, member, signature in known[1:]:
        first, other, expected = known[0]
        if signature != expected:
            raise EnsembleError(
                f"Ensemble received {describe_member(first, other)} with {which} "
                f"{_show(expected)} and {describe_member(number, member)} with "
                f"{_show(signature)}.",
                f"All members have the same {which}: they see the same samples, and "
                "their answers are combined.",
                f"Change the {which} of one of them, or leave it out.",
            )


def _signature(ends: Any) -> Signature:
    tensors = ends if isinstance(ends, list) else [ends]
    return [(tuple(t.shape), t.dtype) for t in tensors]


def _show(signature: Signature) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in signature)
