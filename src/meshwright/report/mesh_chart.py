"""The devices of a plan as a drawing: which has which place on which axis."""

from collections.abc import Sequence
from itertools import product

from meshwright.parallel.plan import AXES, Plan
from meshwright.report.charts import WIDTH, svg

from markupsafe import Markup

_TOP = 12
_BOX, _LINE = 36, 17
_MOST_ACROSS = 8


def draw_mesh(plan: Plan, devices: Sequence[str]) -> Markup:
    """A box for each device, with its place on the axes that are divided.

    >>> from meshwright.parallel.plan import Plan
    >>> chart = draw_mesh(Plan(data=2, fsdp=2), ["GPU:0", "GPU:1", "GPU:2", "GPU:3"])
    >>> chart.count("<rect"), chart.count("data 1")
    (4, 2)
    """
    axes = [a for a in ("stages", *AXES) if getattr(plan, a) > 1]
    degrees = [getattr(plan, axis) for axis in axes]
    places = list(product(*map(range, degrees)))
    across = _across(degrees, len(devices))
    wide, tall = WIDTH / across, _BOX + _LINE * len(axes)
    boxes = []
    for number, (device, place) in enumerate(zip(devices, places, strict=True)):
        row, column = divmod(number, across)
        words = [f"{a} {i}" for a, i in zip(axes, place, strict=True)]
        corner = column * wide, _TOP + row * tall
        boxes.append(_box(corner, (wide - 6, tall - 8), device, words))
    rows = -(-len(devices) // across)
    return svg("The devices on the axes of the plan", _TOP + rows * tall, boxes)


def _box(
    corner: tuple[float, float],
    size: tuple[float, float],
    device: str,
    words: Sequence[str],
) -> Markup:
    x, y = corner
    box = Markup(
        '<rect class="rule" x="{:.1f}" y="{}" width="{:.1f}" height="{}" rx="5"/>'
        '<text x="{:.1f}" y="{}">{}</text>'
    ).format(x + 3, y, *size, x + 12, y + 20, device)
    lines = [
        Markup('<text class="faint" x="{:.1f}" y="{}">{}</text>').format(
            x + 12, y + 20 + _LINE * number, word
        )
        for number, word in enumerate(words, start=1)
    ]
    return Markup("").join([box, *lines])


def _across(degrees: Sequence[int], number: int) -> int:
    """Boxes in a row: as many as the inner axes have, as long as there is room."""
    found = 1
    for degree in reversed(degrees):
        if found * degree > _MOST_ACROSS:
            break
        found *= degree
    return found if found > 1 else min(number, _MOST_ACROSS)
