"""Texts that a target wrote: the contexts behind which variants of a draft are judged, and the data that calibrates them.

They lie in one file per pair, in git, so that every variant on every machine is judged behind the same tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.cells import read_json
from specdec.errors import InputError


@dataclass(frozen=True)
class Text:
    """
    Args:
        prompt, new_tokens: token ids, shapes (T,) and (n,), int64.
        best: the target's argmax at each new token, by one pass over the text, shape (n,).
        log_likelihood: of the new tokens, by the same pass.
    """

    question_id: int | str
    category: str
    prompt: Tensor
    new_tokens: Tensor
    best: Tensor
    log_likelihood: float

    @property
    def tokens(self) -> Tensor:
        return torch.cat([self.prompt, self.new_tokens])

    def record(self) -> dict[str, Any]:
        """Ids joined by spaces: a line of JSON a text, instead of one a token."""
        ids = {name: join(getattr(self, name)) for name in ("prompt", "new_tokens", "best")}
        names = {"question_id": self.question_id, "category": self.category}
        return {**names, **ids, "log_likelihood": self.log_likelihood}

    @staticmethod
    def of(record: dict[str, Any]) -> Text:
        prompt, new_tokens, best = (split(record[name]) for name in ("prompt", "new_tokens", "best"))
        return Text(
            record["question_id"], record["category"], prompt, new_tokens, best, float(record["log_likelihood"])
        )


@dataclass(frozen=True)
class Contexts:
    """What stage `contexts` wrote about a pair's target.

    Args:
        greedy, sampled: the answers to the same prompts, greedy and at T = 1.
        calibration: answers at T = 1 to other prompts, with the prompt, token ids of shape (T,).
        temperatures: above 0, at which laws are compared.
        hashes: sha256 of contexts and calibration, by the keys of a cell.
    """

    greedy: list[Text]
    sampled: list[Text]
    calibration: list[Tensor]
    temperatures: list[float]
    hashes: dict[str, str]


def read_contexts(path: Path) -> Contexts:
    """
    Raises:
        InputError: the file is missing, is none of stage `contexts`, or was changed by hand.
    """
    record = read_json(path)
    try:
        sets = {name: [Text.of(text) for text in record[name]] for name in ("greedy", "sampled")}
        calibration = [split(ids) for ids in record["calibration"]]
        found = hashes(record)
        if any(record[key] != value for key, value in found.items()):
            raise InputError(
                f"{path} does not have the hashes that it names; bring it back with `git checkout {path}`."
            )
        return Contexts(sets["greedy"], sets["sampled"], calibration, record["temperatures"], found)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} holds no contexts ({error}); `dvc repro -f contexts` writes them.") from None


def hashes(record: dict[str, Any]) -> dict[str, str]:
    """Of the texts alone: where and when they were written does not matter."""
    parts = {"contexts": [record["greedy"], record["sampled"]], "calibration": record["calibration"]}
    return {
        f"{name}_sha256": hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
        for name, part in parts.items()
    }


def log_likelihood(logits: Tensor, tokens: Tensor) -> float:
    """Of tokens, shape (n,), by the logits of each, shape (n, V); natural logarithm."""
    return float(logits.log_softmax(dim=-1).gather(1, tokens[:, None]).double().sum())


def join(ids: Tensor) -> str:
    return " ".join(map(str, ids.tolist()))


def split(ids: str) -> Tensor:
    return torch.tensor([int(token) for token in ids.split()], dtype=torch.int64)


def first_per_category(texts: Sequence[Text], count: int) -> list[Text]:
    """The first `count` texts of each category, in their order."""
    seen: dict[str, int] = {}
    chosen = []
    for text in texts:
        seen[text.category] = seen.get(text.category, 0) + 1
        if seen[text.category] <= count:
            chosen.append(text)
    return chosen
