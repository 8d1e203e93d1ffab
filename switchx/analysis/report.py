# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that needs nothing else: words, plots and tables in sections."""

import base64
import dataclasses
import html
import io
from collections.abc import Mapping, Sequence

from switchx.analysis.plots import Figure, write_svg

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 66em; margin: 2em auto; padding: 0 1.5em; }}
h1 {{ font-size: 1.5em; }}
h2 {{ font-size: 1.15em; margin: 2.2em 0 .3em; }}
p {{ max-width: 46em; margin: .3em 0 .8em; }}
img {{ display: block; max-width: 100%; height: auto; margin: .6em 0; }}
table {{ border-collapse: collapse; margin: .6em 0; font-size: .9em; }}
th, td {{ padding: .15em .9em .15em 0; text-align: left; vertical-align: top; }}
th {{ border-bottom: 1px solid #888; font-weight: 600; }}
td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
summary {{ cursor: pointer; }}
code {{ background: #f0f0f0; padding: 0 .25em; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts and numbers; numbers stand to the right.

    Attributes:
        title: the table is folded under it; without one it is open.
        codes: columns whose items, separated by newlines, are shown as code.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]
    title: str = ""
    codes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Section:
    """One thing to look at: what it is, how to read it, the pictures and the tables.

    A notebook shows it as the page does.
    """

    title: str
    text: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()

    def _repr_html_(self) -> str:
        parts = [f"<h2>{html.escape(self.title)}</h2>", f"<p>{html.escape(self.text)}</p>"]
        parts += [_image(figure, self.title) for figure in self.figures]
        parts += [_table(table) for table in self.tables]
        return "\n".join(parts)


def page(title: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
        facts: about the run, shown first.
    """
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    body = [f"<table>{rows}</table>", *(section._repr_html_() for section in sections)]
    return PAGE.format(title=html.escape(title), body="\n".join(body))


def _image(figure: Figure, title: str) -> str:
    # An image of its own: the names inside of one SVG never meet those of another.
    content = io.BytesIO()
    write_svg(figure, content)
    data = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'


def _table(table: Table) -> str:
    is_number = [all(isinstance(row[i], float | int) for row in table.rows)
                 for i in range(len(table.columns))]  # fmt: skip

    def cell(tag: str, i: int, value) -> str:
        kind = ' class="number"' if is_number[i] else ""
        if tag == "td" and table.columns[i] in table.codes:
            items = [f"<code>{html.escape(item)}</code>" for item in value.split("\n") if item]
            return f"<td>{' '.join(items)}</td>"
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", i, name) for i, name in enumerate(table.columns))
    rows = (
        "<tr>" + "".join(cell("td", i, value) for i, value in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    text = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    if table.title:
        text = f"<details><summary>{html.escape(table.title)}</summary>{text}</details>"
    return text
