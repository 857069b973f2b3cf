"""What travels between devices in a compiled program."""

import re
from collections import Counter

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf" ({_KINDS})(?:-start)?\(")


def count_collectives(hlo: str) -> dict[str, int]:
    """Counts the collectives in the text of a compiled program.

    >>> count_collectives("%a = f32[4] all-reduce(%b), to_apply=%add")
    {'all-reduce': 1}
    """
    return dict(sorted(Counter(_COLLECTIVE.findall(hlo)).items()))
