"""What travels between devices in a compiled program."""

import re
from collections import Counter
from math import prod
from typing import NamedTuple

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf" ({_KINDS})(?:-start)?\(")
_RESULT = re.compile(rf" = (.*?) (?:{_KINDS})(?:-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+)(\d+)?\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|_computation=(%?[\w.\-]+))")
_NAME = re.compile(r"%([\w.\-]+)")


def count_collectives(hlo: str) -> dict[str, int]:
    """Counts the collectives in the text of a compiled program.

    >>> count_collectives("%a = f32[4] all-reduce(%b), to_apply=%add")
    {'all-reduce': 1}
    """
    return dict(sorted(Counter(_COLLECTIVE.findall(hlo)).items()))


class Traffic(NamedTuple):
    """Bytes that the collectives of a program give to each device."""

    always: int
    """In every run."""
    sometimes: int
    """In a run that takes a branch besides."""

    def per_run(self, every: int) -> float:
        """Bytes in a run, if one in so many takes the branch."""
        return self.always + self.sometimes / every


def traffic(hlo: str) -> Traffic:
    """How much travels in a compiled program without loops, from its text.

    >>> traffic("ENTRY %main (x: f32[]) -> f32[] {\\n %a = (f32[2,3], s32[]) "
    ...         "all-reduce(%b, %c), to_apply=%add\\n}")
    Traffic(always=28, sometimes=0)
    """
    lines: dict[str, list[str]] = {}
    current: list[str] = []
    for line in hlo.splitlines():
        begun = _COMPUTATION.match(line)
        if begun:
            current = lines.setdefault(begun[1], [])
        current.append(line)
    branches = _with_what_they_call(_branches_in(hlo), lines)
    found = {name: sum(map(_bytes_of, body)) for name, body in lines.items()}
    sometimes = sum(found[name] for name in branches)
    return Traffic(sum(found.values()) - sometimes, sometimes)


def _branches_in(hlo: str) -> set[str]:
    conditionals = (line for line in hlo.splitlines() if " conditional(" in line)
    groups = [pair for line in conditionals for pair in _BRANCHES.findall(line)]
    names = ",".join(part for pair in groups for part in pair if part).split(",")
    return {name.strip().lstrip("%") for name in names if name.strip()}


def _with_what_they_call(
    names: set[str], computations: dict[str, list[str]]
) -> set[str]:
    found, new = set[str](), names & computations.keys()
    while new:
        found |= new
        text = "\n".join(line for name in new for line in computations[name][1:])
        new = (set(_NAME.findall(text)) & computations.keys()) - found
    return found


def _bytes_of(line: str) -> int:
    result = _RESULT.search(line)
    if result is None:
        return 0
    shapes = _SHAPE.findall(result[1])
    return sum(
        prod(map(int, filter(None, dims.split(",")))) * max(int(bits or 8) // 8, 1)
        for _, bits, dims in shapes
    )
