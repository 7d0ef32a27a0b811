"""The commands that README.md and the notes give to their readers, as their Markdown has them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from dvc.cli import parse_args
from markdown_it import MarkdownIt
from sync_deps import ROOT

PROGRAMS = {"make", "dvc", "python", "python3", "pip", "git", "sed", "rm", "pytest", "ruff", "mypy", "."}
COMPLETE = {"pytest", "mypy"}  # a command without an argument too; `dvc` in a sentence is but a name


def commands(text: str) -> list[str]:
    """Each command once, in the order of the text: those of blocks (bash, sh or no language), of sentences and of tables."""
    return list(dict.fromkeys(_commands(text)))


def _commands(text: str) -> Iterator[str]:
    for token in MarkdownIt("js-default").parse(text):
        if token.type == "fence" and token.info.strip() in ("", "bash", "sh"):
            for line in token.content.splitlines():
                yield from _parts(re.split(r"\s#\s", f" {line}")[0])
        for child in token.children or []:
            if child.type == "code_inline" and _is_command(child.content):
                yield from _parts(child.content)


def _is_command(code: str) -> bool:
    return program(code) in PROGRAMS and (" " in code or code in COMPLETE)


def _parts(line: str) -> Iterator[str]:
    """
    Raises:
        ValueError: one of them is no command that is known here. Blocks with anything else in them have a language, be it `text`.
    """
    for part in filter(None, map(str.strip, line.split("&&"))):
        if program(part) not in PROGRAMS:
            raise ValueError(f"{part!r} is no command that is known; a block with anything else in it is ```text")
        yield part


def program(command: str) -> str:
    """Its first word, behind assignments to variables; empty if there is none."""
    return next(iter(_words(command.split())), "")


def _words(words: list[str]) -> list[str]:
    return [word for word in words if not re.match(r"[A-Z_]+=", word)]


def missing(command: str) -> list[str]:
    """What a command names that is not in this repository: a target, a script or its option, a list of requirements.

    Raises:
        DvcParserError: DVC has no such command or option.
    """
    name, *arguments = _words(shlex.split(command))
    if name == "make":
        targets = re.findall(r"(?m)^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
        return [word for word in arguments if word not in targets]
    if name == "dvc":
        parse_args(arguments)
    if name == "pip":
        return [word for word in arguments if word.endswith(".txt") and not (ROOT / word).is_file()]
    if name == "python" and not arguments[0].startswith("-"):
        script = ROOT / arguments[0]
        if not script.is_file():
            return [arguments[0]]
        known = script.read_text(encoding="utf-8") + (ROOT / "pipeline" / "options.py").read_text(encoding="utf-8")
        return [word for word in arguments[1:] if word.startswith("--") and f'"{word}"' not in known]
    return []
