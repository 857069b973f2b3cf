"""The floor: the fastest training loops that we know how to write in JAX by hand.

No Keras. An epoch is one program: the data stays on the device, a permutation picks the
batches inside of a `lax.scan`, the state is donated, loss and accuracy are summed on
the device. What a library adds to this is its overhead.

On CPUs the convolutions are shaped so that XLA takes its fast path (`_convolve`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jobs import LEARNING_RATE, Job

Params = dict[str, Any]
Forward = Callable[[Params, Params, Any, bool], tuple[Any, Params]]

# XLA's CPU compiler hands convolutions without padding to YNNPACK, which took 4 times
# as long as its older Eigen code for 256 images of 26x26x32 (JAX 0.10).
_CPU_OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": (
        "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    )
}
_UNROLL = {("cpu", "mlp"): 4, ("gpu", "mlp"): 8, ("gpu", "cnn"): 2}


def make_floor(
    job: Job, precision: str, unroll: int | None = None
) -> tuple[Any, Any, Any]:
    """The first state, the program of an epoch, and the function that counts hits.

    The loop is unrolled as it is fastest, if `unroll` is left out.
    """
    forward = {"cnn": _cnn, "mlp": _mlp}[job.name]
    params, stats = {"cnn": _cnn_state, "mlp": _mlp_state}[job.name]()
    zeros = [jax.tree.map(jnp.zeros_like, params) for _ in range(2)]
    state = (params, stats, *zeros, jnp.zeros(()))
    backend = jax.default_backend()
    is_cpu_cnn = backend == "cpu" and job.name == "cnn"
    epoch = jax.jit(
        _epoch(
            job,
            _step(forward, precision),
            unroll or _UNROLL.get((backend, job.name), 1),
        ),
        donate_argnums=0,
        compiler_options=_CPU_OPTIONS if is_cpu_cnn else None,
    )

    def hits(state: Any, x: Any, y: Any) -> Any:
        params = _cast(state[0], precision)
        logits, _ = forward(params, state[1], x.astype(precision), False)
        return (logits.argmax(-1) == y).sum()

    return state, epoch, jax.jit(hits)


def _epoch(job: Job, step: Any, unroll: int) -> Any:
    full, rest = divmod(job.samples, job.batch_size)

    def epoch(state: Any, x: Any, y: Any, key: Any) -> Any:
        order = jax.random.permutation(key, job.samples)

        def one(carry: Any, chosen: Any) -> Any:
            state, sums = carry
            state, more = step(state, x[chosen], y[chosen])
            return (state, sums + more), None

        head = order[: full * job.batch_size].reshape(full, job.batch_size)
        carry, _ = jax.lax.scan(one, (state, jnp.zeros(2)), head, unroll=unroll)
        if rest:
            carry, _ = one(carry, order[-rest:])
        state, sums = carry
        return state, sums / job.samples

    return epoch


def _step(forward: Forward, precision: str) -> Any:
    def loss(params: Params, stats: Params, x: Any, y: Any) -> Any:
        x = x.astype(precision)
        logits, stats = forward(_cast(params, precision), stats, x, True)
        logits = logits.astype(jnp.float32)
        wanted = (logits * (y[:, None] == jnp.arange(10))).sum(-1)
        losses = jax.nn.logsumexp(logits, -1) - wanted
        hits = wanted >= logits.max(-1)
        return losses.mean(), (stats, jnp.stack([losses.sum(), hits.sum() * 1.0]))

    def step(state: Any, x: Any, y: Any) -> Any:
        params, stats, mean, square, count = state
        grads, (stats, sums) = jax.grad(loss, has_aux=True)(params, stats, x, y)
        return (*_adam(params, stats, mean, square, count, grads),), sums

    return step


def _adam(params: Any, stats: Any, mean: Any, square: Any, count: Any, g: Any) -> Any:
    count = count + 1
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    mean = jax.tree.map(lambda m, g: m + (g - m) * 0.1, mean, g)
    square = jax.tree.map(lambda s, g: s + (g * g - s) * 0.001, square, g)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-7), params, mean, square
    )
    return params, stats, mean, square, count


def _cast(params: Params, precision: str) -> Params:
    return jax.tree.map(lambda p: p.astype(precision), params)


def _glorot(rng: Any, *shape: int) -> Any:
    limit = np.sqrt(6 / (np.prod(shape[:-2]) * (shape[-2] + shape[-1])))
    return jnp.asarray(rng.uniform(-limit, limit, shape), jnp.float32)


def _mlp_state() -> tuple[Params, Params]:
    # The first weight lies output by output: its gradient is then written in order.
    rng = np.random.default_rng(0)
    params = {
        "hidden": {"w": _glorot(rng, 784, 32).T, "b": jnp.zeros(32)},
        "out": {"w": _glorot(rng, 32, 10), "b": jnp.zeros(10)},
    }
    return params, {}


def _mlp(params: Params, stats: Params, x: Any, training: bool) -> Any:
    hidden, out = params["hidden"], params["out"]
    x = jax.nn.relu(x @ hidden["w"].T + hidden["b"])
    return x @ out["w"] + out["b"], stats


def _cnn_state() -> tuple[Params, Params]:
    rng = np.random.default_rng(0)
    shapes = {
        **{"conv1": (3, 3, 1, 32), "conv2": (3, 3, 32, 32), "conv3": (3, 3, 32, 64)},
        **{"conv4": (3, 3, 64, 64), "dense": (1024, 256), "out": (256, 10)},
    }
    params: Params = {
        name: {"w": _glorot(rng, *shape), "b": jnp.zeros(shape[-1])}
        for name, shape in shapes.items()
    }
    widths = {"norm1": 32, "norm2": 64, "norm3": 256}
    params |= {n: {"w": jnp.ones(w), "b": jnp.zeros(w)} for n, w in widths.items()}
    stats = {n: (jnp.zeros(w), jnp.ones(w)) for n, w in widths.items()}
    return params, stats


def _cnn(params: Params, stats: Params, x: Any, training: bool) -> Any:
    convolve = _convolve if jax.default_backend() == "cpu" else _xla_convolve
    kept = {}

    def conv(name: str, x: Any) -> Any:
        return convolve(x, params[name]["w"]) + params[name]["b"]

    def norm(name: str, x: Any) -> Any:
        y, kept[name] = _normalize(params[name], stats[name], x, training)
        return y

    relu = jax.nn.relu
    x = norm("norm1", relu(_pool(conv("conv2", relu(conv("conv1", x))))))
    x = norm("norm2", relu(_pool(conv("conv4", relu(conv("conv3", x))))))
    x = x.reshape(x.shape[0], -1)
    x = norm("norm3", relu(x @ params["dense"]["w"] + params["dense"]["b"]))
    return x @ params["out"]["w"] + params["out"]["b"], kept


def _normalize(params: Params, stats: Any, x: Any, training: bool) -> Any:
    mean, var = stats
    if training:
        axes, wide = tuple(range(x.ndim - 1)), x.astype(jnp.float32)
        seen = wide.mean(axes)
        seen_var = (wide * wide).mean(axes) - seen * seen
        stats = (mean * 0.99 + seen * 0.01, var * 0.99 + seen_var * 0.01)
        mean, var = seen, seen_var
    scale = params["w"] * jax.lax.rsqrt(var + 1e-3)
    shift = params["b"] - mean * scale
    return x * scale.astype(x.dtype) + shift.astype(x.dtype), stats


def _pool(x: Any) -> Any:
    rows = jnp.maximum(x[:, ::2], x[:, 1::2])
    return jnp.maximum(rows[:, :, ::2], rows[:, :, 1::2])


def _xla_convolve(x: Any, kernel: Any, padding: Any = "VALID") -> Any:
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), padding, dimension_numbers=names
    )


def _convolve_forward(x: Any, kernel: Any) -> Any:
    return _xla_convolve(x, kernel), (x, kernel)


def _convolve_backward(saved: Any, dy: Any) -> Any:
    x, kernel = saved
    flipped = kernel[::-1, ::-1].swapaxes(2, 3)
    dx = _xla_convolve(dy, flipped, ((2, 2), (2, 2)))
    if x.shape[-1] == 1:
        return dx, _kernel_gradient_by_matmul(x, dy)
    by_channel = _xla_convolve(x.transpose(3, 1, 2, 0), dy.transpose(1, 2, 0, 3))
    return dx, by_channel.transpose(1, 2, 0, 3)


def _kernel_gradient_by_matmul(x: Any, dy: Any) -> Any:
    height, width, filters = dy.shape[1:]
    shifts = [(i, j) for i in range(3) for j in range(3)]
    patches = [x[:, i : i + height, j : j + width] for i, j in shifts]
    flat = jnp.concatenate(patches, -1).reshape(-1, 9)
    return (flat.T @ dy.reshape(-1, filters)).reshape(3, 3, 1, filters)


# A convolution whose gradients are convolutions with their dims in the usual order.
# XLA's CPU compiler brings them into it by itself outside of loops only; inside of one,
# the gradient of a kernel ran in its naive code, a hundred times slower (JAX 0.10).
_convolve = jax.custom_vjp(lambda x, kernel: _xla_convolve(x, kernel))
_convolve.defvjp(_convolve_forward, _convolve_backward)
