"""Charts show every figure, whatever it is, and leave nothing unescaped."""

import math
import re
from xml.etree import ElementTree

from meshwright.report.charts import Axis, Path, Series, bars, parallel, plot

SVG = "{http://www.w3.org/2000/svg}"


def parse(chart: str) -> ElementTree.Element:
    found = ElementTree.fromstring(chart)  # noqa: S314 (ours)
    assert found.get("role") == "img"
    assert found[0].tag == f"{SVG}title", "a screen reader reads it first"
    return found


def numbers(element: ElementTree.Element, name: str) -> list[float]:
    return [float(each) for each in re.split("[ ,]", element.get(name, ""))]


def test_bars_are_as_long_as_their_values() -> None:
    chart = parse(bars("Cost", [("a", 1.0), ("b", 4.0), ("none", 0.0)], " $"))
    widths = [float(r.get("width", "")) for r in chart.iter(f"{SVG}rect")]
    assert widths[1] == 4 * widths[0] > 0
    assert widths[2] == 0
    assert "4 $" in [t.text for t in chart.iter(f"{SVG}text")]


def test_points_lie_where_their_values_are() -> None:
    points = [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)]
    chart = parse(plot("Loss", [Series("run", points, True)], "step", "loss"))
    (line,) = chart.iter(f"{SVG}polyline")
    places = numbers(line, "points")
    xs, ys = places[::2], places[1::2]
    assert xs[1] - xs[0] == xs[2] - xs[1] > 0
    assert ys[1] < ys[2] < ys[0], "more is further up"
    assert math.isclose(ys[0] - ys[2], ys[2] - ys[1], abs_tol=0.11)


def test_what_is_not_finite_or_all_alike_is_drawn_all_the_same() -> None:
    odd = [(0.0, math.nan), (1.0, math.inf), (2.0, 5.0), (3.0, 5.0)]
    chart = parse(plot("Loss", [Series("run", odd)], "step", "loss"))
    assert len([*chart.iter(f"{SVG}circle")]) == 2
    assert "nan" not in ElementTree.tostring(chart, encoding="unicode")
    for empty in (bars("x", []), plot("x", [], "a", "b"), parallel("x", [], [])):
        parse(empty)


def test_the_best_path_is_on_top_and_gaps_are_left_out() -> None:
    axes = [Axis(n, [(0, "low"), (1, "high")]) for n in ("a", "b", "c")]
    best = Path("best", [0.0, 1.0, 0.5], 1.0, is_best=True)
    other = Path("other", [1.0, None, 0.0], 0.3)
    lines = [*parse(parallel("Trials", axes, [best, other])).iter(f"{SVG}polyline")]
    assert [line[0].text for line in lines] == ["other", "best"]
    assert [len(numbers(line, "points")) for line in lines] == [4, 6]


def test_names_are_text() -> None:
    name = '<script>alert("&")</script>'
    everything = (
        bars(name, [(name, 1.0)], name)
        + plot(name, [Series(name, [(0, 0)], True)], name, name)
        + parallel(name, [Axis(name, [(0, name)])], [Path(name, [0.5], 1.0)])
    )
    assert "<script" not in everything
    assert "&lt;script&gt;" in everything
