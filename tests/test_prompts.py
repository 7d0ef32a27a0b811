"""Reading, choosing and encoding prompts: the file shipped here, files that are broken, and both ways to encode."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipeline.prompts import Prompt, encode_conversation, encode_prompt, load_prompts, select_prompts
from specdec.errors import InputError

SHIPPED = Path(__file__).resolve().parents[1] / "pipeline" / "prompts.jsonl"
CATEGORIES = ["multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag"]
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def record(**changes: Any) -> dict[str, Any]:
    return {"question_id": 1, "category": "qa", "turns": ["Why?"]} | changes


def make_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, and a start token that the tokenizer puts in front of any text by itself, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    return fast


# The file shipped here


def test_the_shipped_file_has_the_six_categories_with_four_prompts_or_more_each() -> None:
    counts = Counter(prompt.category for prompt in load_prompts(SHIPPED))
    assert list(counts) == CATEGORIES
    assert min(counts.values()) >= 4
    assert counts.total() >= 24


def test_every_shipped_record_has_exactly_the_three_keys() -> None:
    for line in SHIPPED.read_text(encoding="utf-8").splitlines():
        assert list(json.loads(line)) == ["question_id", "category", "turns"]


def test_shipped_prompts_are_all_different_and_only_multi_turn_has_two_turns() -> None:
    prompts = load_prompts(SHIPPED)
    assert len({prompt.turns[0] for prompt in prompts}) == len(prompts)
    assert {prompt.category for prompt in prompts if len(prompt.turns) == 2} == {"multi_turn"}
    assert all(len(prompt.turns) == (2 if prompt.category == "multi_turn" else 1) for prompt in prompts)


@pytest.mark.parametrize("category", ["summarization", "rag"])
def test_shipped_passages_are_long_enough_to_copy_from_and_the_first_two_short_enough_for_a_cpu(category: str) -> None:
    lengths = []
    for prompt in select_prompts(load_prompts(SHIPPED), [category], 4):
        instruction, *blocks = prompt.turns[0].split("\n\n")
        assert len(instruction.split()) < 30
        if category == "rag":
            assert blocks.pop().startswith("Question: ")
            assert 2 <= len(blocks) <= 3
            assert all(block.startswith(f"Passage {i}: ") for i, block in enumerate(blocks, start=1))
        lengths.append(sum(len(block.split()) for block in blocks))
    assert all(150 <= length <= 500 for length in lengths)
    assert all(length <= 230 for length in lengths[:2])


# Reading


def test_a_record_becomes_a_prompt_with_further_keys_and_blank_lines_ignored(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"question_id": 81, "category": "writing", "turns": ["One.", "Two."], "reference": ["x", 3]}\r\n'
        b"\r\n   \n"
        b'{"question_id": "b-2", "category": "roleplay", "turns": ["A line\xe2\x80\xa8separator, caf\xc3\xa9"]}'
    )
    assert load_prompts(path) == [
        Prompt(81, "writing", ("One.", "Two.")),
        Prompt("b-2", "roleplay", ("A line\u2028separator, café",)),
    ]


@pytest.mark.parametrize(
    ("bad_line", "words"),
    [
        ('{"question_id": 2,', "not valid JSON"),
        ("9" * 5000, "number too long"),
        ("[" * 200_000, "nested too deep"),
        ('["question_id"]', "expected a JSON object"),
        ("null", "expected a JSON object"),
        ('{"category": "qa", "turns": ["x"]}', "'question_id' is missing"),
        ('{"question_id": 2, "turns": ["x"]}', "'category' is missing"),
        ('{"question_id": 2, "category": "qa"}', "'turns' is missing"),
        (json.dumps(record(question_id=2.0)), "question_id must be .* not 2.0"),
        (json.dumps(record(question_id=True)), "question_id must be .* not true"),
        (json.dumps(record(question_id=None)), "question_id must be .* not null"),
        (json.dumps(record(question_id=2, category="")), "category must be"),
        (json.dumps(record(question_id=2, category=["qa"])), "category must be"),
        (json.dumps(record(question_id=2, turns=[])), r"turns must be .* not \[\]"),
        (json.dumps(record(question_id=2, turns="x")), 'turns must be .* not "x"'),
        (json.dumps(record(question_id=2, turns=["x", 3])), "turns must be"),
        (json.dumps(record(question_id=2, turns=["x", " \n"])), "turns must be"),
        (json.dumps(record(question_id=2, turns=["half a character: \ud83d"])), "turns must be"),
        (json.dumps(record(question_id=1)), "question_id 1 is already used in line 1"),
        (json.dumps(record(question_id="1")), "question_id '1' is already used in line 1"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number_in_one_sentence(tmp_path: Path, bad_line: str, words: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(record()) + "\n\n" + bad_line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=words) as caught:
        load_prompts(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ")
    assert "\n" not in message
    assert len(message) < len(str(path)) + 250


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(record()).encode() + b'\n{"question_id": 2, "category": "qa", "turns": ["caf\xe9"]}\n')
    with pytest.raises(InputError, match="line 2: byte 52 of the line is not UTF-8"):
        load_prompts(path)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=r"empty\.jsonl holds no prompt"):
        load_prompts(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.jsonl cannot be read: No such file"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        load_prompts(tmp_path)


# Choosing

MIXED = [Prompt(i, category, (str(i),)) for i, category in enumerate(["b", "a", "b", "a", "b"])]


def test_selection_takes_the_first_of_each_category_in_the_order_of_the_categories() -> None:
    assert [p.question_id for p in select_prompts(MIXED, ["a", "b"], 2)] == [1, 3, 0, 2]
    assert [p.question_id for p in select_prompts(MIXED, ["b", "a"], 1)] == [0, 1]
    assert [p.question_id for p in select_prompts(MIXED, ["b"], 3)] == [0, 2, 4]


def test_selection_refuses_what_the_prompts_cannot_give() -> None:
    with pytest.raises(InputError, match="'c' does not occur among the prompts, which have: b, a"):
        select_prompts(MIXED, ["a", "c"], 1)
    with pytest.raises(InputError, match="'a' has 2 prompts, fewer than the 3"):
        select_prompts(MIXED, ["b", "a"], 3)
    with pytest.raises(InputError, match="per category is 0"):
        select_prompts(MIXED, ["a"], 0)


# Encoding


def test_without_a_chat_template_the_first_turn_is_plain_text_behind_one_start_token() -> None:
    tokenizer = make_tokenizer(None)
    ids = encode_prompt(tokenizer, Prompt(1, "qa", ("Où est-ce ?", "And then?")))
    assert ids.dtype == torch.long
    assert ids.shape == (1, 1 + len("Où est-ce ?".encode()))
    assert tokenizer.decode(ids[0]) == "<s>Où est-ce ?"


def test_with_a_chat_template_the_first_turn_is_a_user_message_and_the_answer_is_about_to_begin() -> None:
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    ids = encode_prompt(tokenizer, Prompt(1, "qa", ("Why?", "And then?")))
    assert ids.dtype == torch.long
    assert ids.ndim == 2
    assert tokenizer.decode(ids[0]) == "<s><user>Why?</s><assistant>"
    # The start token is one id, there once, although both the template and the tokenizer would write it.
    assert ids[0].tolist().count(tokenizer.bos_token_id) == 1
    assert ids[0].tolist().count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    ("chat_template", "text"),
    [
        (None, "<s>One?\n\nFirst.\n\nTwo?\n\nSecond.\n\nThree?"),
        (
            CHAT_TEMPLATE,
            "<s><user>One?</s><assistant>First.</s><user>Two?</s><assistant>Second.</s><user>Three?</s><assistant>",
        ),
    ],
)
def test_a_conversation_alternates_turns_and_answers(chat_template: str | None, text: str) -> None:
    tokenizer = make_tokenizer(chat_template)
    ids = encode_conversation(tokenizer, ["One?", "Two?", "Three?"], ["First.", "Second."])
    assert tokenizer.decode(ids[0]) == text


@pytest.mark.parametrize(("turns", "answers"), [(["a", "b"], []), (["a"], ["x"]), ([], [])])
def test_a_conversation_needs_one_answer_fewer_than_turns(turns: list[str], answers: list[str]) -> None:
    with pytest.raises(InputError, match=f"{len(turns)} turns was given {len(answers)} answers"):
        encode_conversation(make_tokenizer(None), turns, answers)


def test_a_prompt_of_no_tokens_is_refused() -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(InputError, match="no token at all"):
        encode_conversation(tokenizer, [""], [])


def test_reading_prompts_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, pipeline.prompts; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=SHIPPED.parents[1]).returncode == 0
