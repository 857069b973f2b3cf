"""Operations as JAX writes them, and as steps compute them: about a minute.

    python benchmarks/operations.py

Milliseconds on the default device, the shortest of several calls in turns, outside of a
loop and inside of one. `docs/design/cpu_convolutions.md` explains them.
"""

import time
from collections.abc import Callable
from typing import Any

import meshwright as mw
from meshwright.models.formulations import compiler_options, in_best_form

import jax
import jax.numpy as jnp

REPEATS = 5
SAMPLES = 32
LOOP = 2
ORDER = ("NHWC", "HWIO", "NHWC")


def convolve(x: Any, kernel: Any) -> Any:
    """3x3, without padding."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=ORDER
    )


def pool(x: Any, _: Any) -> Any:
    """The largest of 2x2, side by side."""
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def gradient(function: Any, argument: int) -> Any:
    """Of the sum of squares of what a function returns."""
    return jax.grad(lambda *args: (function(*args) ** 2).sum(), argnums=argument)


def looped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A few calls in a loop, each of which depends on the one before."""

    def run(x: Any, kernel: Any) -> Any:
        def once(carry: Any, _: Any) -> Any:
            return function(x + carry, kernel).ravel()[0] * 1e-9, None

        return jax.lax.scan(once, jnp.zeros(()), length=LOOP)[0]

    return run


def shortest(programs: dict[str, Any], args: tuple[Any, Any]) -> dict[str, float]:
    """The shortest time of each program in milliseconds; they run in turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program(*args))
    for _ in range(REPEATS):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*args))
            times[name].append(1000 * (time.perf_counter() - began))
    return {name: min(found) for name, found in times.items()}


def main() -> None:
    """Prints a table."""
    mesh = mw.Single().mesh
    options = compiler_options(mesh)
    args = jnp.ones((SAMPLES, 26, 26, 32)), jnp.ones((3, 3, 32, 32))
    operations = {
        "convolution": convolve,
        "gradient of its inputs": gradient(convolve, 0),
        "gradient of its kernel": gradient(convolve, 1),
        "gradient of max pooling": gradient(pool, 0),
    }
    print(f"{SAMPLES} images of 26x26x32; {jax.devices()[0].device_kind}; ms")
    print("| | as written | ours | in a loop, as written | in a loop, ours |")
    print("|---|---|---|---|---|")
    for name, function in operations.items():
        ours = in_best_form(function, mesh)
        programs = {
            "written": jax.jit(function),
            "ours": jax.jit(ours, compiler_options=options),
            "written, loop": jax.jit(looped(function)),
            "ours, loop": jax.jit(looped(ours), compiler_options=options),
        }
        found = shortest(programs, args)
        each = [v / (LOOP if "loop" in key else 1) for key, v in found.items()]
        print(f"| {name} | " + " | ".join(f"{ms:.3g}" for ms in each) + " |")


if __name__ == "__main__":
    main()
