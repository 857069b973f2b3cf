"""Placement rules by which users steer: ordered, and loud when they cannot apply."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import RuleError
from meshwright.parallel.plan import AXES, Plan, Spec

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a model's variables by path."""


def check_rules(rules: Sequence[tuple[str, Spec]]) -> tuple[tuple[str, Spec], ...]:
    """Checks what can be checked of rules without a model."""
    seen: set[str] = set()
    for rule in rules:
        pattern, spec = _parts(rule)
        if pattern in seen:
            raise RuleError(
                f"The rule {pattern!r} stands twice.",
                "Rules are ordered and the first that matches counts, so each pattern "
                "stands once.",
                "Remove one of them.",
            )
        seen.add(pattern)
        unknown = [axis for axis in spec if axis is not None and axis not in AXES]
        if unknown:
            raise RuleError(
                f"The rule {pattern!r} names the axes {unknown}.",
                f"A spec has one axis name or None per dim; the axes are {AXES}.",
                "Write, for example, ('dense/kernel', (None, 'tensor')).",
            )
    return tuple((pattern, tuple(spec)) for pattern, spec in rules)


def _parts(rule: Any) -> tuple[str, Spec]:
    try:
        pattern, spec = rule
        re.compile(pattern)
        if isinstance(spec, tuple | list):
            return pattern, tuple(spec)
    except (TypeError, ValueError, re.error):
        pass
    raise RuleError(
        f"A rule is {rule!r}.",
        "A rule is a pair of a regular expression, searched in the variable's path, "
        "and a spec with one axis name or None per dim.",
        "Write, for example, ('dense/kernel', (None, 'tensor')).",
    )


def apply_rules(plan: Plan, shapes: Shapes) -> dict[str, tuple[str, Spec]]:
    """The rule and spec of every variable that a rule takes: path → (pattern, spec)."""
    taken: dict[str, tuple[str, Spec]] = {}
    for pattern, spec in plan.rules:
        matches = [path for path in shapes if re.search(pattern, path)]
        if not matches:
            raise RuleError(
                f"The rule {pattern!r} matches 0 of {len(shapes)} variables.",
                "Every rule must take at least one variable; patterns are searched in "
                "paths such as "
                f"{next(iter(shapes), 'dense/kernel')!r}.",
                _near_misses(pattern, shapes),
            )
        new = [path for path in matches if path not in taken]
        if not new:
            earlier = sorted({taken[path][0] for path in matches})
            raise RuleError(
                f"The rule {pattern!r} never gets its turn: all of its matches "
                f"({', '.join(matches[:3])}) are taken by {earlier}.",
                "Rules are ordered and the first that matches counts.",
                "Move it up, or make the earlier patterns narrower.",
            )
        for path in new:
            _check_fit(pattern, spec, path, shapes[path], plan)
            taken[path] = pattern, spec
    return taken


def _check_fit(
    pattern: str, spec: Spec, path: str, shape: tuple[int, ...], plan: Plan
) -> None:
    if len(spec) != len(shape):
        raise RuleError(
            f"The rule {pattern!r} has a spec of {len(spec)} dims {spec}, and matches "
            f"{path} of shape {shape}.",
            "A spec has one axis name or None per dim.",
            f"Give it {len(shape)} entries, or make the pattern narrower.",
        )
    for dim, axis in enumerate(spec):
        degree = getattr(plan, axis) if axis else 1
        if shape[dim] % degree:
            raise RuleError(
                f"The rule {pattern!r} splits dim {dim} of {path}, of shape {shape}, "
                f"over the axis {axis!r} of degree {degree}.",
                f"A split dim must be divisible: {shape[dim]} = {degree} x "
                f"{shape[dim] // degree} + {shape[dim] % degree}.",
                f"Split another dim, or use a degree that divides {shape[dim]}.",
            )


def _near_misses(pattern: str, shapes: Shapes) -> str:
    plain = re.sub(r"[^\w/]+", "", pattern)
    near = difflib.get_close_matches(plain, shapes, n=3, cutoff=0.4)
    if not near:
        near = list(shapes)[:3]
    return f"Did you mean {' or '.join(repr(path) for path in near)}?"
