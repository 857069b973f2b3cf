"""What kernels need that a compiler for GPUs chooses by trying them out.

A program that was compiled without trials tells which operations they are for, but not
what the kernel that wins will take.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from meshwright.devices.memory import bytes_of_tensors

REDZONE_BYTES = 2 * 2**23
"""XLA watches 8 MiB before and after each input of a trial, to see who writes there."""

_INSTRUCTION = re.compile(
    r"^ +(?:ROOT )?%?(?P<name>\S+) = (?P<type>\(.*?\)|\S+) "
    r"(?P<opcode>[\w-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>\S+) \(.*\{$")
_NAME = re.compile(r"%?([\w.-]+)(?:, |$)")
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLED = re.compile(r"\b(?:body|to_apply)=%?([\w.-]+)")
_CONVOLUTION = 'custom_call_target="__cudnn$conv'
# Other library calls (recurrent layers, attention) and other fusions have one kernel.
_TRIED_CALL = re.compile(r'custom_call_target="(__cublas|__cudnn\$conv)')
_TRIED_FUSION = re.compile(r"kind=kCustom.*(gemm|__cudnn\$fusion|__custom_fusion)")

Buffer = tuple[str, int]
"""A result of an instruction: its name, and which of its results."""


class Instruction(NamedTuple):
    """A line of a program."""

    name: str
    sizes: list[int]
    """Bytes of each of its results."""
    opcode: str
    operands: list[str]
    rest: str

    @classmethod
    def of(cls, line: str) -> Self | None:
        """Reads a line; None if it is something else."""
        match = _INSTRUCTION.match(line)
        if match is None:
            return None
        operands = _NAME.findall(match["operands"])
        sizes = bytes_of_tensors(match["type"])
        return cls(match["name"], sizes, match["opcode"], operands, match["rest"])

    @property
    def is_tried_out(self) -> bool:
        """Whether there are several kernels for it."""
        if self.opcode == "custom-call":
            return _TRIED_CALL.search(self.rest) is not None
        if self.opcode == "fusion":
            return _TRIED_FUSION.search(self.rest) is not None
        return self.opcode in ("dot", "convolution")


def largest_trial(hlo: str) -> int:
    """Bytes that a compiler takes to try out kernels for one operation, at the most.

    It makes inputs and outputs of its own for products and convolutions, and keeps the
    outputs of the first kernel to compare with. They need room beside the model.

    Arguments:
        hlo: The text of a compiled program.
    """
    found = [Instruction.of(line) for line in hlo.splitlines()]
    instructions = [each for each in found if each is not None]
    sizes = {each.name: sum(each.sizes) for each in instructions}
    return max(
        (
            sum(sizes.get(name, 0) + REDZONE_BYTES for name in each.operands)
            + 2 * sizes[each.name]
            for each in instructions
            if each.is_tried_out
        ),
        default=0,
    )


def with_workspaces(hlo: str, temporaries: int) -> int:
    """The temporaries of a step if convolutions get kernels with workspaces.

    The fastest kernel for the gradient of a filter may copy both of its inputs into
    another layout: on an H200 their workspaces were that large, up to a few MiB, where
    there were any. Where such a convolution is not at the peak it finds room there.

    Arguments:
        hlo: The text of a program that was compiled without trials.
        temporaries: Bytes of its temporaries, by the compiler's own account.
    """
    program = _Program(hlo)
    largest = max(program.workspaces(), default=0)
    # The peak is that of an ideal allocator; the compiler's own is the least.
    return max(temporaries, min(program.peak(), temporaries + largest))


class _Program:
    """The computations of a program, each in the order in which it runs."""

    def __init__(self, hlo: str) -> None:
        self._computations: dict[str, list[Instruction]] = {}
        self._entry = ""
        current: list[Instruction] = []
        for line in hlo.splitlines():
            begins, instruction = _COMPUTATION.match(line), Instruction.of(line)
            if begins is not None:
                current = self._computations.setdefault(begins["name"], [])
                self._entry = begins["name"] if begins["entry"] else self._entry
            elif instruction is not None:
                current.append(instruction)

    def workspaces(self) -> Iterator[int]:
        """The workspace that each operation may want."""
        for instructions in self._computations.values():
            sizes = {each.name: sum(each.sizes) for each in instructions}
            yield from (_workspace(each, sizes) for each in instructions)

    def peak(self) -> int:
        """Bytes of temporaries and workspaces that are alive at the same time."""
        return self._peak_of(self._entry) if self._entry else 0

    def _peak_of(self, name: str) -> int:
        instructions = self._computations.get(name, [])
        lives = _Lives(instructions, is_entry=name == self._entry)
        sizes = {each.name: sum(each.sizes) for each in instructions}
        beside = [_workspace(each, sizes) + self._inside(each) for each in instructions]
        return lives.peak(beside)

    def _inside(self, instruction: Instruction) -> int:
        if instruction.opcode not in ("while", "call"):
            return 0
        return max(map(self._peak_of, _CALLED.findall(instruction.rest)), default=0)


def _workspace(instruction: Instruction, sizes: Mapping[str, int]) -> int:
    """What the kernel of a filter's gradient may take; 0 for other operations."""
    if _CONVOLUTION not in instruction.rest:
        return 0
    inputs = [sizes.get(name, 0) for name in instruction.operands[:2]]
    sums_over_samples = sum(instruction.sizes) < min(inputs)
    return sum(inputs) if sums_over_samples else 0


class _Lives:
    """When the buffers of a computation are made, and when they are used last."""

    def __init__(self, instructions: Sequence[Instruction], is_entry: bool) -> None:
        self._instructions = instructions
        self._sizes: dict[Buffer, int] = {}
        self._last: dict[Buffer, int] = {}
        self._held: dict[str, list[Buffer]] = {}
        for number, each in enumerate(instructions):
            self._hold(number, each, is_entry)
        for buffer in self._held[instructions[-1].name] if instructions else []:
            self._last[buffer] = len(instructions)
            # What a program returns is no temporary; it takes the place of arguments.
            self._sizes[buffer] *= not is_entry

    def _hold(self, number: int, each: Instruction, is_entry: bool) -> None:
        given = [self._held[name] for name in each.operands if name in self._held]
        if each.opcode == "get-tuple-element":
            index = _INDEX.search(each.rest)
            self._held[each.name] = given[0][int(index[1]) :][:1] if index else []
        elif each.opcode in ("bitcast", "tuple", "while", "opt-barrier"):
            self._held[each.name] = [buffer for held in given for buffer in held]
        else:
            no_buffer = each.opcode == "constant" or (
                each.opcode == "parameter" and is_entry
            )
            own = [(each.name, index) for index in range(len(each.sizes))]
            for buffer, size in zip(own, each.sizes, strict=True):
                self._sizes[buffer] = 0 if no_buffer else size
                self._last[buffer] = number
            self._held[each.name] = own
            for buffer in (buffer for held in given for buffer in held):
                self._last[buffer] = number

    def peak(self, beside: Sequence[int]) -> int:
        """Bytes that are alive at the most, beyond those of the parameters.

        Arguments:
            beside: What each instruction needs besides, while it runs.
        """
        ending: dict[int, list[Buffer]] = {}
        for buffer, number in self._last.items():
            ending.setdefault(number, []).append(buffer)
        alive = peak = given = 0
        for number, each in enumerate(self._instructions):
            own = [buffer for buffer in self._held[each.name] if buffer[0] == each.name]
            made = sum(self._sizes[buffer] for buffer in own)
            given += made if each.opcode == "parameter" else 0
            gone = ending.get(number, [])
            in_place = self._in_place(each, own, gone)
            peak = max(peak, alive + made - in_place + beside[number] - given)
            alive += made - sum(self._sizes[buffer] for buffer in gone)
        return peak

    def _in_place(
        self, each: Instruction, own: Sequence[Buffer], gone: Sequence[Buffer]
    ) -> int:
        """Bytes that a fusion writes over inputs of the same size, used last by it."""
        if each.opcode != "fusion" or "kind=kCustom" in each.rest:
            return 0
        free = [self._sizes[buffer] for buffer in gone if buffer not in own]
        shared = 0
        for size in (self._sizes[buffer] for buffer in own):
            if size in free:
                free.remove(size)
                shared += size
        return shared
