"""Writes a report: each figure as a PNG, and one self-contained HTML page with all figures."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One figure of the report.

    Attributes:
        name: file name of the PNG, without suffix.
        title: heading above the figure.
        reading: one sentence on how to read the figure.
        alt: alternative text for screen readers.
        figure: the matplotlib figure.
        table: rows of the table below the figure; the first is the header.
    """

    name: str
    title: str
    reading: str
    alt: str
    figure: "Figure"
    table: tuple[tuple[str, ...], ...] = ()


def write_report(panels: Iterable[Panel], out: Path, title: str) -> Path:
    """Writes each panel as a PNG and all of them to `report.html`; returns the path of the page.

    Args:
        panels: figures of the report; a generator keeps one at a time in memory.
        out: a folder; created if it does not exist.
        title: title of the page.
    """
    out.mkdir(parents=True, exist_ok=True)
    sections = []
    for panel in panels:
        held = BytesIO()
        panel.figure.savefig(held, format="png", dpi=150)
        with replacing(out / f"{panel.name}.png") as temporary:
            temporary.write_bytes(held.getvalue())
        sections.append(_section(panel, base64.b64encode(held.getvalue()).decode()))
    page = out / "report.html"
    with replacing(page) as temporary:
        temporary.write_text(PAGE.format(title=escape(title), body="\n".join(sections)), encoding="utf-8")
    return page


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 1rem; max-width: 52rem; font: 1rem/1.5 system-ui, sans-serif; color: #1f2933; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.5rem 0 0.25rem; overflow-wrap: anywhere; }}
p {{ margin: 0.25rem 0 0.75rem; color: #52606d; }}
img {{ display: block; max-width: 100%; height: auto; margin: 0 auto; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; margin-top: 0.75rem; }}
th, td {{ white-space: nowrap; text-align: right; padding: 0.2rem 0.6rem; border-bottom: 1px solid #e4e7eb; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def _section(panel: Panel, data: str) -> str:
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(panel.alt)}">'
    text = f"<section>\n<h2>{escape(panel.title)}</h2>\n<p>{escape(panel.reading)}</p>\n{image}\n"
    if panel.table:
        lines = [
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for tag, row in zip(("th", *("td",) * len(panel.table)), panel.table, strict=False)
        ]
        text += "<div><table>\n" + "\n".join(lines) + "\n</table></div>\n"
    return text + "</section>"
