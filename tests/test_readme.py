"""What README.md shows is what was measured, and what it names exists."""

import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from written_commands import commands, missing

from pipeline.report import readme_part
from pipeline.run_study import BEGIN, END
from specdec.models import count_parameters
from specdec.theory import expected_tokens_per_round

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_results_are_those_of_the_committed_report():
    report = (ROOT / "plots" / "embedded" / "report.md").read_text(encoding="utf-8")
    assert README.split(BEGIN)[1].split(END)[0].strip() == readme_part(report)


def test_every_figure_and_link_exists():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert len(targets) >= 6
    headings = {f"#{heading.lower().replace(' ', '-')}" for heading in re.findall(r"(?m)^#+ (.*)$", README)}
    assert [target for target in targets if target not in headings and not (ROOT / target).exists()] == []


def test_every_script_and_module_exists():
    named = set(re.findall(r"(?:specdec|pipeline)/\w+\.py", README))
    assert len(named) >= 6
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_command_names_what_exists():
    """That each of them is run is checked by test_readme_commands.py."""
    assert {command: names for command in commands(README) if (names := missing(command))} == {}


def test_the_library_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert len(names["result"].new_tokens) == 32


# Models of the hub: numbers that no cell has, computed anew


def gpt2_config(width, layers):
    return GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64)


def smollm2_config(width, hidden, layers, heads, kv_heads):
    sizes = {
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
    }
    return LlamaConfig(hidden_size=width, intermediate_size=hidden, num_attention_heads=heads, **sizes)


GPT2 = {"gpt2": (768, 12), "distilgpt2": (768, 6), "gpt2-medium": (1024, 24), "gpt2-large": (1280, 36)}
SMOLLM2 = {"135M": (576, 1536, 30, 9, 3), "360M": (960, 2560, 32, 15, 5), "1.7B": (2048, 8192, 24, 32, 32)}
PINNED = {"gpt2": 548_105_171, "distilgpt2": 352_824_413}  # bytes of the files with the hashes in params.yaml


@pytest.fixture(scope="module")
def parameters():
    with torch.device("meta"):
        models = {name: GPT2LMHeadModel(gpt2_config(*shape)) for name, shape in GPT2.items()}
        models |= {name: LlamaForCausalLM(smollm2_config(*shape)) for name, shape in SMOLLM2.items()}
    return {name: count_parameters(model) for name, model in models.items()}


def test_the_sizes_of_the_hubs_models(parameters):
    masks = {name: layers * 1024**2 for name, (_, layers) in GPT2.items()}  # GPT-2's files hold them, in float32
    size = {name: 4 * (parameters[name] + masks[name]) for name in GPT2} | {n: 2 * parameters[n] for n in SMOLLM2}
    for name, bytes_ in PINNED.items():  # what is more than the tensors is the file's header
        assert 0 < bytes_ - size[name] < 20_000
    for names in (GPT2, SMOLLM2):
        (row,) = [
            line
            for line in README.splitlines()
            if f"{next(iter(names))} {size[next(iter(names))] / 1e9:.2f} GB" in line
        ]
        for name in names:
            assert f"{name} {size[name] / 1e9:.2f} GB" in row
        assert f"| {sum(size[name] for name in names) / 1e9:.2f} GB |" in row
    for target, draft in (("gpt2-large", "gpt2"), ("1.7B", "135M")):
        memory = 4 * (parameters[target] + parameters[draft]) / 1e9
        assert f"| {memory:.2f} GB ({target} with {draft}, float32) |" in README


def test_the_two_acceptance_numbers_of_the_original_study():
    assert "0.710 × 4 = 2.84" in README and round(0.710 * 4, 2) == 2.84
    assert "(1 − 0.87) = 3.86" in README and round(expected_tokens_per_round(0.87, 4), 2) == 3.86
    for rate, accepted in ((0.642, 2.46), (0.781, 3.00), (0.612, 2.31)):
        assert 0.04 <= round(1 - accepted / (4 * rate), 2) <= 0.06
    assert "formula gives 2.83" in README and round(expected_tokens_per_round(0.710, 4), 2) == 2.83
    assert "k = 8 is 0.65" in README and round((expected_tokens_per_round(0.902, 8) - 1) / 8, 2) == 0.65
