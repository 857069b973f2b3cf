"""`tf.GradientTape`: JAX repeats what was computed, and differentiates it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

from meshwright.devices.eager_trace import Operation, recording
from meshwright.tf.tensors import raw, unwrap, wrap

import jax
import jax.numpy as jnp


class GradientTape:
    """Remembers operations, in order to differentiate them.

    Everything that was computed inside can be differentiated, Keras' layers and losses
    included; with `watch` and without, as long as it is asked for by the tensor or
    variable itself.

    Arguments:
        persistent: Whether `gradient` may be called more than once.
        watch_accessed_variables: Accepted; variables need not be watched.

    >>> from meshwright import tf
    >>> x = tf.Variable(3.0)
    >>> with tf.GradientTape() as tape:
    ...     y = x * x
    >>> print(tape.gradient(y, x))
    tf.Tensor(6.0, shape=(), dtype=float32)
    """

    def __init__(
        self, persistent: bool = False, watch_accessed_variables: bool = True
    ) -> None:
        self._persistent = persistent
        self._operations: list[Operation] = []
        self._open: ExitStack | None = None
        self._newest: list[Operation] = []
        self._is_used = False

    def __enter__(self) -> Self:
        if self._open is not None:
            raise ValueError("Tape is already recording.")
        self._record()
        return self

    def __exit__(self, *error: Any) -> None:
        self._pause()

    def _record(self) -> None:
        self._open = ExitStack()
        self._newest = self._open.enter_context(recording())

    def _pause(self) -> None:
        if self._open is not None:
            self._open.close()
            self._operations += self._newest
            self._open, self._newest = None, []

    def watch(self, tensor: Any) -> None:
        """Accepted; what is differentiated with respect to need not be watched."""

    def reset(self) -> None:
        """Forgets what was recorded."""
        self._operations.clear()
        self._newest.clear()

    def stop_recording(self) -> "_Stopped":
        """A context in which nothing is remembered."""
        return _Stopped(self)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: str = "none",
    ) -> Any:
        """The gradients of a target, in the structure of the sources.

        Arguments:
            target: What was computed; of several tensors, the sum of their gradients.
            sources: Tensors or variables.
            output_gradients: Gradients that come from behind the target; ones if left
                out.
            unconnected_gradients: `'none'` or `'zero'`: the gradient of what the target
                does not depend on.
        """
        if self._is_used and not self._persistent:
            raise RuntimeError(
                "A non-persistent GradientTape can only be used to compute one set of "
                "gradients (or jacobians)"
            )
        self._is_used = True
        was_open = self._open is not None
        if was_open and not self._persistent:
            self._pause()
        operations = [*self._operations, *self._newest]
        given, tree = jax.tree.flatten(sources, is_leaf=_is_value)
        arrays = [raw(source) for source in given]
        targets = [raw(t) for t in jax.tree.leaves(unwrap(target))]
        found = _differentiate(operations, targets, arrays, output_gradients)
        fill = unconnected_gradients == "zero"
        return wrap(
            tree.unflatten(
                [
                    jnp.zeros_like(a) if g is None and fill else g
                    for g, a in zip(found, arrays, strict=True)
                ]
            )
        )


class _Stopped:
    def __init__(self, tape: GradientTape) -> None:
        self._tape = tape

    def __enter__(self) -> None:
        self._tape._pause()

    def __exit__(self, *error: Any) -> None:
        self._tape._record()


def _is_value(leaf: Any) -> bool:
    return hasattr(leaf, "__jax_array__")


def _differentiate(
    operations: Sequence[Operation],
    targets: list[Any],
    sources: list[Any],
    output_gradients: Any,
) -> list[Any]:
    """The gradients by source; None for one on which no target depends."""
    needed, reached = _between(operations, targets, sources)
    connected = [i for i, source in enumerate(sources) if id(source) in reached]
    of_target = [t for t in targets if id(t) in reached]
    if not connected or not of_target:
        return [None] * len(sources)

    def repeat(values: list[Any]) -> list[Any]:
        known = {id(sources[i]): v for i, v in zip(connected, values, strict=True)}
        for operation in needed:
            inputs = [known.get(id(a), a) for a in operation.inputs]
            outputs = operation.repeat(*inputs)
            known |= {
                id(old): new
                for old, new in zip(operation.outputs, outputs, strict=True)
            }
        return [known[id(t)] for t in of_target]

    outputs, pull_back = jax.vjp(repeat, [sources[i] for i in connected])
    given = [raw(g) for g in jax.tree.leaves(unwrap(output_gradients))]
    behind = [g for t, g in zip(targets, given, strict=False) if id(t) in reached] or [
        jnp.ones_like(output) for output in outputs
    ]
    (gradients,) = pull_back(behind)
    by_place = dict(zip(connected, gradients, strict=True))
    return [by_place.get(i) for i in range(len(sources))]


def _between(
    operations: Sequence[Operation], targets: list[Any], sources: list[Any]
) -> tuple[list[Operation], set[int]]:
    """What lies on the way from the sources to the targets, and the values there."""
    forward = {id(s) for s in sources}
    along = []
    for operation in operations:
        if any(id(a) in forward for a in operation.inputs):
            along.append(operation)
            forward |= {id(o) for o in operation.outputs}
    backward = {id(t) for t in targets}
    needed = []
    for operation in reversed(along):
        if any(id(o) in backward for o in operation.outputs):
            needed.append(operation)
            backward |= {id(a) for a in operation.inputs}
    return needed[::-1], forward & backward
