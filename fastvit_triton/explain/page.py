"""Writes a report: each figure as a PNG, and one self-contained HTML page with all figures."""

import base64
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..files import replacing, write_failure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """One figure of the report."""

    name: str  # file name of the PNG, without suffix
    title: str  # heading above the figure
    reading: str  # one sentence on how to read the figure
    alt: str  # alternative text for screen readers
    figure: "Figure"  # the matplotlib figure
    table: tuple[tuple[str, ...], ...] = ()  # rows of the table below the figure; the first is the header
    image: str = ""  # name of the image that the figure is about, if the report has several
    folded: bool = False  # shown on the page only when the reader opens its last part, "Diagnostics"


class Absent(NamedTuple):
    """A figure that is left out, because it would show nothing."""

    title: str  # the figure's
    reason: str  # why, as words after "because"


def write_report(panels: Iterable[Panel | Absent], out: Path, title: str) -> Path:
    """Writes each panel as a PNG, and all to `report.html`: first those that are not folded; returns its path.

    An earlier report there is replaced; of its figures, files that were changed stay. Nothing is written before all
    panels are drawn.

    Args:
        panels: figures of the report, and what is left out; a generator keeps one at a time in memory.
        out: a folder that is empty or holds an earlier report; created if it does not exist.
        title: title of the page.

    Raises:
        ValueError: the folder holds other files and no report, or a file of the name of a figure that is not the
            earlier report's.
        OSError: the folder cannot be created.
    """
    holds_report(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{out} cannot be created: {write_failure(error)}; give another folder") from error
    page = out / "report.html"
    earlier = _figures_of(page)
    drawn: dict[str, bytes] = {}
    entries = []
    sections: dict[bool, list[str]] = {False: [], True: []}
    absent = []
    for panel in panels:
        if isinstance(panel, Absent):
            absent.append(panel)
            continue
        buffer = BytesIO()
        panel.figure.savefig(buffer, format="png", dpi=DPI)
        drawn[panel.name] = buffer.getvalue()
        if panel.folded:
            entries.append((panel.image, panel.name, panel.title))
        sections[panel.folded].append(_section(panel, base64.b64encode(buffer.getvalue()).decode()))
    body = sections[False]
    if sections[True]:
        body += ["<details>\n<summary>Diagnostics</summary>", _contents(entries), *sections[True], "</details>"]
    body += [f"<p>{escape(line)}.</p>" for line in sentences(absent)]
    for name, data in drawn.items():
        if not _is_one_of(out / f"{name}.png", (data, earlier.get(name))):
            raise ValueError(f"{out / name}.png is not of the report in this folder; move it, or give another folder")
    for name, data in earlier.items():
        if _is_one_of(out / f"{name}.png", (data,)):
            (out / f"{name}.png").unlink(missing_ok=True)
    with replacing(page) as temporary:  # first, so that it lists the figures if one cannot be written
        temporary.write_text(PAGE.format(mark=MARK, title=escape(title), body="\n".join(body)), encoding="utf-8")
    for name, data in drawn.items():
        with replacing(out / f"{name}.png") as temporary:
            temporary.write_bytes(data)
    return page


def holds_report(out: Path, name: str = "out") -> bool:
    """True if a folder holds a report, False if it is empty or absent; ValueError if it holds other files only."""
    held = sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) if out.is_dir() else []
    if held and MARK not in _text_of(out / "report.html"):
        what = f"{', '.join(held[:3])}{' and more' * (len(held) > 3)}, but no report of explain"
        raise ValueError(f"{name} {out} holds {what}; give a new or empty folder, or that of an earlier report")
    return bool(held)


def _is_one_of(path: Path, contents: Iterable[bytes | None]) -> bool:
    """True if there is no such file, or if it has one of these contents."""
    return not os.path.lexists(path) or (path.is_file() and path.read_bytes() in contents)


def _text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""


def _figures_of(page: Path) -> dict[str, bytes]:
    """Names of the figures of an earlier report and their PNGs; empty if there is none."""
    pattern = r'<section id="([\w-]+)">.*?src="data:image/png;base64,([^"]+)"'
    return {name: base64.b64decode(data) for name, data in re.findall(pattern, _text_of(page), re.DOTALL)}


def sentences(absent: Iterable[Absent]) -> list[str]:
    """What is left out, one line for each reason."""
    reasons: dict[str, dict[str, None]] = {}
    for figure in absent:
        reasons.setdefault(figure.reason, {})[figure.title] = None
    return [f"left out, because {reason}: {'; '.join(titles)}" for reason, titles in reasons.items()]


DPI = 200  # of the files
MARK = '<meta name="generator" content="fastvit_triton.explain">'  # of a report
SCREEN = 118  # pixels per inch on the page, where 10 points are 16 pixels as in the text; a phone shows 85

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{mark}
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 1rem; max-width: 52rem; font: 1rem/1.5 system-ui, sans-serif; color: #1f2933; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.5rem 0 0.25rem; overflow-wrap: anywhere; }}
summary {{ font-size: 1.15rem; font-weight: bold; margin: 2.5rem 0 0.5rem; cursor: pointer; }}
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
{body}
</body>
</html>
"""


def _contents(entries: list[tuple[str, str, str]]) -> str:
    """Links to the folded panels, from (image, name, title): one line each, or one line for all panels of an image."""
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
