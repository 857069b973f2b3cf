"""`meshwright.distribute`: an existing model, from now on over a mesh."""

from typing import Any

from meshwright.errors import StrategyError
from meshwright.models.precision import set_precision
from meshwright.strategies.attach import attach, place
from meshwright.strategies.automatic import Auto
from meshwright.strategies.strategy import Strategy


def distribute(model: Any, strategy: Strategy | str = "auto") -> Any:
    """Moves a model onto a strategy's mesh; its fit, evaluate and predict run there.

    Weights and optimizer state come along, and layers compute in the strategy's
    precision if it has one. A model that is not built yet is moved when
    `fit` builds it from the data.

    Arguments:
        model: A Keras model.
        strategy: The strategy, or `'auto'` for the one that the planner chooses when
            training begins.

    Returns:
        The same model.

    >>> import keras
    >>> import meshwright as mw
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> model = mw.distribute(model, mw.FSDP(8))
    >>> mw.placement(model)[0].shard_shape
    (1, 4)
    """
    import keras

    if not isinstance(model, keras.Model):
        raise StrategyError(
            f"distribute received {model!r} (a {type(model).__name__}) as model.",
            "It takes a Keras model.",
            "Wrap layers in a model, for example keras.Sequential([...]).",
        )
    if strategy == "auto":
        strategy = Auto()
    if not isinstance(strategy, Strategy):
        raise StrategyError(
            f"distribute received {strategy!r} (a {type(strategy).__name__}) as "
            "strategy.",
            "It takes a strategy, or 'auto'.",
            "Pass, for example, mw.Mirrored().",
        )
    attach(model, strategy)
    # Before it is compiled, so that Keras' own `compile` scales the loss of float16.
    set_precision(model, strategy.plan.precision)
    if model.built and not strategy.is_open:
        place(model, strategy)
    return model
