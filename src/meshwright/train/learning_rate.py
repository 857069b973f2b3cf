"""The learning rate for a larger batch, by a rule of thumb.

More devices usually mean a larger global batch, hence fewer updates per epoch, and each
should go further: by the *linear* rule with SGD (Goyal et al. 2017, arXiv:1706.02677),
by the *square root* with adaptive optimizers such as Adam (Malladi et al. 2022,
arXiv:2205.10287). Both are too bold for the first updates, hence `Warmup`.
"""

from math import isfinite, sqrt
from numbers import Integral, Real
from typing import Any

from meshwright.errors import LearningRateError

RULES = ("linear", "sqrt")


def scaled_lr(
    base_lr: float,
    batch_size: int | None = None,
    base_batch_size: int | None = None,
    rule: str = "linear",
    *,
    num_replicas: int | None = None,
    verbose: bool = True,
) -> float:
    """The learning rate for another batch size, by a rule of thumb.

    Pass the two batch sizes, or, if the batch of one replica stayed the same and the
    global batch grew with their number, `num_replicas`.

    Arguments:
        base_lr: The learning rate that worked.
        batch_size: The global batch size now, as it is passed to `fit`.
        base_batch_size: The batch size with which `base_lr` worked.
        rule: "linear", for SGD, or "sqrt", for Adam and its like.
        num_replicas: How many times larger the global batch is.
        verbose: Prints the rate and the reason.

    Returns:
        The scaled learning rate.

    >>> import meshwright as mw
    >>> mw.scaled_lr(0.1, batch_size=2048, base_batch_size=256)
    learning rate 0.1 -> 0.8: linear rule, global batch 2048 is 8 x 256
    0.8
    >>> mw.scaled_lr(0.002, rule="sqrt", num_replicas=mw.FSDP(4).num_replicas // 2)
    learning rate 0.002 -> 0.004: square root rule, global batch is 4 x one replica's
    0.004
    """
    if not is_rate(base_lr) or base_lr == 0:
        raise LearningRateError(
            f"scaled_lr received base_lr={base_lr!r} (a {type(base_lr).__name__}).",
            "A learning rate is a finite number above 0.",
            "Use, for example, base_lr=0.1.",
        )
    if rule not in RULES:
        raise LearningRateError(
            f"scaled_lr received rule={rule!r}.",
            f"The rules are {' and '.join(map(repr, RULES))}.",
            "Use 'linear' with SGD, and 'sqrt' with Adam and its like.",
        )
    factor, reason = _factor(batch_size, base_batch_size, num_replicas)
    rate = float(base_lr) * (factor if rule == "linear" else sqrt(factor))
    if verbose:
        name = "linear" if rule == "linear" else "square root"
        print(f"learning rate {base_lr:g} -> {rate:g}: {name} rule, {reason}")
    return rate


def _factor(
    batch_size: int | None, base_batch_size: int | None, num_replicas: int | None
) -> tuple[float, str]:
    """How many times larger the batch is, and why."""
    sizes = (batch_size, base_batch_size)
    if num_replicas is not None and sizes == (None, None):
        _check_count("num_replicas", num_replicas)
        return float(num_replicas), f"global batch is {num_replicas} x one replica's"
    if num_replicas is not None or batch_size is None or base_batch_size is None:
        raise LearningRateError(
            f"scaled_lr received batch_size={batch_size}, base_batch_size="
            f"{base_batch_size} and num_replicas={num_replicas}.",
            "How much larger the batch is follows from the two batch sizes or from the "
            "number of replicas.",
            "Pass batch_size and base_batch_size, or only num_replicas.",
        )
    _check_count("batch_size", batch_size)
    _check_count("base_batch_size", base_batch_size)
    factor = batch_size / base_batch_size
    return factor, f"global batch {batch_size} is {factor:g} x {base_batch_size}"


def is_rate(value: Any) -> bool:
    """Whether a value is a finite number from 0."""
    is_number = type(value) is not bool and isinstance(value, Real)
    return is_number and isfinite(value) and value >= 0


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 1; NumPy's count too."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= 1


def _check_count(name: str, value: Any) -> None:
    if is_count(value):
        return
    raise LearningRateError(
        f"scaled_lr received {name}={value!r} (a {type(value).__name__}).",
        "Samples and replicas are counted in whole numbers from 1.",
        f"Use, for example, {name}=8.",
    )
