"""Writes a report: each figure as a PNG, and one self-contained HTML page with all figures."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import replacing, write_failure

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
        image: name of the image that the figure is about, if the report has several.
    """

    name: str
    title: str
    reading: str
    alt: str
    figure: "Figure"
    table: tuple[tuple[str, ...], ...] = ()
    image: str = ""


def write_report(panels: Iterable[Panel], out: Path, title: str) -> Path:
    """Writes each panel as a PNG and all of them to `report.html`, after a table of contents; returns its path.

    Args:
        panels: figures of the report; a generator keeps one at a time in memory.
        out: a folder; created if it does not exist.
        title: title of the page.

    Raises:
        OSError: the folder cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{out} cannot be created: {write_failure(error)}; give another folder") from error
    entries = []
    sections = []
    for panel in panels:
        buffer = BytesIO()
        panel.figure.savefig(buffer, format="png", dpi=DPI)
        with replacing(out / f"{panel.name}.png") as temporary:
            temporary.write_bytes(buffer.getvalue())
        entries.append((panel.image, panel.name, panel.title))
        sections.append(_section(panel, base64.b64encode(buffer.getvalue()).decode()))
    page = out / "report.html"
    with replacing(page) as temporary:
        temporary.write_text(
            PAGE.format(title=escape(title), contents=_contents(entries), body="\n".join(sections)), encoding="utf-8"
        )
    return page


DPI = 200  # of the files
SCREEN = 118  # pixels per inch on the page, where 10 points are 16 pixels as in the text; a phone shows 85

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
h2 small {{ font-weight: normal; color: #52606d; }}
p {{ margin: 0.25rem 0 0.75rem; color: #52606d; }}
a {{ color: #2f6fde; }}
nav ul {{ margin: 0; padding-left: 1.2rem; }}
nav li {{ padding: 0.2rem 0; overflow-wrap: anywhere; }}
img {{ display: block; max-width: 100%; height: auto; margin: 0 auto; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; margin-top: 0.75rem; }}
th, td {{ text-align: right; vertical-align: bottom; padding: 0.2rem 0.3rem; border-bottom: 1px solid #e4e7eb; }}
td + td {{ white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
</head>
<body>
<h1>{title}</h1>
{contents}
{body}
</body>
</html>
"""


def _contents(entries: list[tuple[str, str, str]]) -> str:
    """Links to the panels, from (image, name, title): one line each, or one line for all panels of an image."""
    lines = []
    for image, group in groupby(entries, key=lambda entry: entry[0]):
        if image:
            links = (f'<a href="#{name}">{name.partition("-")[2]}</a>' for _, name, _ in group)
            lines.append(f"<li>{escape(image)}: {', '.join(links)}</li>")
        else:
            lines += [f'<li><a href="#{name}">{escape(title)}</a></li>' for _, name, title in group]
    return "\n".join(['<nav aria-label="Contents"><ul>', *lines, "</ul></nav>"])


def _section(panel: Panel, data: str) -> str:
    width = round(SCREEN * panel.figure.get_figwidth())
    image = f'<img src="data:image/png;base64,{data}" alt="{escape(panel.alt)}" width="{width}">'
    about = "" if panel.title.startswith(panel.image) else f" <small>{escape(panel.image)}</small>"
    text = f'<section id="{panel.name}">\n<h2>{escape(panel.title)}{about}</h2>\n'
    text += f"<p>{escape(panel.reading)}</p>\n{image}\n"
    if panel.table:
        lines = [
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for tag, row in zip(("th", *("td",) * len(panel.table)), panel.table, strict=False)
        ]
        text += "<div><table>\n" + "\n".join(lines) + "\n</table></div>\n"
    return text + "</section>"
