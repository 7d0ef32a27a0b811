"""Results are written whole or not at all, in one form, and read with a sentence that says what to do."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import cells
from pipeline.cli import run
from specdec.errors import InputError

ROOT = Path(__file__).resolve().parents[1]


def test_equal_records_give_equal_bytes(tmp_path):
    cells.write_json(tmp_path / "new" / "a.json", {"b": 0.1, "a": [1, None]})
    cells.write_json(tmp_path / "b.json", {"a": [1, None], "b": 0.1})
    text = (tmp_path / "new" / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text() == '{\n "a": [\n  1,\n  null\n ],\n "b": 0.1\n}\n'
    assert cells.read_json(tmp_path / "b.json") == {"a": [1, None], "b": 0.1}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("record", "key"),
    [
        (lambda value: {"a": 1, "alpha": value}, "alpha"),
        (lambda value: {"per_prompt": [{"x": 0}, {"x": value}]}, r"per_prompt\[1\].x"),
        (lambda value: {"samples": (0.0, value)}, r"samples\[1\]"),
    ],
)
def test_a19_numbers_that_json_lacks_are_refused_by_name(tmp_path, value, record, key):
    path = tmp_path / "cell.json"
    path.write_text("as it was")
    with pytest.raises(InputError, match=f"cell.json: {key} is {value}; allowed: finite numbers, or null"):
        cells.write_json(path, record(value))
    assert path.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["cell.json"]


def test_a18_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "cell.json"
    path.write_text("as it was")

    def full_disk(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(InputError, match=r"cell.json cannot be written .*No space"):
        cells.write_json(path, {"a": 1})
    assert path.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["cell.json"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on Windows")
@pytest.mark.parametrize("old", [None, '{"old": 1}'])
def test_a18_kill_in_the_middle_of_writing(tmp_path, old):
    """The process is killed after all bytes are written and before the rename: under the final name nothing has changed."""
    path = tmp_path / "cell.json"
    if old:
        path.write_text(old)
    program = (
        "import os, sys, time\n"
        "from pipeline import cells\n"
        "os.fsync = lambda descriptor: time.sleep(60)\n"
        "cells.write_json(sys.argv[1], {'new': list(range(1000))})\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + 30
        while not any(file.suffix == ".tmp" and file.stat().st_size > 5000 for file in tmp_path.iterdir()):
            assert child.poll() is None and time.monotonic() < deadline, (
                "the child never got to the middle of its write"
            )
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
    assert (path.read_text() if path.exists() else None) == old
    cells.write_json(path, {"new": 1})  # what the killed one left behind is in nobody's way
    assert cells.read_json(path) == {"new": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("", "is not valid JSON"),
        ('{"a": 1', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        ("[1]", "holds no JSON object"),
    ],
)
def test_reading_a_bad_cell_says_how_to_get_it_back(tmp_path, content, message):
    path = tmp_path / "cell.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        cells.read_json(path)
    assert message in str(caught.value) and f"`git checkout {path}`" in str(caught.value)
    assert "`dvc repro`" in str(caught.value)


def test_temperatures_name_files_as_dvc_does():
    assert cells.toy_temperature(1.0) == cells.toy_temperature(1) == Path("metrics/toy/temperature/1.0.json")
    assert cells.sweep_temperature("s", "p", 0.3) == Path("metrics/sweep_temperature/s/p/0.3.json")


def fail(error):
    def main():
        raise error

    return main


def test_command_lines_print_one_sentence_for_bad_input_and_keep_other_tracebacks(capsys):
    with pytest.raises(SystemExit) as caught:
        run(fail(InputError("k is -1; allowed: 1 and up.")))
    assert caught.value.code == 1
    assert tuple(capsys.readouterr()) == ("", "error: k is -1; allowed: 1 and up.\n")
    with pytest.raises(ZeroDivisionError):
        run(fail(ZeroDivisionError()))
    with pytest.raises(SystemExit) as caught:
        run(lambda: 3)
    assert caught.value.code == 3
    with pytest.raises(SystemExit) as caught:
        run(lambda: None)
    assert not caught.value.code


def test_records_hold_plain_values_only(tmp_path):
    with pytest.raises(TypeError):
        cells.write_json(tmp_path / "a.json", {"path": Path("x")})
    assert os.listdir(tmp_path) == []
