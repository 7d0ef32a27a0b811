"""Text that a script writes into a file that people write, between two lines of markers."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline import cells
from specdec.errors import InputError


def fill(path: Path, begin: str, end: str, text: str) -> None:
    """Put `text` between the two markers, if it is not there already.

    Raises:
        InputError: there is no such file, it is not UTF-8, or it has not exactly one pair of markers.
    """
    try:
        whole = path.read_bytes().decode("utf-8") if path.exists() else ""
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}).") from None
    old = whole.replace("\r\n", "\n")
    match = re.fullmatch(f"(.*{begin}\n).*({end}.*)", old, flags=re.DOTALL)
    if match is None or old.count(begin) != 1 or old.count(end) != 1:
        raise InputError(f"{path} needs the lines {begin} and {end}, once each and in this order, for the results.")
    new = f"{match[1]}{text}\n{match[2]}"
    if new != old:  # the file keeps its line ends, and a link stays one
        cells.write_text(path.resolve(), new.replace("\n", "\r\n") if old != whole else new)
