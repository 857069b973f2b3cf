"""Maps over arrays in containers without touching the containers.

`jax.tree.map` sorts the keys of a dict, and layers may depend on their order.
"""

from collections.abc import Callable, Iterator
from typing import Any


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to what lies in dicts, lists and tuples; None stays None.

    Containers in which nothing changes are returned themselves.

    >>> map_leaves(lambda x: x + 1, {"b": 1, "a": (2, None)})
    {'b': 2, 'a': (3, None)}
    """
    if isinstance(value, dict):
        mapped = {key: map_leaves(function, item) for key, item in value.items()}
        changed = any(mapped[key] is not value[key] for key in value)
        return type(value)(mapped) if changed else value
    if isinstance(value, list | tuple):
        items = [map_leaves(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        is_named = hasattr(value, "_fields")
        return type(value)(*items) if is_named else type(value)(items)
    return None if value is None else function(value)


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What lies in dicts, lists and tuples, by the expression that gets there.

    >>> list(named_leaves("x", {"a": 1, "b": [2, None]}))
    [("x['a']", 1), ("x['b'][0]", 2)]
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from named_leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_leaves(f"{name}[{index}]", item)
    elif value is not None:
        yield name, value
