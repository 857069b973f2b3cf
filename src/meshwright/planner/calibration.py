"""Measures how fast this machine is, in less than a minute, and remembers it."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from meshwright.models.formulations import Platform
from meshwright.models.kernels import is_awkward
from meshwright.planner.context import factors_in_context
from meshwright.planner.measuring import (
    BLINK,
    REPEATS,
    ROUNDS,
    Shape,
    Stopwatch,
    Trial,
    Turns,
)
from meshwright.planner.speed import (
    CollectivePoint,
    CrowdPoint,
    ProductPoint,
    Speed,
    StreamPoint,
)

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Sizes = tuple[int, int, int, int]
"""How many products, their rows, inner size and columns."""

_FORMS = {"nn": (2, 1), "nt": (2, 2), "tn": (1, 1)}
"""The dims, after that of the batch, over which products of a form are summed."""

_STEPS_ON_CPU = (32, 136, 520, 2040)
_MOST_ON_CPU = 2**30
"""Multiplications of a product; larger ones would take long and tell nothing new."""

_PRODUCTS_ON_CPU: list[Sizes] = [
    (128, 64, 32, 64),
    (128, 64, 64, 32),
    (512, 128, 16, 128),
    (32, 128, 64, 128),
    (16, 256, 32, 256),
    *(
        (1, a, b, c)
        for (i, a), (j, b), (k, c) in product(enumerate(_STEPS_ON_CPU), repeat=3)
        # Every other combination is enough.
        if (i + j + k) % 2 and a * b * c <= _MOST_ON_CPU
    ),
    # Rows that caches of CPUs are slow at.
    (1, 256, 1024, 1024),
    (1, 128, 2048, 1024),
    (1, 1024, 128, 2048),
    (1, 2048, 256, 128),
    (1, 1024, 512, 1024),
]
_PRODUCTS_ELSEWHERE: dict[str, list[Sizes]] = {
    form: [
        (1, 8192, 4096, 4096),
        (1, 65536, 320, 320),
        (512, 128, 64, 128),
        (1, 65536, 768, 768),
        (1, 65536, 300, 300),
        (1, 65536, 256, 1024),
        (1, 65536, 512, 64),
        (512, 128, 128, 64),
        (1, 2048, 1024, 1024),
    ]
    for form in ("nn", "nt")
} | {
    # These sum over samples, for gradients of weights.
    "tn": [
        (1, 4096, 8192, 4096),
        (1, 320, 65536, 320),
        (512, 128, 128, 64),
        (1, 768, 65536, 768),
        (1, 300, 65536, 300),
        (1, 256, 65536, 1024),
        (1, 64, 65536, 512),
        (1, 1024, 2048, 1024),
    ],
}
"""Larger than what GPUs keep at hand between kernels, but for the last ones.

Rows of 300 numbers of two bytes do not begin where wide loads can.
"""

Convolution = tuple[int, int, int, int, int]
"""Samples, size of the images, channels before and after, size of the window."""

_CONVOLUTIONS_ON_CPU: list[Convolution] = [
    (32, 32, 16, 16, 3),
    (32, 16, 64, 64, 3),
    (32, 28, 3, 32, 3),
    (16, 4, 256, 256, 3),
    (16, 8, 64, 256, 1),
    (8, 56, 48, 24, 3),
    (16, 8, 160, 96, 3),
]
_CONVOLUTIONS_ELSEWHERE: list[Convolution] = [
    (256, 32, 64, 64, 3),
    (256, 64, 3, 32, 3),
    (128, 64, 48, 48, 3),
    (256, 16, 256, 256, 3),
    (256, 64, 32, 5, 1),
    (256, 32, 128, 64, 1),
    (128, 64, 24, 96, 3),
    (256, 8, 512, 512, 3),
    (256, 16, 1024, 256, 1),
    (256, 16, 128, 512, 1),
    (256, 28, 32, 64, 3),
]


def measure_speed(meshes: Sequence[Mesh], most_seconds: float = 48.0) -> Speed:
    """Times products, convolutions, collectives and everything else.

    Arguments:
        meshes: Meshes with an axis `data`: of one device, and of more for collectives.
        most_seconds: When this time is over, products that are left are not timed;
            what comes after them takes some seconds more.
    """
    one, *more = meshes
    end = time.monotonic() + most_seconds
    is_cpu = one.devices.flat[0].platform == "cpu"
    watch = Stopwatch(one)
    collectives = [point for mesh in more for point in _collectives(mesh)]
    crowding = [point for mesh in more if is_cpu for point in _crowding(one, mesh)]
    small = _small_programs(watch, is_cpu)
    speed = Speed(
        products=tuple(_timed_products(watch, is_cpu, end)),
        streams=small.streams,
        per_number=small.per_number,
        per_dear=small.per_dear,
        per_random=small.per_random,
        per_transposed=small.per_transposed,
        per_summed=small.per_summed,
        kernel=small.kernel if is_cpu else watch.waiting,
        units=0 if is_cpu else one.devices.flat[0].core_count,
        overlaps=not is_cpu,
        turn=_turn(),
        dispatch=_dispatch(),
        fresh=_fresh() if is_cpu else 0.0,
        collectives=tuple(collectives),
        crowding=tuple(crowding),
    )
    if not is_cpu:
        return speed
    return replace(speed, in_context=factors_in_context(watch, speed))


_TOGETHER = 12
"""So many products are compiled before they are timed; the first ones always are."""


def _timed_products(
    watch: Stopwatch, is_cpu: bool, end: float
) -> Iterator[ProductPoint]:
    wanted = _all_products(is_cpu)
    # Few at a time, so that there is something of everything if time runs out.
    taken, last = 0.0, time.monotonic()
    for start in range(0, len(wanted), _TOGETHER):
        group = wanted[start : start + _TOGETHER]
        if start and last + taken > end:
            return
        times = watch.seconds([trial for trial, _ in group])
        for (_, point), seconds in zip(group, times, strict=True):
            yield point._replace(seconds=seconds)
        taken, last = time.monotonic() - last, time.monotonic()


Wanted = tuple[Trial, ProductPoint]
"""A trial, and the point that it gives, but for its time."""


def _all_products(is_cpu: bool) -> list[Wanted]:
    """What is to be timed, in turns, so that some of each comes early."""
    dtypes = ["float32"] if is_cpu else ["float32", "bfloat16"]
    platform: Platform = "cpu" if is_cpu else "gpu"
    shapes = _CONVOLUTIONS_ON_CPU if is_cpu else _CONVOLUTIONS_ELSEWHERE
    groups = [
        [
            _convolution(dtype, part, shape, platform)
            for number, shape in enumerate(shapes)
            for part, dtype in product(_PARTS, dtypes)
            if is_cpu or _is_telling(part, number, shape)
        ]
    ]
    for form, dtype in product(_FORMS, dtypes):
        sizes = _PRODUCTS_ON_CPU if is_cpu else _PRODUCTS_ELSEWHERE[form]
        groups.append([_product(dtype, form, each, platform) for each in sizes])
    places = [
        (number / len(group), wanted)
        for group in groups
        for number, wanted in enumerate(group)
    ]
    return [wanted for _, wanted in sorted(places, key=lambda pair: pair[0])]


def _is_telling(part: str, number: int, shape: Convolution) -> bool:
    """Whether a part of a convolution is worth its compilation, which takes long."""
    if part == "spread":
        return number in (0, 2)
    # Nobody needs the gradient of a picture.
    return part != "inputs" or shape[2] > 3


def _product(dtype: str, form: str, sizes: Sizes, platform: Platform) -> Wanted:
    # A turn of a loop takes GPUs long.
    copies = 1 if platform == "cpu" else 4
    batch, rows, inner, columns = sizes
    of_left, of_right = _FORMS[form]
    left: tuple[int, ...]
    left = (batch, inner, rows) if of_left == 1 else (batch, rows, inner)
    right: tuple[int, ...]
    right = (batch, columns, inner) if of_right == 2 else (batch, inner, columns)
    together: tuple[int, ...] = (0,)
    if batch == 1:
        left, right, together = left[1:], right[1:], ()
        of_left, of_right = of_left - 1, of_right - 1

    def multiply(a: Any, b: Any) -> Any:
        dims = (((of_left,), (of_right,)), (together, together))
        return jax.lax.dot_general(a, b, dims)

    numbers = batch * (rows * inner + inner * columns + rows * columns)
    point = ProductPoint(
        "product",
        dtype,
        form,
        *sizes,
        seconds=0.0,
        bytes=float(numbers * jnp.dtype(dtype).itemsize),
        is_awkward=is_awkward(platform, dtype, left[-1], right[-1], columns),
    )
    return Trial(multiply, [(left, dtype), (right, dtype)], copies), point


_PARTS = ("outputs", "inputs", "kernel", "spread")


def _convolution(
    dtype: str, part: str, shape: Convolution, platform: Platform
) -> Wanted:
    samples, size, before, after, window = shape
    stride = 2 if part == "spread" else 1
    images = ((samples, size, size, before), dtype)
    kernel = ((window, window, before, after), dtype)
    made = ((samples, size // stride, size // stride, after), dtype)

    def convolve(images: Any, kernel: Any) -> Any:
        order = ("NHWC", "HWIO", "NHWC")
        strides = (stride, stride)
        return jax.lax.conv_general_dilated(
            images, kernel, strides, "SAME", dimension_numbers=order
        )

    def gradient_of_inputs(kernel: Any, made: Any) -> Any:
        given = jax.ShapeDtypeStruct(*images)
        return jax.linear_transpose(lambda i: convolve(i, kernel), given)(made)

    def gradient_of_kernel(images: Any, made: Any) -> Any:
        given = jax.ShapeDtypeStruct(*kernel)
        return jax.linear_transpose(lambda k: convolve(images, k), given)(made)

    places = samples * size * size
    if part == "outputs":
        trial = Trial(convolve, [images, kernel])
        sizes = (1, places, window**2 * before, after)
    elif part == "kernel":
        trial = Trial(gradient_of_kernel, [images, made])
        sizes = (1, window**2 * before, places, after)
    else:
        trial = Trial(gradient_of_inputs, [kernel, made])
        sizes = (1, places, max(window**2 * after // stride**2, 1), before)
    numbers = sum(prod(each) for each, _ in (images, kernel, made))
    return trial, ProductPoint(
        "convolution",
        dtype,
        part,
        *sizes,
        seconds=0.0,
        bytes=float(numbers * jnp.dtype(dtype).itemsize),
        is_awkward=is_awkward(platform, dtype, before, after),
    )


class _Small(NamedTuple):
    """What is not a product."""

    streams: tuple[StreamPoint, ...]
    per_number: float
    per_dear: dict[str, float]
    per_random: float
    per_transposed: float
    per_summed: dict[str, float]
    kernel: float


_CLEAR = 4
"""A kernel is timed well if it takes so many times as long as its start."""

_CHAINS = 4
_KERNELS = 3 * 16

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "exp": lambda a, b: jnp.exp(b - a),
    "log": lambda a, b: jnp.log(a + 2.0),
    "tanh": lambda a, b: jnp.tanh(a + b),
    "erf": lambda a, b: jax.lax.erf(a + b),
    "erfc": lambda a, b: jax.lax.erfc(a + b),
    "pow": lambda a, b: jnp.power(a + 1.5, b),
    "rsqrt": lambda a, b: jax.lax.rsqrt(a + 2.0),
    "div": lambda a, b: b / (a + 2.0),
}
"""Operations that take long for each number; their results stay in their domain."""


def _small_programs(watch: Stopwatch, is_cpu: bool) -> _Small:
    """Times what reads and writes, computes a little or a lot, and next to nothing."""
    exponents = range(14, 27) if is_cpu else range(16, 31, 2)
    copies = 1 if is_cpu else 8
    rows, depth = (2**10, 4) if is_cpu else (2**16, 64)
    number = 256 * rows
    dtypes = ("float32",) if is_cpu else ("float32", "bfloat16")

    def two(rows: int) -> list[Shape]:
        return [((rows, 256), "float32")] * 2

    streams = [Trial(_plain, two(2**e // 1024), copies) for e in exponents]
    dear = [Trial(_repeated(f, depth), two(rows)) for f in _OPERATIONS.values()]
    summed = [Trial(_summed, [((4 * rows, 256), dtype)], copies) for dtype in dtypes]
    others = [
        Trial(_repeated(_cheap, depth), two(rows)),
        Trial(_random, two(rows)),
        *(Trial(_transposed(order), [(s, "float32")]) for s, order in _TRANSPOSED),
        Trial(_many_kernels, [((16, 16), "float32")]),
    ]
    times = watch.seconds([*streams, *dear, *summed, *others])
    points = [
        StreamPoint(3.0 * 2**exponent, seconds)
        for exponent, seconds in zip(exponents, times, strict=False)
        # What is about as short as the start of a kernel is lost in its noise.
        if is_cpu or seconds > _CLEAR * watch.waiting
    ]
    points = _smoothed(points) if is_cpu else points
    per_dear = {name: next(times) / depth / number for name in _OPERATIONS}
    per_summed = {dtype: next(times) / 4 / number for dtype in dtypes}
    cheap, random, *transposed, kernels = times
    return _Small(
        tuple(points),
        cheap / depth / _CHEAP / number,
        per_dear,
        random / number,
        _per_transposed(transposed) if is_cpu else 0.0,
        per_summed,
        kernels / _KERNELS,
    )


def _smoothed(points: Sequence[StreamPoint]) -> list[StreamPoint]:
    """The same, each at the middle of its own rate and those of its neighbours.

    Where arrays happen to lie decides whether they stay in the caches of a CPU.
    """
    rates = [point.bytes / point.seconds for point in points]
    found = []
    for number, point in enumerate(points):
        near = rates[max(number - 1, 0) : number + 2]
        found.append(StreamPoint(point.bytes, point.bytes / statistics.median(near)))
    return found


def _plain(a: Any, b: Any) -> Any:
    return a * 1.5 + b


def _repeated(function: Callable[[Any, Any], Any], times: int) -> Callable[..., Any]:
    """So often that memory does not count."""

    def run(a: Any, b: Any) -> Any:
        for _ in range(times):
            a = function(a, b)
        return a

    return run


_CHEAP = 3


def _cheap(a: Any, b: Any) -> Any:
    return jnp.maximum(a * b, a + 0.5)


def _summed(a: Any) -> Any:
    return a.astype("float32").sum(axis=0)


def _random(a: Any, b: Any) -> Any:
    # The seed depends on an argument, so that no turn can be left out.
    seed = jax.lax.bitcast_convert_type(a[0, 0], jnp.uint32)
    bits = jax.random.bits(jax.random.key(seed), a.shape)
    return jnp.where(bits > 2**30, a, b)


_TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1000, 400), (1, 0)),
    ((16, 96, 6, 40), (0, 2, 1, 3)),
    ((32, 16, 16, 48), (3, 1, 2, 0)),
    ((16, 576, 40), (1, 0, 2)),
]
"""What training steps transpose: matrices, heads of attention, images.

To move whole rows takes XLA's programs for CPUs ten times as long for some shapes as
for others; steps have some of each.
"""


def _per_transposed(times: Sequence[float]) -> float:
    numbers = [prod(shape) for shape, _ in _TRANSPOSED]
    return statistics.mean(t / n for t, n in zip(times, numbers, strict=True))


def _transposed(order: tuple[int, ...]) -> Callable[[Any], Any]:
    return lambda array: jnp.transpose(array, order) * 1.0


def _many_kernels(x: Any) -> Any:
    # A product, a sum and what is done to each number, again and again, in several
    # chains that do not wait for each other.
    chains = [x * (1.0 + number) for number in range(_CHAINS)]
    for _ in range(_KERNELS // 3 // _CHAINS):
        chains = [jnp.tanh(x @ x) / (1.0 + x.sum(1, keepdims=True)) for x in chains]
    return sum(chains)


def _turn() -> float:
    def run(number: Any, x: Any) -> Any:
        return jax.lax.fori_loop(0, number, lambda _, x: x * 0.5, x)

    compiled = jax.jit(run)
    x = jnp.ones(8)
    for number in (10, 1000):
        jax.block_until_ready(compiled(number, x))
    start = time.perf_counter()
    jax.block_until_ready(compiled(1000, x))
    return (time.perf_counter() - start) / 1000


def _dispatch() -> float:
    """Seconds that the host takes to run a program of many small arrays."""
    run = jax.jit(lambda arrays: [array + 1 for array in arrays], donate_argnums=0)
    arrays = run([jnp.ones(8) for _ in range(32)])
    start = time.perf_counter()
    for _ in range(64):
        arrays = run(arrays)
    jax.block_until_ready(arrays)
    return (time.perf_counter() - start) / 64


_TURN_ABOUT = 7
"""So often what is compared is timed, one after the other."""

_COLLECTIVE_BYTES = (2**10, 2**18, 2**22, 2**24)


def _collectives(mesh: Mesh) -> Iterator[CollectivePoint]:
    """Sums and gathers over all devices of a mesh, inside of a program."""

    def all_reduce(x: Any) -> Any:
        return jax.lax.psum(x, "data") * 0.5

    def all_gather(x: Any) -> Any:
        whole = jax.lax.all_gather(x, "data", tiled=True)
        return jax.lax.dynamic_slice_in_dim(whole, 0, x.shape[0])

    def permute(x: Any) -> Any:
        pairs = [(i, (i + 1) % mesh.size) for i in range(mesh.size)]
        return jax.lax.ppermute(x, "data", pairs)

    for kind, function, parts in (
        ("all_reduce", all_reduce, 1),
        ("all_gather", all_gather, mesh.size),
        ("permute", permute, 1),
    ):
        for size in _COLLECTIVE_BYTES:
            numbers = max(size // 4 // parts, 1)
            turns = _on_each(mesh, function, jnp.ones(numbers * mesh.size))
            seconds = max(turns.repeat(ROUNDS * REPEATS).per_turn, 1e-9)
            yield CollectivePoint(kind, mesh.size, float(size), seconds)
    yield CollectivePoint("wait", mesh.size, 0.0, _waiting(mesh))


def _waiting(mesh: Mesh) -> float:
    """Seconds that devices wait for each other, if they have had something to do."""

    def work(x: Any) -> Any:
        return jnp.tanh(x) - 0.1 * x.sum(axis=1, keepdims=True)

    def together(x: Any) -> Any:
        made = work(x)
        return made + 0.0 * jax.lax.psum(made[:1, :8], "data").sum()

    array = jnp.ones((mesh.size * 1024, 512))
    met, apart = (_on_each(mesh, each, array) for each in (together, _alone(work)))
    waits = [met.once() - apart.once() for _ in range(_TURN_ABOUT)]
    return max(statistics.median(waits), 0.0)


def _alone(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same with a sum of its own instead of one over all devices."""

    def run(x: Any) -> Any:
        made = work(x)
        return made + 0.0 * made[:1, :8].sum()

    return run


def _on_each(mesh: Mesh, function: Callable[[Any], Any], array: Any) -> Turns:
    """Times a function of a device's part of an array, on all devices at once."""
    spec = PartitionSpec("data")

    def run(number: Any, array: Any) -> Any:
        def inside(part: Any) -> Any:
            return jax.lax.fori_loop(0, number, lambda _, x: function(x), part)

        return jax.shard_map(
            inside, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(array)

    compiled = jax.jit(run)
    placed = jax.device_put(array, NamedSharding(mesh, spec))

    def timed(number: int) -> float:
        jax.block_until_ready(compiled(number, placed))
        start = time.perf_counter()
        jax.block_until_ready(compiled(number, placed))
        return time.perf_counter() - start

    once = timed(1)
    number = max(2, min(512, int(BLINK / max(once, 1e-6))))
    return Turns(timed, number, 2 * number)


Work = tuple[str, Callable[[Any], Any], tuple[int, ...]]
"""A kind of kernel, one of them, and the shape that a device works on."""


def _works() -> list[Work]:
    """Small kernels keep one core busy, large ones all of them."""

    def multiply(x: Any) -> Any:
        return x @ jnp.full((x.shape[1], x.shape[1]), 0.003) + 0.1

    def convolve(x: Any) -> Any:
        kernel = jnp.full((3, 3, 32, 32), 0.003)
        order = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=order
        )

    def compute(x: Any) -> Any:
        return jnp.tanh(x) - 0.1 * x.sum(axis=1, keepdims=True)

    return [
        ("product", multiply, (128, 256)),
        ("product", multiply, (512, 512)),
        ("convolution", convolve, (16, 28, 28, 32)),
        ("other", compute, (128, 256)),
        ("other", compute, (2048, 512)),
    ]


def _crowding(one: Mesh, many: Mesh) -> Iterator[CrowdPoint]:
    """How much longer devices of one CPU take together than one after the other."""
    for kind, work, shape in _works():
        array = jnp.ones((many.size * shape[0], *shape[1:]))
        alone = _on_each(one, work, jnp.ones(shape))
        together = _on_each(many, work, array)
        pairs = [(alone.once(), together.once()) for _ in range(_TURN_ABOUT)]
        ratios = [both / (each * many.size) for each, both in pairs if each > 0]
        seconds = statistics.median(each for each, _ in pairs)
        ratio = min(max(statistics.median(ratios), 0.1), 2.0) if ratios else 1.0
        yield CrowdPoint(kind, many.size, max(seconds, 1e-9), ratio)


def _fresh() -> float:
    """Seconds for a byte that a program uses first, beyond using it again."""
    size = 2**26

    def run(number: Any, x: Any) -> Any:
        # One array in between is too large to be kept for the next call.
        big = jnp.broadcast_to(x, (size // 4,)) * 1.5
        big = jax.lax.fori_loop(0, number, lambda _, big: big * 0.5, big)
        return jax.lax.optimization_barrier(big)[:8].sum()

    compiled = jax.jit(run)
    x = jnp.ones(1)

    def timed(number: int) -> float:
        jax.block_until_ready(compiled(number, x))
        start = time.perf_counter()
        jax.block_until_ready(compiled(number, x))
        return time.perf_counter() - start

    turn = (timed(9) - timed(1)) / 8
    return max(timed(1) - 2 * turn, 0.0) / size
