"""The prompts of a study: reading them from a file, choosing some of them, turning them into token ids.

A file holds one JSON object per line in the shape that Spec-Bench uses for its questions
(`{"question_id": 1, "category": "qa", "turns": ["..."]}`), so Spec-Bench's own file can be named in params.yaml in
place of the one shipped here. `encode_prompt` gives what the study decodes; `encode_conversation` serves a chat of
several turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import InputError

if TYPE_CHECKING:  # the stage that checks the prompts before anything else runs must not pay for importing torch
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One question: what the user says, turn by turn, without the model's answers."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read every prompt of a JSONL file, in file order.

    Blank lines and keys other than the three needed (Spec-Bench's `reference`, for instance) are ignored.

    Raises:
        InputError: the file cannot be read or holds no prompt, or a line (named by its number) is not UTF-8, not a JSON
            object, lacks a key, has a value of the wrong kind, or repeats a question_id.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"The prompt file {path} cannot be read: {error.strerror or error}.") from None
    prompts: list[Prompt] = []
    first_line: dict[str, int] = {}  # where each question_id was seen; 1 and "1" would be one and the same in a table
    # Split bytes at newlines only: a JSON string may hold U+2028, at which str.splitlines would cut the line in two.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        prompt = _parse_line(line, where=f"{path}, line {number}")
        earlier = first_line.setdefault(str(prompt.question_id), number)
        if earlier != number:
            raise InputError(
                f"{path}, line {number}: question_id {prompt.question_id!r} is already used in line {earlier}, "
                "but each prompt needs its own."
            )
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"The prompt file {path} holds no prompt, but at least one line with a prompt is needed.")
    return prompts


def _parse_line(line: bytes, *, where: str) -> Prompt:
    try:
        record: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: byte {error.start + 1} of the line is not UTF-8, which the file must be.") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets nested thousands deep
        raise InputError(f"{where}: the JSON has a number too long or brackets nested too deep to be read.") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object with question_id, category and turns, got {_short(record)}.")
    for key in ("question_id", "category", "turns"):
        if key not in record:
            raise InputError(f"{where}: the key {key!r} is missing; question_id, category and turns are needed.")
    question_id, category, turns = record["question_id"], record["category"], record["turns"]
    # bool is a subclass of int in Python, so `true` would otherwise pass as the number 1.
    if isinstance(question_id, bool) or not (isinstance(question_id, int) or _is_text(question_id)):
        raise InputError(f"{where}: question_id must be a whole number or a text, not {_short(question_id)}.")
    if not _is_text(category):
        raise InputError(f"{where}: category must be a text that is not empty, not {_short(category)}.")
    if not isinstance(turns, list) or not turns or not all(_is_text(turn) for turn in turns):
        raise InputError(
            f"{where}: turns must be a list of one or more texts, none of them empty, not {_short(turns)}."
        )
    return Prompt(question_id=question_id, category=category, turns=tuple(turns))


def _is_text(value: object) -> bool:
    """Whether value is a string with something in it that UTF-8 can encode (a JSON escape can be half a character)."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= char <= "\udfff" for char in value)


def _short(value: object) -> str:
    """The value as JSON, cut so that a message stays one readable sentence."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def select_prompts(prompts: Sequence[Prompt], categories: Sequence[str], per_category: int) -> list[Prompt]:
    """The first `per_category` prompts of each category, category by category in the order of `categories`.

    Raises:
        InputError: per_category is below 1, a category does not occur among the prompts, or it has too few of them.
    """
    if per_category < 1:
        raise InputError(f"The number of prompts per category is {per_category}, but it must be at least 1.")
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    selected: list[Prompt] = []
    for category in categories:
        if category not in by_category:
            known = ", ".join(by_category)
            raise InputError(f"The category {category!r} does not occur among the prompts, which have: {known}.")
        found = by_category[category]
        if len(found) < per_category:
            raise InputError(
                f"The category {category!r} has {len(found)} prompts, fewer than the {per_category} asked for."
            )
        selected += found[:per_category]
    return selected


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> torch.LongTensor:
    """Token ids of the prompt's first turn, as the user's message, up to where the model's answer begins: shape (1, T).

    A later turn asks about the model's own answer to the one before it, so encoding it needs that answer (see
    `encode_conversation`), and prompts would then differ between models. The study is therefore single-turn: of a
    prompt with several turns only the first is decoded.

    Raises:
        InputError: the turn comes out as no token at all.
    """
    return encode_conversation(tokenizer, prompt.turns[:1], answers=())


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], answers: Sequence[str]
) -> torch.LongTensor:
    """Token ids of a conversation up to where the model's next answer begins: shape (1, T).

    `turns` are the user's messages and `answers` the model's replies to all of them but the last. With a chat template
    the ids are the template's, generation prompt included; without one they are those of turns and answers joined by
    blank lines, with whatever the tokenizer itself puts in front of a text.

    Raises:
        InputError: `answers` is not one shorter than `turns`, or the conversation comes out as no token at all.
    """
    if len(answers) != len(turns) - 1:
        raise InputError(
            f"A conversation of {len(turns)} turns was given {len(answers)} answers, "
            "but every turn except the last needs one, and there must be at least one turn."
        )
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    quietly = {
        "verbose": False
    }  # a text that is too long for the model is refused by the decoding loop, in its own words
    encoding: Any  # what transformers declares here is a union wider than what these arguments return
    if tokenizer.chat_template:
        # The template writes the special tokens itself; apply_chat_template therefore adds none of its own.
        encoding = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            tokenizer_kwargs=quietly,
        )
    else:
        encoding = tokenizer("\n\n".join(message["content"] for message in messages), return_tensors="pt", **quietly)
    input_ids: torch.LongTensor = encoding["input_ids"]
    if input_ids.shape[1] == 0:
        raise InputError(
            f"The tokenizer turns {_short(turns[-1])} into no token at all, but one is needed to start from."
        )
    return input_ids
