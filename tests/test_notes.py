"""The notes name the test behind every claim; here those names are checked."""

import ast
import contextlib
import functools
import io
import re

import pandas as pd
import pytest
import torch
from report_text import table
from sync_deps import ROOT
from transformers import LlamaConfig, LlamaForCausalLM
from written_commands import commands, missing

from pipeline import corrections, notes
from pipeline.results import read_table
from specdec.models import count_parameters
from specdec.theory import break_even_alpha, expected_tokens_per_round

NOTES = sorted((ROOT / "notes").glob("*.md"))
DERIVATION = ROOT / "notes" / "derivation-acceptance-sampling.md"


@functools.cache
def all_tests():
    """The names of all test functions of the suite."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").glob("test_*.py")]
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.name)
def test_every_test_that_a_note_names_exists(path):
    named = set(re.findall(r"\btest_\w+(?!\w*\.py)", re.sub(r"tests/\w+\.py", "", path.read_text(encoding="utf-8"))))
    assert named - all_tests() == set()


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.name)
def test_every_file_that_a_note_names_exists(path):
    """`<pair>` and the like stand for any name."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = re.findall(r"\b(?:specdec|pipeline|tests|metrics|plots|notes)/[\w./<>-]+", text)
    globs = {re.sub(r"<[\w ]+>", "*", name).rstrip("./-") for name in named}
    assert [name for name in sorted(globs) if not any(ROOT.glob(name))] == []


@pytest.mark.parametrize("name", ["leviathan-2023", "chen-2023", "eagle", "block-verification", "gptq", "awq"])
def test_reading_notes_end_with_what_this_repository_does_with_it(name):
    last = (ROOT / "notes" / f"{name}.md").read_text(encoding="utf-8").split("\n## ")[-1]
    assert last.startswith("What this repository does with it\n")
    assert re.search(r"`test_\w+`", last) and re.search(r"(specdec|pipeline)[/.]\w+", last) and "metrics/" in last


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
    # Those that people wrote: what scripts write has a test of its own.
    written = [path.read_text(encoding="utf-8") for path in VALUES]
    typed = [re.sub(f"{notes.BEGIN}.*{notes.END}", "", text, flags=re.DOTALL) for text in written]
    found = [texts for text in typed for texts in WITH_INTERVAL.findall(text)]
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


CORRECTIONS = (ROOT / "notes" / "corrections.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("note", notes.TEXTS, ids=str)
def test_the_notes_hold_what_was_measured(note, monkeypatch):
    """`python pipeline/notes.py` brings them up to date."""
    monkeypatch.chdir(ROOT)
    text = note.read_text(encoding="utf-8")
    assert text.split(notes.BEGIN)[1].split(notes.END)[0].strip() == notes.TEXTS[note]()


def test_models_that_draft_in_pairs_of_a_users_own_are_no_quantised_drafts(monkeypatch):
    def read(folder, name):
        table = read_table(folder, name)
        return pd.concat([table, table.iloc[:1].assign(draft="mine-small")]) if name == "hf_benchmark" else table

    monkeypatch.chdir(ROOT)
    before = notes.of_quantised_drafts()
    monkeypatch.setattr(notes, "read_table", read)
    assert notes.of_quantised_drafts() == before and "int8" in before


def test_the_corrections_agree_with_the_sweeps():
    text = CORRECTIONS.split(notes.BEGIN)[1].split(notes.END)[0].strip()
    by_k = pd.read_csv(ROOT / "plots" / "embedded" / "sweep_k.csv").set_index(["pair", "k"])
    for row in table(text.split("**Table 4.**")[1])[:-1]:  # the last one is the toy pair
        cell = by_k.loc[(row["pair"], int(row["k"]))]
        over = cell["mean_acceptance_length"] / cell["iid_acceptance_length"]
        value, low, high = map(float, re.findall(r"[\d.]+", row["τ over the form at the counted α"]))
        assert value == round(over, 3) and low <= value <= high


def test_pairs_without_k_1_or_a_draft_are_left_out_of_the_corrections(monkeypatch):
    by_k = [("whole", 1, 0.9), ("whole", 2, 0.8), ("from-2", 2, 0.8), ("mute", 1, None), ("mute", 2, None)]
    alphas = {str(corrections.cells.sweep_k("embedded", pair, k)): alpha for pair, k, alpha in by_k}
    alphas[str(corrections.cells.toy_k(1))] = 0.7
    tables = {
        "sweep_k": pd.DataFrame(by_k, columns=["pair", "k", "alpha"]),
        "toy_k": pd.DataFrame({"k": [1]}),
    }
    monkeypatch.setattr(corrections, "read_table", lambda _, name: tables[name])
    monkeypatch.setattr(corrections.cells, "read_json", lambda path: {"alpha": alphas[str(path)]})
    found = corrections.sweeps_over_k()
    assert {pair: list(cells) for pair, cells in found.items()} == {"whole": [1, 2], "toy": [1]}


def test_the_originals_rows_are_those_quoted_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target, draft, backend, rate, accepted, speedup in corrections.ORIGINAL:
        assert re.search(
            rf"\| {target} \| {draft} \| {backend} \| {rate:.3f} \| {accepted:.2f} \| .* \| {speedup:.2f}× \|", readme
        )


def test_the_arithmetic_of_the_corrections():
    expected = expected_tokens_per_round
    text = " ".join(CORRECTIONS.split())
    assert "E(0.710, 4) is 2.83" in text and round(expected(0.710, 4), 2) == 2.83
    assert "An α of 0.868" in text and round(break_even_alpha(4, 0, 3.84), 3) == 0.868
    assert "E is 1.111 and 1 + kα is 1.4" in text and round(expected(0.1, 4), 3) == 1.111
    assert "For α = 0.902 that is 0.65 at k = 8" in text and round((expected(0.902, 8) - 1) / 8, 2) == 0.65
    # half of the rounds at 0.5 and half at 0.9
    tokens, alive = expected(0.5, 4) + expected(0.9, 4), [0.5**j + 0.9**j for j in range(5)]
    counted = (tokens - 2) / sum(alive[:4])
    assert "E(0.7, 4) = 2.77, but τ is 3.02" in text
    assert [round(expected(0.7, 4), 2), round(tokens / 2, 2)] == [2.77, 3.02]
    assert "is 0.759, and E(0.759, 4) = 3.10" in text
    assert [round(counted, 3), round(expected(counted, 4), 2)] == [0.759, 3.10]
    assert "0.70, 0.76, 0.81, 0.84" in text
    assert [round(alive[j] / alive[j - 1], 2) for j in (1, 2, 3, 4)] == [0.70, 0.76, 0.81, 0.84]
    assert "a round cost 4.73 steps" in text and round(3.31 / 0.70, 2) == 4.73
    assert "3.86 − 2.13 = 4 × 0.43" in text and round((4.36 / 1.13 - 3.84 / 1.80) / 4, 2) == 0.43
    assert "should differ by 0.05, or 0.17" in text
    assert [round((124.4 - 81.9) / 774, 2), round((12 - 6) / 36, 2)] == [0.05, 0.17]


def test_the_sizes_of_an_eagle_step():
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(num_hidden_layers=30, vocab_size=49152, tie_word_embeddings=True, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    target, layer = count_parameters(model), count_parameters(model.model.layers[0])
    joined, head = 2 * 576 * 576, 49152 * 576
    text = " ".join((ROOT / "notes" / "eagle.md").read_text(encoding="utf-8").split())
    assert (
        f"has {layer / 1e6:.2f} M weights, the linear layer {joined / 1e6:.2f} M, the head {head / 1e6:.1f} M" in text
    )
    step = layer + joined + head
    assert f"reads {step / 1e6:.1f} M of {target / 1e6:.1f} M weights" in text
    assert f"c = {step / target:.2f}, and {100 * head / step:.0f} % of it is the head" in text
    assert f"c would be {(layer + joined + 8192 * 576) / target:.2f}" in text


CHOOSING = (ROOT / "notes" / "choosing-a-draft.md").read_text(encoding="utf-8")


def test_commands_in_the_notes_name_scripts_and_options_that_exist():
    given = {path.name: commands(path.read_text(encoding="utf-8")) for path in NOTES}
    assert len(given["choosing-a-draft.md"]) >= 7
    assert {
        name: found for name, those in given.items() if (found := [word for c in those for word in missing(c)])
    } == {}
    named = set(re.findall(r"`(--[\w-]+)", CHOOSING))  # those named in prose are benchmark.py's
    assert missing(" ".join(["python pipeline/benchmark.py", *sorted(named)])) == []


def test_the_numbers_of_choosing_a_draft():
    for row in table(CHOOSING.split("## 1.")[1]):
        needed = [break_even_alpha(4, float(row["c"]), v) for v in (1, 1.2, 1.5, 2)]
        assert list(row.values())[1:] == ["–" if alpha is None else f"{alpha:.2f}" for alpha in needed]
    (example,) = re.findall(r"```python\n(.*?)```", CHOOSING, flags=re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(example, {})
    best, speeds, least = printed.getvalue().splitlines()
    assert best == "3" and "# 3, and 0 where nothing gains" in example
    speeds = ast.literal_eval(speeds)
    assert max(speeds) == speeds[3] and speeds[3] - min(speeds[2], speeds[4]) < 0.05  # flat around the best
    assert 0 < float(least) < 0.8
