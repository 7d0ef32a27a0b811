"""What is particular about GPT-2, on a tiny one stored as the hub stores it: bytes as tokens, no pad token, no chat template."""

import io
import re

import pytest
import torch
from hub_checkpoints import gpt2_files

from pipeline import chat
from pipeline.chat import RoundPrinter
from pipeline.prompts import encode_conversation, load_prompts
from pipeline.study import LocalModel, Pair
from pipeline.timed import Setting, TextPrompt, hugging_face_method, own_method
from pipeline.weights import load_pair
from specdec.errors import InputError
from specdec.generate import autoregressive_generate
from specdec.sampling import SamplingConfig

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    for name, noise in (("target", 0.0), ("draft", 0.02)):
        for path, content in gpt2_files(noise=noise, context=128).items():
            if "/" not in path:
                (folder / name).mkdir(exist_ok=True)
                (folder / name / path).write_bytes(content)
    return {name: LocalModel(source="local", path=str(folder / name)) for name in ("target", "draft")}


@pytest.fixture(scope="module")
def pair(models):
    return load_pair(Pair(target="target", draft="draft"), models, device=CPU, dtype=torch.float32)


def test_its_tokenizer(pair):
    assert pair.tokenizer.pad_token is None and not pair.tokenizer.chat_template
    assert pair.end_tokens == [pair.tokenizer.eos_token_id]
    ids = encode_conversation(pair.tokenizer, ["the end of the line"], [])
    assert "Ġthe" in pair.tokenizer.convert_ids_to_tokens(ids[0].tolist())  # a space belongs to the word behind it
    assert pair.tokenizer.decode(ids[0]) == "the end of the line"


def test_what_is_streamed_is_the_text(pair):
    """Token by token, with spaces before words and punctuation, and characters of several tokens."""
    text = load_prompts("pipeline/prompts.jsonl")[0].turns[0] + " Don't stop , says the café \N{SNOWMAN} ."
    ids = encode_conversation(pair.tokenizer, [text], [])[0].tolist()
    stream = io.StringIO()
    printer = RoundPrinter(pair.tokenizer, stream)
    for start in range(0, len(ids), 3):
        tokens = tuple(ids[start : start + 3])
        printer.on_round(chat.RoundTokens(tokens, ("accepted",) * len(tokens), None))
    printer.end()
    assert stream.getvalue() == text + "\n"


@pytest.mark.parametrize("k", [1, 4])
def test_its_context_ends_with_a_sentence_and_never_with_an_index_error(pair, k):
    """Learned positions: behind the last one there is no embedding. The draft has as many."""
    prompt = torch.arange(100)[None] % 300
    options = {"k": k, "drafter": pair.drafter, "check_invariants": True}
    result = chat.speculative_generate(pair.target, prompt, max_new_tokens=28, **options)
    plain = autoregressive_generate(pair.target, prompt, max_new_tokens=28)
    assert result.new_tokens == plain.new_tokens and result.sequences.shape[1] == 128
    with pytest.raises(InputError, match=r"100 tokens and max_new_tokens=29 exceed the target's context; allowed: 128"):
        chat.speculative_generate(pair.target, prompt, max_new_tokens=29, **options)


def test_hugging_face_generate_needs_no_pad_token(pair):
    setting = Setting(2, SamplingConfig(), 12, pair.end_tokens, 0, 2, 1)
    prompt = TextPrompt(1, "qa", encode_conversation(pair.tokenizer, ["where is it?"], []))
    ours = own_method(pair.target, pair.drafter, setting)(prompt)
    assert hugging_face_method(pair.target, setting)(prompt).new_tokens == ours.new_tokens


@pytest.mark.parametrize("draft", ["int8", "bf16"])
def test_its_transposed_layers_are_quantised(models, draft):
    loaded = load_pair(Pair(target="target", draft=draft), models, device=CPU, dtype=torch.float32)
    kinds = [type(module).__name__ for module in loaded.drafter.model.modules()]
    layers = 2 * 4
    assert kinds.count("Conv1D") == (0 if draft == "int8" else layers)
    assert kinds.count("Int8Linear") == (layers + 1 if draft == "int8" else 0)  # and the head
    prompt = encode_conversation(loaded.tokenizer, ["where is it?"], [])
    result = chat.speculative_generate(loaded.target, prompt, drafter=loaded.drafter, k=3, max_new_tokens=24)
    plain = autoregressive_generate(loaded.target, prompt, max_new_tokens=24)
    assert result.new_tokens == plain.new_tokens and result.stats.alpha > 0.8


def test_a_prompt_longer_than_its_context_is_refused_by_name(models, monkeypatch, capsys):
    monkeypatch.setattr(chat, "load_params", lambda: type("Params", (), {"models": models}))
    monkeypatch.setattr("sys.argv", ["chat.py", "word " * 200, "--target", "target", "--draft", "draft"])
    with pytest.raises(
        InputError, match=r"a prompt of \d+ tokens and max_new_tokens=128 exceed the target's context; allowed"
    ):
        chat.main()
    assert not re.search(r"\w", capsys.readouterr().out)
