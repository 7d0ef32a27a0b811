"""A report in Markdown as one HTML page that holds its figures and styles itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from specdec.errors import InputError

STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
h2 { margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }
li { margin: 0.4rem 0; }
nav { font-size: 0.9rem; }
code { background: #f2f2f2; padding: 0 0.2em; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.8rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; }
svg { display: block; max-width: 100%; height: auto; margin: 1.5rem 0; }
@media print {
  nav { display: none; }
  .table { overflow: visible; }
  table { font-size: 0.45rem; }
  th, td { padding: 0.1rem 0.25rem; }
}
"""


def page(title: str, markdown: str, folder: Path) -> str:
    """The whole page; an image of the text is a file of `folder`, an SVG by matplotlib.

    Raises:
        InputError: a figure is not there.
    """
    parser = MarkdownIt("js-default")  # tables, and no HTML of the text's own
    parser.add_render_rule("image", _image)
    parser.add_render_rule("table_open", lambda *_: '<div class="table"><table>\n')
    parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
    tokens = parser.parse(markdown)
    contents = _contents(tokens)
    body = parser.renderer.render(tokens, parser.options, {"folder": folder})
    first, heading, rest = body.partition("</h1>\n")  # where to go stands below what this is
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        f"{first}{heading}{contents}{rest}</body>\n</html>\n"
    )


def _contents(tokens: Sequence[Token]) -> str:
    """Links to the sections, which are given names for that."""
    links = []
    for token, inline in pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            name = re.sub(r"\W+", "-", inline.content.lower()).strip("-")
            token.attrSet("id", name)
            links.append(f'<a href="#{escape(name)}">{escape(inline.content)}</a>')
    return f"<nav>{' · '.join(links)}</nav>\n" if links else ""


def _image(self: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: dict[str, Any]) -> str:
    """In place of a reference to a file, what is in it."""
    token = tokens[index]
    path = env["folder"] / str(token.attrs["src"])
    try:
        drawing = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); `dvc repro plot` draws it.") from None
    return inlined(drawing, path.stem, self.renderInlineAsText(token.children or [], options, env))


def inlined(drawing: str, name: str, alt: str) -> str:
    """An SVG file as an element of a page: ids with the figure's name before them, for other figures have the same ones."""
    svg = drawing[drawing.index("<svg") :].strip()
    svg = re.sub(r"(?s)\s*<(metadata|title)>.*?</\1>|<!--.*?-->", "", svg)
    svg = re.sub(r'(\bid="|\bhref="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)
