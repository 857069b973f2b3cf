"""Where every variable of a model goes under a Plan, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.parallel.plan import Plan, Spec
from meshwright.parallel.rules import apply_rules
from meshwright.parallel.tensor import TensorChoice, choose_tensor_specs


@dataclass(frozen=True, kw_only=True, slots=True)
class VariableLayout:
    """One variable: how its dims are split, and the reason."""

    path: str
    shape: tuple[int, ...]
    spec: Spec
    because: str

    @property
    def is_split(self) -> bool:
        """Whether any device holds less than the whole."""
        return any(axis is not None for axis in self.spec)


def lay_out_model(model: Any, plan: Plan) -> dict[str, VariableLayout]:
    """The layout of every variable of a built model, by path."""
    variables = unique_variables(model)
    shapes = {path: tuple(v.shape) for path, v in variables.items()}
    ruled = apply_rules(plan, shapes)
    chosen = choose_tensor_specs(model, plan.tensor) if plan.tensor > 1 else {}
    return {
        path: _lay_out(path, variable, plan, ruled, chosen)
        for path, variable in variables.items()
    }


def unique_variables(model: Any) -> dict[str, Any]:
    """The variables of a model by path; paths that occur twice get a number."""
    found: dict[str, Any] = {}
    for variable in model.variables:
        path, number = variable.path, 1
        while path in found and found[path] is not variable:
            number += 1
            path = f"{variable.path}#{number}"
        found[path] = variable
    return found


def _lay_out(
    path: str,
    variable: Any,
    plan: Plan,
    ruled: Mapping[str, tuple[str, Spec]],
    chosen: Mapping[int, TensorChoice],
) -> VariableLayout:
    shape = tuple(variable.shape)
    if path in ruled:
        pattern, spec = ruled[path]
        return VariableLayout(
            path=path, shape=shape, spec=spec, because=f"rule {pattern!r}"
        )
    choice = chosen.get(id(variable), TensorChoice((None,) * len(shape), ""))
    reasons = [choice.because] if choice.because else []
    spec = choice.spec
    if plan.fsdp > 1 and not is_arithmetic(variable):
        reasons.append(f"whole over fsdp: {variable.dtype} is a seed or a counter")
    elif plan.fsdp > 1:
        spec, because = add_fsdp(shape, spec, plan.fsdp)
        reasons.append(because)
    return VariableLayout(
        path=path,
        shape=shape,
        spec=spec,
        because="; ".join(reasons) or "replicated: no axis splits variables",
    )


def is_arithmetic(variable: Any) -> bool:
    """Whether a variable holds numbers to compute with, not a seed or a counter."""
    return "float" in str(variable.dtype)


def add_fsdp(shape: tuple[int, ...], spec: Spec, degree: int) -> tuple[Spec, str]:
    """Splits the largest free dim that divides over the axis `fsdp`, if there is one.

    >>> add_fsdp((3, 8), (None, None), 4)
    ((None, 'fsdp'), 'fsdp splits dim 1 of (3, 8) by 4')
    >>> add_fsdp((3,), (None,), 4)[1]
    'whole over fsdp: no free dim of (3,) divides by 4'
    """
    free = [
        dim
        for dim, size in enumerate(shape)
        if spec[dim] is None and size and size % degree == 0
    ]
    if not free or not prod(shape):
        return spec, f"whole over fsdp: no free dim of {shape} divides by {degree}"
    best = max(free, key=lambda dim: shape[dim])
    split = tuple("fsdp" if dim == best else axis for dim, axis in enumerate(spec))
    return split, f"fsdp splits dim {best} of {shape} by {degree}"


def reference_of(slot: Any, model: Any) -> Any:
    """The weight that an optimizer's slot belongs to: same shape, path in its name."""
    candidates = [
        weight
        for weight in model.trainable_variables
        if tuple(weight.shape) == tuple(slot.shape)
        and slot.name.startswith(weight.path.replace("/", "_"))
    ]
    return max(candidates, key=lambda weight: len(weight.path), default=None)
