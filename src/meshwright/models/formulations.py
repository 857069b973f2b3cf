"""How steps compute what XLA is slow at on the devices at hand."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from meshwright.models.convolution import (
    YNNPACK_WITHOUT_CONVOLUTIONS,
    convolve_as_known,
    convolve_in_order,
)
from meshwright.models.pooling import max_by_slices, max_gradient_by_slices
from meshwright.models.products import product_in_order
from meshwright.models.rewriting import Rules, rewritten

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

Platform = Literal["cpu", "gpu"]

_POOLING: Rules = {
    "reduce_window_max": max_by_slices,
    "select_and_scatter_add": max_gradient_by_slices,
}
BEST_FORMS: dict[Platform, Rules] = {
    "cpu": {
        **_POOLING,
        "conv_general_dilated": convolve_in_order,
        ("dot_general", "transpose"): product_in_order,
    },
    "gpu": {**_POOLING, "conv_general_dilated": convolve_as_known},
}
"""What takes the place of operations in a step, before it is compiled."""


def in_best_form(
    step: Callable[..., Any],
    mesh: Mesh,
    *,
    is_moved: bool = False,
    in_pairs: bool = True,
) -> Callable[..., Any]:
    """The same step, for use inside of a program, in operations that suit the mesh.

    Arguments:
        step: The step.
        mesh: The devices.
        is_moved: Whether it was traced for other devices in a mesh of the same shape.
        in_pairs: Whether there may be a collective between two operations, so that
            they are computed in one.
    """
    rules = BEST_FORMS["cpu" if _is_cpu(mesh) else "gpu"]
    if not in_pairs:
        rules = {name: rule for name, rule in rules.items() if isinstance(name, str)}

    def run(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        best = rewritten(program, rules, mesh if is_moved else None)
        values = jaxpr_as_fun(best)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return run


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """What XLA is told when it compiles a program for a mesh."""
    is_known = _is_cpu(mesh) and _knows_ynnpack()
    return dict(YNNPACK_WITHOUT_CONVOLUTIONS) if is_known else None


@cache
def _knows_ynnpack() -> bool:
    """Whether this XLA has the option; it is a name that may go as it came."""
    program = jax.jit(lambda x: x, compiler_options=YNNPACK_WITHOUT_CONVOLUTIONS)
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            program.lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _is_cpu(mesh: Mesh) -> bool:
    return {device.platform for device in mesh.devices.flat} == {"cpu"}
