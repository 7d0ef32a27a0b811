"""The notes name the test behind every claim; here those names are checked."""

import ast
import re

import pytest
from sync_deps import ROOT

NOTES = sorted((ROOT / "notes").glob("*.md"))
DERIVATION = ROOT / "notes" / "derivation-acceptance-sampling.md"


def all_tests():
    """The names of all test functions of the suite."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").glob("test_*.py")]
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.name)
def test_every_test_that_a_note_names_exists(path):
    named = set(re.findall(r"\btest_\w+(?!\w*\.py)", re.sub(r"tests/\w+\.py", "", path.read_text(encoding="utf-8"))))
    assert named - all_tests() == set()


def test_every_claim_names_a_test():
    text = DERIVATION.read_text(encoding="utf-8")
    claims = re.split(r"\*\*Claim (\d+)\.\*\*", text)[1:]
    numbers, bodies = claims[::2], claims[1::2]
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1)) and len(numbers) >= 15
    for number, body in zip(numbers, bodies, strict=True):
        assert re.search(r"Tests?: `test_\w+`", body.split("\n## ")[0]), f"claim {number}"
