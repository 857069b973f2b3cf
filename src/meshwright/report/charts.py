"""Charts as SVG inside of a page, in the colours of its style.

A chart has a title that screen readers read; the figures stand in a table beneath it,
which `page.figure` does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH = 720
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 30, 40
_BAR = 26
_NAMES = 190
_SERIES = ("--one", "--two", "--best", "--faint")
_PARTS = ("--one", "--two", "--three", "--four", "--five", "--best", "--faint")
_ACROSS = 5
"""So many names stand side by side above stacked bars."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind; they are joined if it is a line."""

    name: str
    points: Sequence[tuple[float, float]]
    is_line: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of parallel coordinates, with marks at places from 0 to 1."""

    name: str
    marks: Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Path:
    """One line through all axes; None where it has no place."""

    name: str
    places: Sequence[float | None]
    weight: float
    """From 0, faint, to 1, strong."""
    is_best: bool = False


def bars(title: str, values: Sequence[tuple[str, float]], suffix: str = "") -> Markup:
    """Horizontal bars with their names and values.

    >>> "<title>Time</title>" in bars("Time", [("a", 1.0), ("b", 3.0)])
    True
    """
    largest = max((value for _, value in values), default=0.0) or 1.0
    room = WIDTH - _NAMES - 80
    marks = [
        Markup(
            '<text x="{}" y="{}" text-anchor="end">{}</text>'
            '<rect x="{}" y="{}" width="{:.1f}" height="16" style="fill:var(--one)"/>'
            '<text x="{:.1f}" y="{}">{:.3g}{}</text>'
        ).format(
            *(_NAMES - 8, _TOP + i * _BAR + 13, _short(name, 28)),
            *(_NAMES, _TOP + i * _BAR, room * value / largest),
            *(_NAMES + room * value / largest + 6, _TOP + i * _BAR + 13, value, suffix),
        )
        for i, (name, value) in enumerate(values)
    ]
    return svg(title, _TOP + len(values) * _BAR + 8, marks)


def stacked(
    title: str,
    rows: Sequence[tuple[str, Sequence[float]]],
    parts: Sequence[str],
    suffix: str = "",
    *,
    limit: float | None = None,
    rest: str = "",
) -> Markup:
    """Horizontal bars of several parts, with their sums, and a limit if there is one.

    The part that is called as `rest` is drawn faintly and is not in the sums.

    >>> chart = stacked("Memory", [("GPU:0", [1.0, 2.0])], ["weights", "data"], " GiB", limit=8)
    >>> chart.count("<rect"), ">3 GiB<" in chart, "limit 8 GiB" in chart
    (4, True, True)
    """  # noqa: E501
    longest = max([*(sum(values) for _, values in rows), limit or 0.0])
    scale = (WIDTH - _NAMES - 80) / (longest or 1.0)
    top = _TOP + 18 * -(-len(parts) // _ACROSS)
    colours = [
        "--rule" if part == rest else _PARTS[number % len(_PARTS)]
        for number, part in enumerate(parts)
    ]
    marks = [_name_of_part(number, p, colours) for number, p in enumerate(parts)]
    for i, (name, values) in enumerate(rows):
        y, x = top + i * _BAR, float(_NAMES)
        total = sum(v for part, v in zip(parts, values, strict=True) if part != rest)
        marks.append(
            Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(
                _NAMES - 8, y + 13, _short(name, 28)
            )
        )
        for number, value in enumerate(values):
            marks.append(
                Markup(
                    '<rect x="{:.1f}" y="{}" width="{:.1f}" height="16" '
                    'style="fill:var({})"><title>{}: {:.3g}{}</title></rect>'
                ).format(
                    *(x, y, scale * value, colours[number]),
                    *(parts[number], value, suffix),
                )
            )
            x += scale * value
        marks.append(
            Markup('<text x="{:.1f}" y="{}">{:.3g}{}</text>').format(
                x + 6, y + 13, total, suffix
            )
        )
    height = top + len(rows) * _BAR
    if limit is not None:
        x = _NAMES + scale * limit
        marks.append(
            Markup(
                '<line x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}" '
                'stroke-dasharray="4 3" style="stroke:var(--text)"/>'
                '<text x="{0:.1f}" y="{3}" text-anchor="end">limit {4:.3g}{5}</text>'
            ).format(x, top - 6, height, height + 12, limit, suffix)
        )
        height += 16
    return svg(title, height + 4, marks)


def plot(
    title: str, series: Sequence[Series], across: str, up: str, height: int = 280
) -> Markup:
    """Points and lines over two axes; what is not finite is left out.

    >>> chart = plot("Loss", [Series("a", [(0, 1.0), (1, 2.0)], True)], "step", "loss")
    >>> chart.count("<polyline")
    1
    """
    drawn = [(s, [p for p in s.points if all(map(math.isfinite, p))]) for s in series]
    everything = [p for _, points in drawn for p in points]
    low_x, high_x = _bounds([x for x, _ in everything])
    low_y, high_y = _bounds([y for _, y in everything])
    wide, tall = WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        return (
            _LEFT + wide * (x - low_x) / (high_x - low_x),
            _TOP + tall * (high_y - y) / (high_y - low_y),
        )

    marks = [_frame(low_y, high_y, tall), _below(low_x, high_x, across, height, up)]
    for number, (each, points) in enumerate(drawn):
        colour = _SERIES[number % len(_SERIES)]
        placed = [place(point) for point in points]
        marks.append(
            _line(placed, colour) if each.is_line else _dots(placed, points, colour)
        )
        marks.append(_legend(number, each.name, colour))
    return svg(title, height, marks)


def parallel(title: str, axes: Sequence[Axis], paths: Sequence[Path]) -> Markup:
    """Lines through parallel axes: what good points have in common.

    >>> axes = [Axis("lr", [(0, "0"), (1, "1")]), Axis("loss", [(0, "2"), (1, "3")])]
    >>> parallel("Trials", axes, [Path("0", [0.5, 1.0], 1.0)]).count("<polyline")
    1
    """
    tall, foot = 250, 24
    step = (WIDTH - 2 * _LEFT) / max(1, len(axes) - 1)
    marks = []
    for path in sorted(paths, key=lambda p: (p.is_best, p.weight)):
        placed = [
            (_LEFT + i * step, _TOP + 20 + tall * (1 - place))
            for i, place in enumerate(path.places)
            if place is not None
        ]
        colour = "--best" if path.is_best else "--one"
        width = 2.5 if path.is_best else 1.2
        opacity = 1.0 if path.is_best else 0.12 + 0.6 * path.weight
        marks.append(_line(placed, colour, width, opacity, path.name))
    for i, axis in enumerate(axes):
        x = _LEFT + i * step
        marks.append(
            Markup(
                '<line class="rule" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>'
                '<text x="{0:.1f}" y="{3}" text-anchor="middle">{4}</text>'
            ).format(x, _TOP + 20, _TOP + 20 + tall, _TOP + 6, _short(axis.name, 18))
        )
        marks += [
            Markup('<text class="faint" x="{:.1f}" y="{:.1f}">{}</text>').format(
                x + 4, _TOP + 24 + tall * (1 - place), _short(text, 12)
            )
            for place, text in axis.marks
        ]
    return svg(title, _TOP + 20 + tall + foot, marks)


def svg(title: str, height: float, marks: Sequence[Markup]) -> Markup:
    """A drawing of the full width, with a title that screen readers read."""
    return Markup(
        '<svg role="img" viewBox="0 0 {} {}" xmlns="http://www.w3.org/2000/svg">'
        "<title>{}</title>{}</svg>"
    ).format(WIDTH, height, title, Markup("").join(marks))


def _frame(low: float, high: float, tall: float) -> Markup:
    """Lines at the values of the upright axis."""
    lines = []
    for part in range(5):
        y = _TOP + tall * (1 - part / 4)
        lines.append(
            Markup(
                '<line class="rule" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
                '<text class="faint" x="{}" y="{:.1f}" text-anchor="end">{}</text>'
            ).format(
                *(_LEFT, WIDTH - _RIGHT, y, y),
                *(_LEFT - 6, y + 4, _number(low + (high - low) * part / 4)),
            )
        )
    return Markup("").join(lines)


def _number(value: float) -> str:
    """As people write it, as far as there is room.

    >>> _number(0.08061), _number(29487.3), _number(3e9)
    ('0.0806', '29,487', '3e+09')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _below(low: float, high: float, across: str, height: int, up: str) -> Markup:
    """What the axes mean, and where the lower one begins and ends."""
    y = height - _BOTTOM + 18
    return Markup(
        '<text class="faint" x="{}" y="{}">{:.4g}</text>'
        '<text class="faint" x="{}" y="{}" text-anchor="end">{:.4g}</text>'
        '<text class="faint" x="{}" y="{}" text-anchor="middle">{}</text>'
        '<text class="faint" x="4" y="{}">{}</text>'
    ).format(
        *(_LEFT, y, low, WIDTH - _RIGHT, y, high),
        *((WIDTH + _LEFT) / 2, y, across, _TOP - 14, up),
    )


def _name_of_part(number: int, name: str, colours: Sequence[str]) -> Markup:
    row, column = divmod(number, _ACROSS)
    x, y = column * WIDTH / _ACROSS, 8 + 18 * row
    return Markup(
        '<rect x="{:.1f}" y="{}" width="10" height="10" style="fill:var({})"/>'
        '<text x="{:.1f}" y="{}">{}</text>'
    ).format(x, y, colours[number], x + 15, y + 9, _short(name, 20))


def _legend(number: int, name: str, colour: str) -> Markup:
    x = _LEFT + 130 + 150 * number
    return Markup(
        '<rect x="{}" y="8" width="10" height="10" style="fill:var({})"/>'
        '<text x="{}" y="17">{}</text>'
    ).format(x, colour, x + 15, _short(name, 18))


def _line(
    placed: Sequence[tuple[float, float]],
    colour: str,
    width: float = 2.0,
    opacity: float = 1.0,
    name: str = "",
) -> Markup:
    words = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return Markup(
        '<polyline points="{}" fill="none" stroke-width="{}" stroke-opacity="{:.2f}" '
        'style="stroke:var({})"><title>{}</title></polyline>'
    ).format(words, width, opacity, colour, name)


def _dots(
    placed: Sequence[tuple[float, float]],
    points: Sequence[tuple[float, float]],
    colour: str,
) -> Markup:
    return Markup("").join(
        Markup(
            '<circle cx="{:.1f}" cy="{:.1f}" r="3.5" style="fill:var({})">'
            "<title>{:.6g}: {:.6g}</title></circle>"
        ).format(x, y, colour, *point)
        for (x, y), point in zip(placed, points, strict=True)
    )


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """The least and the most, with room between them."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low, high


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
