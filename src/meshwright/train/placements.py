"""Where all variables of a training belong on a mesh without stages."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.parallel.layout import (
    VariableLayout,
    reference_of,
    unique_variables,
)
from meshwright.parallel.mesh import on_host, replicated, sharding

from jax.sharding import Mesh, NamedSharding


def place_variables(
    model: Any,
    layouts: Mapping[str, VariableLayout],
    mesh: Mesh,
    home: Mesh | None = None,
    *,
    offloads: bool = False,
) -> Iterator[tuple[Any, NamedSharding]]:
    """The variables of a model, its metrics and its optimizer, each with its place.

    Arguments:
        model: The model.
        layouts: Those of its own variables, by path.
        mesh: The devices that compute.
        home: Those that variables live on, if it is others; metrics stay where steps
            compute them.
        offloads: Whether the optimizer's state belongs into the memory of the host.
    """
    home = home or mesh
    whole = replicated(home)
    places = {}
    for path, variable in unique_variables(model).items():
        places[id(variable)] = where = sharding(home, layouts[path].spec)
        yield variable, where
    for variable in model.metrics_variables:
        yield variable, replicated(mesh)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        for slot in optimizer.variables:
            beside = places.get(id(reference_of(slot, model)))
            if beside is None:
                yield slot, whole
            else:
                yield slot, on_host(beside) if offloads else beside
