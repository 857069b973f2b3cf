"""One answer out of the answers of several members."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from meshwright.errors import EnsembleError, NumericError

import jax
import numpy as np

Combine = Literal["mean", "vote", "weighted"]
Array = "np.ndarray[Any, Any]"


def check_combine(
    combine: Any, weights: Any, num_members: int
) -> "np.ndarray[Any, Any] | None":
    """The shares of the members in a weighted mean, if one is wanted.

    Raises:
        EnsembleError: There is no such way to combine, or these are no weights for it.
    """
    ways = get_args(Combine)
    if combine is not None and combine not in ways:
        raise EnsembleError(
            f"predict received combine={combine!r}.",
            f"It is one of {', '.join(map(repr, ways))}, or None.",
            "Use combine='mean', or None for the answers of the members.",
        )
    if combine != "weighted":
        if weights is not None:
            raise EnsembleError(
                f"predict received weights={weights!r} with combine={combine!r}.",
                "Only a weighted mean has weights.",
                "Use combine='weighted', or leave the weights out.",
            )
        return None
    shares = _as_numbers(weights)
    if shares is None or shares.shape != (num_members,):
        raise EnsembleError(
            f"predict received weights={weights!r} for {num_members} members.",
            "A weighted mean has one number for each member.",
            f"Pass {num_members} numbers, for example {[1.0] * num_members}.",
        )
    if not np.isfinite(shares).all() or (shares < 0).any() or shares.sum() == 0:
        raise EnsembleError(
            f"predict received weights={weights!r}.",
            "Weights are finite, none is negative, and not all are zero.",
            "Use the share that each member shall have, for example its accuracy.",
        )
    found: np.ndarray[Any, Any] = shares / shares.sum()
    return found


def combine_answers(
    answers: Sequence[Any],
    combine: Combine,
    shares: "np.ndarray[Any, Any] | None",
    names: Sequence[str],
) -> Any:
    """One answer, in the structure that those of the members have.

    Arguments:
        answers: What the members put out: arrays, or trees of them.
        combine: How.
        shares: Of the members, in a weighted mean.
        names: What errors call the members.

    Raises:
        EnsembleError: The answers cannot be combined.
        NumericError: One of them is not finite.
    """
    _check_alike(answers, names)
    for answer, name in zip(answers, names, strict=True):
        _check_finite(answer, name)

    def of_leaf(*leaves: Any) -> Any:
        if combine == "vote":
            return _vote(leaves, names)
        return _mean(leaves, shares)

    return jax.tree.map(of_leaf, *answers)


def _as_numbers(weights: Any) -> "np.ndarray[Any, Any] | None":
    try:
        return np.asarray(weights, float)
    except (TypeError, ValueError):
        return None


def _check_alike(answers: Sequence[Any], names: Sequence[str]) -> None:
    shapes = [jax.tree.map(np.shape, answer) for answer in answers]
    for shape, name in zip(shapes, names, strict=True):
        if shape != shapes[0]:
            raise EnsembleError(
                f"predict got answers of shape {shapes[0]} from {names[0]} and "
                f"{shape} from {name}.",
                "Only answers of the same shape can be combined.",
                "Use combine=None for the answers of the members.",
            )


def _check_finite(answer: Any, name: str) -> None:
    for leaf in jax.tree.leaves(answer):
        finite = np.isfinite(np.asarray(leaf, np.float32))
        if not finite.all():
            sample = int(np.argwhere(~finite)[0][0])
            raise NumericError(
                f"predict got {leaf[sample]} from {name} for sample {sample}.",
                "One answer that is not finite spoils those of all members together.",
                "Use combine=None to look at the answers, or an ensemble without that "
                "member.",
            )


def _mean(leaves: Sequence[Any], shares: "np.ndarray[Any, Any] | None") -> Any:
    """In double precision, so that the order of the members does not show."""
    equal = np.full(len(leaves), 1 / len(leaves))
    parts = zip(equal if shares is None else shares, leaves, strict=True)
    total = sum(share * np.asarray(leaf, np.float64) for share, leaf in parts)
    kind = leaves[0].dtype
    return np.asarray(total).astype(kind if kind.kind != "i" else np.float64)


def _vote(leaves: Sequence[Any], names: Sequence[str]) -> Any:
    """The class that most members find most likely.

    Of several with as many votes it is the one with the highest mean output.
    """
    scores = [np.asarray(leaf, np.float64) for leaf in leaves]
    if scores[0].ndim < 2:
        _refuse_vote(f"answers of shape {scores[0].shape}")
    if scores[0].shape[-1] == 1:
        for score, name in zip(scores, names, strict=True):
            if score.size and (score.min() < 0 or score.max() > 1):
                low, high = score.min(), score.max()
                _refuse_vote(f"numbers from {low:.3g} to {high:.3g} from {name}")
        scores = [np.concatenate([1 - score, score], axis=-1) for score in scores]
    num_classes = scores[0].shape[-1]
    votes = sum(np.eye(num_classes)[score.argmax(axis=-1)] for score in scores)
    leading = votes == np.max(votes, axis=-1, keepdims=True)
    return np.where(leading, sum(scores), -np.inf).argmax(axis=-1)


def _refuse_vote(what: str) -> None:
    raise EnsembleError(
        f"predict(combine='vote') got {what}.",
        "Members vote for classes: their last dim has an entry for each, or a single "
        "one, which is the probability of class 1.",
        "Use combine='mean'.",
    )
