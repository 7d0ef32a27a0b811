"""The page holds all that the report says and shows, and asks nothing of a network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import fake_cells
import pytest
from test_plot import SMALLEST

from pipeline import plot, report, tables
from pipeline.captions import FIGURES
from pipeline.page import inlined, page
from specdec.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("plots/fake")
VOID = ("meta", "br", "hr")  # elements that HTML never closes
FETCHED = ("src", "srcset", "href", "xlink:href", "data", "poster", "action")


class Reader(HTMLParser):
    """Collects what a test asks about, and checks that elements are closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The real stages on made-up cells: report.md and report.html."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("page")
        patch.chdir(root)
        patch.setattr("sys.argv", ["report.py"])
        fake_cells.write(root, SMALLEST)
        tables.main()
        plot.main()
        report.main()
        return tuple((root / FOLDER / name).read_text(encoding="utf-8") for name in ("report.md", "report.html"))


def test_nothing_is_fetched(written: tuple[str, str]) -> None:
    _, html = written
    found = Reader(html)
    assert not {tag for tag, _ in found.elements} & {"script", "link", "img", "iframe", "object", "embed", "base"}
    asked = [(tag, value) for tag, attributes in found.elements for key, value in attributes.items() if key in FETCHED]
    assert asked and all(str(value).startswith("#") for tag, value in asked if tag != "a")
    assert all(re.match("#|https?://", str(value)) for tag, value in asked if tag == "a")
    assert "@import" not in html and not re.findall(r"url\((?!#)", html)


def test_every_reference_within_the_page_has_one_element(written: tuple[str, str]) -> None:
    """Figures share ids: without a name before them a figure would show parts of another."""
    _, html = written
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert {*re.findall(r'href="#([^"]+)"', html), *re.findall(r"url\(#([^)]+)\)", html)} <= set(ids)


def test_every_figure_is_in_the_page_with_its_words(written: tuple[str, str]) -> None:
    markdown, html = written
    drawings = [attributes for tag, attributes in Reader(html).elements if tag == "svg"]
    assert sorted(d["aria-label"] or "" for d in drawings) == sorted(FIGURES.values())
    assert all(d["role"] == "img" for d in drawings)
    assert sorted(re.findall(r"\]\((\w+)\.svg\)", markdown)) == sorted(FIGURES)


def test_tables_and_sections_are_those_of_the_text(written: tuple[str, str]) -> None:
    markdown, html = written
    tags = [tag for tag, _ in Reader(html).elements]
    assert tags.count("table") == len(re.findall(r"(?m)^\| ---", markdown)) > 10
    for level in (1, 2, 3):
        assert tags.count(f"h{level}") == len(re.findall(rf"(?m)^{'#' * level} ", markdown))
    assert "table:begin" not in html and "Imaginary CPU 9000" in html
    assert html.index("Is it lossless here?") < html.index("<table>")


def test_the_committed_report_is_that_of_the_committed_tables_and_figures() -> None:
    folder = ROOT / "plots" / "embedded"
    text = report.report("embedded", folder)
    assert (folder / "report.md").read_text(encoding="utf-8") == text
    assert (folder / "report.html").read_text(encoding="utf-8") == report.as_page("embedded", text, folder)


def test_text_is_no_markup(tmp_path: Path) -> None:
    html = page("a < b", "# a & <script>x</script>\n\n| c |\n| --- |\n| <b> |\n", tmp_path)
    assert "<script>" not in html and "<b>" not in html and "<title>a &lt; b</title>" in html


def test_a_missing_figure_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"speedup\.svg cannot be read .*; `dvc repro plot` draws it"):
        page("t", "![x](speedup.svg)", tmp_path)


def test_ids_get_the_figures_name() -> None:
    drawing = (
        '<?xml version="1.0"?>\n<svg width="1"><metadata><a/></metadata><title>T</title><!-- c --><path id="p"/>'
        '<use xlink:href="#p" clip-path="url(#p)"/></svg>\n'
    )
    assert inlined(drawing, "one", 'say "x"') == (
        '<svg role="img" aria-label="say &quot;x&quot;" width="1"><path id="one-p"/>'
        '<use xlink:href="#one-p" clip-path="url(#one-p)"/></svg>'
    )
