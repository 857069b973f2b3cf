"""What a compiled step needs on one device, and the limit it must keep."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn, Self

from meshwright.devices.sizes import format_bytes
from meshwright.errors import MemoryLimitError

import jax

# An instruction of the entry computation: result type(s), opcode, and the name that
# JAX gave to the operation. `ROOT` only gathers the outputs.
_INSTRUCTION = re.compile(r"^  %?\S+ = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w-]+)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TENSOR = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")
_WRAPPER = re.compile(r"(jvp|transpose|vmap|checkpoint|rematted_computation)\((.*)\)")
_NO_BUFFER = {"bitcast", "tuple", "get-tuple-element", "constant", "after-all"}
_ON_HOST = ":S(5)"
"""The mark of an array in the memory of the host, behind its layout."""
_BITS = re.compile(r"\d+")

MemoryInUse = Sequence[tuple[Iterable[jax.Device], Mapping[str, int]]]
"""Devices, and what a program takes on each of them, by kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One buffer of a compiled step."""

    kind: str
    path: str
    type: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.path} {self.type} {format_bytes(self.bytes)} ({self.kind})"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """The memory of one compiled step on one device, in bytes."""

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    """Outputs that reuse the memory of arguments."""
    argument_kinds: Mapping[str, int]
    """How `arguments` divides: parameters, optimizer state, batch, ..."""
    largest: tuple[Tensor, ...]
    """The largest tensors, by layer."""

    @classmethod
    def of(
        cls,
        compiled: Any,
        labels: Mapping[str, tuple[str, str]],
        num_largest: int = 3,
    ) -> Self:
        """Reads the compiler's own analysis.

        Arguments:
            compiled: What `jax.jit(f).lower(...).compile()` returns.
            labels: Kind and path of each argument, by JAX's name for it
                (`'state[0][1]'`); arguments without a label are the batch.
            num_largest: How many of the largest tensors to name.
        """
        analysis = compiled.memory_analysis()
        tensors = list(_tensors(compiled.as_text(), labels))
        kinds: dict[str, int] = {}
        for tensor in tensors:
            if tensor.kind != "temporary":
                kinds[tensor.kind] = kinds.get(tensor.kind, 0) + tensor.bytes
        return cls(
            arguments=analysis.argument_size_in_bytes,
            temporaries=analysis.temp_size_in_bytes,
            outputs=analysis.output_size_in_bytes,
            aliased=analysis.alias_size_in_bytes,
            argument_kinds=kinds,
            largest=tuple(sorted(tensors, key=lambda t: -t.bytes)[:num_largest]),
        )

    @property
    def needed(self) -> int:
        """Arguments + temporaries + outputs - aliases."""
        return self.arguments + self.temporaries + self.outputs - self.aliased

    def by_kind(self) -> dict[str, int]:
        """The bytes of each kind; they add up to `needed`."""
        named = dict(self.argument_kinds)
        rest = self.arguments - sum(named.values())
        return {
            **named,
            **({"other arguments": rest} if rest else {}),
            "temporaries": self.temporaries,
            "outputs not in place": self.outputs - self.aliased,
        }


def refuse_over_limit(
    lowered: Any,
    labels: Mapping[str, tuple[str, str]],
    limit: int,
    what: str,
    batch_size: int,
) -> None:
    """Raises `MemoryLimitError` if a step needs more than `limit` bytes on a device.

    The step is compiled, and a call that follows finds it in JAX's cache. On a GPU the
    compiler tries kernels out in the device's own, limited memory, so a compilation
    without trials is looked at before.

    Arguments:
        lowered: What `jax.jit(step).lower(...)` returns.
        labels: Kind and path of each argument, see `StepMemory.of`.
        limit: Bytes that it may use.
        what: The step, in words.
        batch_size: Samples in the step's batch, for the advice.
    """
    has_trials = jax.default_backend() == "gpu"
    if has_trials:
        with own_names():
            untried = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
        memory = StepMemory.of(untried, labels)
        _compare(memory, limit, what, batch_size)
    try:
        with own_names():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not (has_trials and is_out_of_memory(error)):
            raise
        _refuse_trials(memory, limit, what, batch_size, error)
    _compare(StepMemory.of(compiled, labels), limit, what, batch_size)


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Keeps programs of the compile cache away that carry names of other layers.

    To JAX a program is the same whatever its operations are called, so it would load
    the one that a model with the same shapes and other names left behind.
    """
    flag = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, before)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of JAX's is an allocator's that has no room."""
    return "RESOURCE_EXHAUSTED" in str(error)


@contextlib.contextmanager
def explaining_exhaustion(
    what: str, batch_size: int, accumulate: int
) -> Iterator[None]:
    """Explains an allocator that has no room for a step, where no limit was set.

    Arguments:
        what: The step.
        batch_size: Samples of its batch.
        accumulate: Microbatches that it is computed in.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        parts = f" in {accumulate} microbatches" if accumulate > 1 else ""
        raise MemoryLimitError(
            f"{what} with a batch of {batch_size}{parts} found no room on its device: "
            f"{str(error).splitlines()[0]}",
            "The weights, the state of the optimizer, what is kept for the gradients "
            "and the batches must fit the memory of each device.",
            f"Use accumulate={2 * accumulate} or remat=True in the strategy, or a "
            f"smaller batch_size; mw.preflight(model, batch_size={batch_size}) says "
            "what a step needs and the smallest change that fits.",
        ) from error


def _compare(memory: StepMemory, limit: int, what: str, batch_size: int) -> None:
    if memory.needed <= limit:
        return
    raise MemoryLimitError(
        f"{what} with a batch of {batch_size} {_needs(memory, limit)}",
        "Arguments + temporaries + outputs - aliases of a compiled step must fit the "
        "memory limit of each device.",
        _advice(memory, limit, batch_size),
        needed=memory.needed,
        limit=limit,
        by_kind=memory.by_kind(),
        largest=tuple(t.path for t in memory.largest),
    )


def _refuse_trials(
    memory: StepMemory, limit: int, what: str, batch_size: int, cause: Exception
) -> NoReturn:
    raise MemoryLimitError(
        f"{what} with a batch of {batch_size} {_needs(memory, limit)}",
        "The step would fit, but the compiler found no room beside the model to try "
        "out kernels for it.",
        f"Use a batch_size well below {batch_size}, or raise memory_limit.",
        needed=memory.needed,
        limit=limit,
        by_kind=memory.by_kind(),
        largest=tuple(t.path for t in memory.largest),
    ) from cause


def _needs(memory: StepMemory, limit: int) -> str:
    kinds = memory.by_kind().items()
    return (
        f"needs {format_bytes(memory.needed)} per device "
        f"({', '.join(f'{k} {format_bytes(b)}' for k, b in kinds if b)}); "
        f"the limit is {format_bytes(limit)}. Largest tensors: "
        f"{'; '.join(str(t) for t in memory.largest)}."
    )


def refuse_batch(data: Any, limit: int, cause: Exception) -> NoReturn:
    """Raises `MemoryLimitError` for a batch that a device has no room for."""
    arrays = [array for array in jax.tree.leaves(data) if hasattr(array, "nbytes")]
    needed = sum(array.nbytes for array in arrays)
    size = arrays[0].shape[0]
    raise MemoryLimitError(
        f"A batch of {size} ({format_bytes(needed)}) found no room on its device; the "
        f"limit is {format_bytes(limit)}.",
        "A batch, the next one and the model must fit the memory limit of a device.",
        f"Use a batch_size well below {size}, or raise memory_limit.",
        needed=needed,
        limit=limit,
        by_kind={"batch": needed},
    ) from cause


def _advice(memory: StepMemory, limit: int, batch_size: int) -> str:
    """The change that helps. Gradients do not shrink with the batch; the rest of the
    temporaries does, so the batch size is an estimate on the safe side."""
    raise_it = f"set memory_limit to at least {memory.needed} bytes"
    parameters = memory.argument_kinds.get("parameters", 0)
    is_training = "optimizer state" in memory.argument_kinds
    fixed = memory.arguments - memory.argument_kinds.get("batch", 0)
    fixed += min(parameters, memory.temporaries) if is_training else 0
    shrinks = memory.needed - fixed
    fitting = int(batch_size * (limit - fixed) / shrinks) if shrinks > 0 else 0
    if 1 <= fitting < batch_size:
        return f"Use batch_size={fitting} (estimated) or less, or {raise_it}."
    return (
        f"No batch size helps, because {format_bytes(fixed)} do not depend on it: use "
        f"smaller layers or an optimizer with less state, or {raise_it}."
    )


def _tensors(hlo: str, labels: Mapping[str, tuple[str, str]]) -> Iterator[Tensor]:
    """The buffers of the entry computation, from the text of the compiled program."""
    entry = hlo[hlo.index("\nENTRY ") :]
    for line in entry.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or match["opcode"] in _NO_BUFFER:
            continue
        named = _OP_NAME.search(line)
        name = named[1] if named else ""
        if match["opcode"] == "parameter":
            if _ON_HOST in match["type"]:
                continue
            kind, path = labels.get(name, ("batch", name))
        else:
            kind, path = "temporary", layer_path(name)
        for tensor in _TENSOR.finditer(match["type"]):
            yield Tensor(kind=kind, path=path, type=tensor[0], bytes=_bytes_of(tensor))


def bytes_of_tensors(text: str) -> list[int]:
    """The bytes of each tensor in a type of a program, which may be a tuple.

    >>> bytes_of_tensors("(f32[8,16]{1,0}, s8[1024]{0}, pred[])")
    [512, 1024, 1]
    """
    return [_bytes_of(tensor) for tensor in _TENSOR.finditer(text)]


def _bytes_of(tensor: re.Match[str]) -> int:
    dims = [int(dim) for dim in tensor["dims"].split(",") if dim]
    bits = _BITS.search(tensor["dtype"])
    # `pred` is the one type without a width in its name; it takes a byte.
    return prod(dims) * (int(bits[0]) if bits else 8) // 8


def layer_path(op_name: str) -> str:
    """The layer in the name that JAX gives to an operation.

    >>> layer_path("jit(train_step)/transpose(jvp(encoder))/dense/dot_general")
    'encoder/dense'
    >>> layer_path("jit(train_step)/add")
    'train_step'
    """
    step, *parts = op_name.split("/")
    layers = []
    for part in parts[:-1]:
        while match := _WRAPPER.fullmatch(part):
            part = match[2]
        if part and not part.startswith("jit("):
            layers.append(part)
    return "/".join(layers) or step.removeprefix("jit(").removesuffix(")") or "step"
