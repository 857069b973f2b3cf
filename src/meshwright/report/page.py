"""A page that is one file: no script, no request, light and dark, fit for paper.

Everything is text until it is marked as HTML, and text is escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1d2329; --faint: #65707a;
  --rule: #d5dade; --one: #1f6fb4; --two: #c4571b; --best: #1f7a3d;
  --three: #7a4fb0; --four: #0f8a86; --five: #94801a; }
@media (prefers-color-scheme: dark) { :root { --back: #15191d; --text: #e4e8eb;
  --faint: #98a3ac; --rule: #3a434b; --one: #6cb4f0; --two: #f0965a;
  --best: #67c987; --three: #b294e0; --four: #4cc7c2; --five: #d9c65a; } }
body { font: 16px/1.5 system-ui, sans-serif; background: var(--back);
  color: var(--text); max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
p.under, caption, summary { color: var(--faint); }
figure { margin: 0; } svg { width: 100%; height: auto; font-size: 12px; }
svg text { fill: var(--text); paint-order: stroke; stroke: var(--back);
  stroke-width: 3px; } svg .faint { fill: var(--faint); }
svg .rule { stroke: var(--rule); fill: none; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; } th, td { padding: .2rem .8rem .2rem 0; text-align: left;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
td { max-width: 24rem; overflow-wrap: break-word; }
pre { overflow-x: auto; border: 1px solid var(--rule); padding: .6rem; }
@media print { body { max-width: none; } details > * { display: block; } }
"""

_PAGE = Markup("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1>
<p class="under">{under}</p></header>
<main>
{sections}
</main>
</body>
</html>
""")


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page."""

    title: str
    parts: tuple[Markup, ...]


def page(title: str, under: str, sections: Sequence[Section]) -> str:
    """A whole page.

    Arguments:
        title: What it is of.
        under: A line beneath the title.
        sections: In the order in which they stand.

    >>> "<title>&lt;b&gt;</title>" in page("<b>", "", [])
    True
    """
    body = Markup("\n").join(
        Markup("<section>\n<h2>{}</h2>\n{}\n</section>").format(
            section.title, Markup("\n").join(section.parts)
        )
        for section in sections
    )
    style = Markup(_STYLE)  # noqa: S704 (ours)
    return str(_PAGE.format(title=title, under=under, style=style, sections=body))


def paragraph(text: str) -> Markup:
    """A paragraph of text."""
    return Markup("<p>{}</p>").format(text)


def command(text: str) -> Markup:
    """Something to type."""
    return Markup("<pre><code>{}</code></pre>").format(text)


def facts(values: Mapping[str, Any]) -> Markup:
    """Names and what they stand for, a row each."""
    rows = Markup("").join(
        Markup('<tr><th scope="row">{}</th><td>{}</td></tr>').format(name, value)
        for name, value in values.items()
    )
    return Markup('<div class="wide"><table><tbody>{}</tbody></table></div>').format(
        rows
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = ""
) -> Markup:
    """A table with a heading for every column."""
    heads = Markup("").join(Markup('<th scope="col">{}</th>').format(h) for h in head)
    body = Markup("\n").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(Markup("<td>{}</td>").format(cell) for cell in row)
        )
        for row in rows
    )
    return Markup(
        '<div class="wide"><table><caption>{}</caption>'
        "<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>"
    ).format(caption, heads, body)


def folded(summary: str, inside: Markup) -> Markup:
    """What is long, behind a line that opens it."""
    return Markup("<details><summary>{}</summary>{}</details>").format(summary, inside)


def figure(chart: Markup, beneath: Markup, *, is_open: bool = False) -> Markup:
    """A chart, and its figures for who cannot see it, or wants to know exactly."""
    opened = Markup(" open") if is_open else Markup("")
    return Markup(
        "<figure>{}<details{}><summary>The figures</summary>{}</details></figure>"
    ).format(chart, opened, beneath)
