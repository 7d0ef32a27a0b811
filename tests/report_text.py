"""What tests read in a report: the part under a heading, and the rows of a table."""

from __future__ import annotations


def section(whole: str, heading: str) -> str:
    return whole.split(f" {heading}\n")[1].split("\n#")[0]


def table(markdown: str) -> list[dict[str, str]]:
    """The rows of the first table of a text, by heading."""
    block = markdown[markdown.index("|") :].split("\n\n")[0]
    lines = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in block.splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
