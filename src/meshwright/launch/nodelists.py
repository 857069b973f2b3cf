"""Lists of hosts as Slurm writes them."""

import re

from meshwright.errors import RendezvousError

_MOST = 100_000
_PIECE = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def expand_nodelist(text: str) -> list[str]:
    """The names of the hosts in a list of Slurm's.

    >>> expand_nodelist("a[01-03,07],b")
    ['a01', 'a02', 'a03', 'a07', 'b']
    """
    names = [name for part in _parts(text) for name in _expand(part, text)]
    if not names or not all(names):
        raise _unreadable(text)
    return names


def _parts(text: str) -> list[str]:
    """What stands between commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _unreadable(text)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise _unreadable(text)
    return [part.strip() for part in parts]


def _expand(part: str, text: str) -> list[str]:
    """The names that one part stands for; it may have several brackets."""
    match = _PIECE.search(part)
    if match is None:
        return [part]
    rests = _expand(part[match.end() :], text)
    numbers = [n for given in match[1].split(",") for n in _numbers(given, text)]
    if len(numbers) * len(rests) > _MOST:
        raise _unreadable(text)
    return [f"{part[: match.start()]}{n}{rest}" for n in numbers for rest in rests]


def _numbers(given: str, text: str) -> list[str]:
    """`01-03` as 01, 02, 03: they are as wide as the first."""
    match = _RANGE.fullmatch(given.strip())
    if match is None:
        raise _unreadable(text)
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < first + _MOST:
        raise _unreadable(text)
    return [f"{n:0{len(match[1])}d}" for n in range(first, last + 1)]


def _unreadable(text: str) -> RendezvousError:
    return RendezvousError(
        f"The list of nodes is {text!r}.",
        "Slurm writes names with ranges in brackets, such as 'a[01-03,07],b'.",
        "Look at what sets SLURM_STEP_NODELIST besides Slurm, and unset it there.",
    )
