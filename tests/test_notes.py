"""The notes name the test behind every claim; here those names are checked."""

import ast
import re

import pandas as pd
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


VALUES = [ROOT / "notes" / name for name in ("gptq.md", "awq.md", "quantised-drafts.md", "cpu.md")]
NUMBER = r"([+−]?\d+(?:\.\d+)?)"
WITH_INTERVAL = re.compile(rf"{NUMBER}\s\[{NUMBER},\s{NUMBER}\]")


def measured():
    """Every value with an interval in the committed tables."""
    for path in sorted((ROOT / "plots").glob("*/*.csv")):
        table = pd.read_csv(path)
        for key in [name.removesuffix("_lo") for name in table if name.endswith("_lo")]:
            triples = table[[key, f"{key}_lo", f"{key}_hi"]].dropna()
            yield from triples.itertuples(index=False, name=None)


def test_values_with_an_interval_in_the_notes_are_measured_ones():
    """As they are, in points or in milliseconds; a loss may be written as a positive number."""
    found = [texts for path in VALUES for texts in WITH_INTERVAL.findall(path.read_text(encoding="utf-8"))]
    assert len(found) > 50
    values = list(measured())
    for texts in found:
        digits = len(texts[0].partition(".")[2])
        wanted = tuple(float(text.replace("−", "-")) for text in texts)
        spellings = (
            tuple(
                round(scale * value, digits) for value in (triple if scale > 0 else (triple[0], triple[2], triple[1]))
            )
            for triple in values
            for scale in (1, 100, -100, 1000)
        )
        assert wanted in spellings, f"{texts} is no measured value"


def test_our_perplexities_are_those_of_the_cells():
    table = pd.read_csv(ROOT / "plots" / "quantized" / "quantized_alpha.csv")
    judged = table[(table["head"] == "out") & (table["temperature"] == 1)].set_index("variant")
    text = (ROOT / "notes" / "gptq.md").read_text(encoding="utf-8")
    before, rows = re.search(
        r"(?s)\| ours \(unrounded: (\S+)\) \| RTN \| GPTQ \| AWQ \|\n\|[-|]+\n(.*?)\n\n", text
    ).groups()
    assert float(before) == round(judged["perplexity_unquantized"].iloc[0], 1)
    for line in rows.splitlines():
        bits, group, *values = re.fullmatch(
            r"\| (\d) bits, (per channel|groups of \d+) \| (\S+) \| (\S+) \| (\S+) \|", line
        ).groups()
        name = "row" if group == "per channel" else f"g{group.split()[-1]}"
        found = [judged.loc[f"w{bits}-{name}-{method}", "perplexity"] for method in ("rtn", "gptq", "awq")]
        assert [float(value) for value in values] == [round(value, 1) for value in found], line
    assert len(rows.splitlines()) == 6
