"""A model's forward pass as a function of arrays, masks included."""

from collections.abc import Callable
from typing import Any

from meshwright.devices.containers import map_leaves
from meshwright.devices.keras_hooks import mask_of, with_mask
from meshwright.models.blocks import rematerialised

import jax


def in_blocks(gather: Callable[[Any], Any]) -> Callable[..., Any]:
    """Replaces a model's stateless call by one in rematerialised blocks.

    Arguments:
        gather: Makes the weights, which may be split, ready for use.
    """

    def forward(
        call: Any, model: Any, weights: Any, others: Any, *args: Any, **kwargs: Any
    ) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

        template: Any = None

        def run(weights: Any, others: Any, arrays: list[Any]) -> Any:
            nonlocal template
            given = iter(arrays)
            pairs = zip(leaves, is_array, strict=True)
            filled = [next(given) if is_given else leaf for leaf, is_given in pairs]
            args, kwargs = jax.tree.unflatten(structure, filled)
            ready = gather([list(weights), list(others)])
            outputs, *rest = call(model, *ready, *args, **kwargs)
            flat, template = flatten(outputs)
            return flat, [mask_of(tensor) for tensor in flat], rest

        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        flat, masks, rest = rematerialised(run)(weights, others, arrays)
        return rebuild(template, flat, masks), *rest

    return forward


def flatten(outputs: Any) -> tuple[list[Any], Any]:
    """The tensors of a model's outputs, and how to put them together again.

    JAX' own flattening would sort the keys of dicts.
    """
    flat: list[Any] = []

    def take(tensor: Any) -> int:
        flat.append(tensor)
        return len(flat) - 1

    template = map_leaves(take, outputs)
    return flat, template


def rebuild(template: Any, flat: list[Any], masks: list[Any] | None = None) -> Any:
    """Outputs from their tensors, with the masks put on if there are any."""
    if masks is None:
        return map_leaves(flat.__getitem__, template)
    return map_leaves(lambda i: with_mask(flat[i], masks[i]), template)
