"""Answer a prompt and show, token by token, who wrote it: the draft, the target's correction, or its bonus.

python pipeline/chat.py "Why is the sky blue?" --target smollm2-135m --draft int8
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TextIO

import torch
from transformers import PreTrainedTokenizerBase

from pipeline import cli, options
from pipeline.machine import resolved, run_with
from pipeline.methods import on_kernels
from pipeline.prompts import encode_conversation
from pipeline.study import Pair, load_params
from pipeline.weights import load_pair
from specdec.generate import GenerationResult, RoundTokens, TokenKind, speculative_generate
from specdec.models import resolve_dtype

# ANSI colours on a terminal; elsewhere marks around the tokens that the target itself wrote
_COLOURS: dict[TokenKind, str] = {"accepted": "\033[32m", "corrected": "\033[31m", "bonus": "\033[34m"}
_MARKS: dict[TokenKind, tuple[str, str]] = {"accepted": ("", ""), "corrected": ("[", "]"), "bonus": ("{", "}")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    options.add_decoding_options(parser)
    args = parser.parse_args()
    options.check_decoding_options(parser, args, least_k=0)
    params = load_params()
    # Unlike in params.yaml, folders are allowed.
    pair = Pair.model_construct(target=args.target or options.DEFAULT_TARGET, draft=args.draft or options.DEFAULT_DRAFT)
    device, dtype = options.placement(args.device), resolve_dtype(args.dtype)
    loaded = load_pair(pair, params.models, device=device, dtype=dtype, confidence_threshold=args.confidence)
    kernels = resolved(args.kernels, loaded.target)
    target, drafter = run_with(loaded.target, kernels), on_kernels(loaded.drafter, kernels)
    tokenizer, end_tokens = loaded.tokenizer, loaded.end_tokens
    del loaded  # with other kernels than the default its models' matrices would lie in memory twice
    printer = RoundPrinter(tokenizer, sys.stdout)
    legend = iter([f"{printer.legend}\n"])  # above the first round, and below what may be wrong before it

    def on_round(round_tokens: RoundTokens) -> None:
        for line in legend:
            print(line)
        printer.on_round(round_tokens)

    result = speculative_generate(
        target,
        encode_conversation(tokenizer, [args.prompt], []),
        drafter=drafter,
        k=args.k,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        eos_token_id=end_tokens,
        verify=args.verifier,
        generator=torch.Generator().manual_seed(args.seed),
        on_round=on_round,
    )
    printer.end()
    print(summary(result))


class RoundPrinter:
    """Writes each round's tokens as they come, each in the style of its kind.

    A token may end inside a character; its bytes are held back until the character is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stream: TextIO) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._coloured = stream.isatty() and not os.environ.get("NO_COLOR")
        self._written: list[int] = []
        self._pending: list[int] = []

    @property
    def legend(self) -> str:
        return "  ".join(self._styled(kind, kind) for kind in _COLOURS)

    def on_round(self, round_tokens: RoundTokens) -> None:
        for token, kind in zip(round_tokens.tokens, round_tokens.kinds, strict=True):
            self._pending.append(token)
            text = self._decode()
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._stream.write(self._styled(text, kind))
                self._written, self._pending = self._pending, []
        self._stream.flush()

    def end(self) -> None:
        self._stream.write(self._decode() + "\n")
        self._stream.flush()

    def _decode(self) -> str:
        """The text of the pending tokens behind the last written ones: alone, many tokenizers would drop a leading space."""
        before, both = (
            str(self._tokenizer.decode(ids, skip_special_tokens=True))
            for ids in (self._written, self._written + self._pending)
        )
        return both[len(before) :]

    def _styled(self, text: str, kind: TokenKind) -> str:
        if not text:
            return ""
        if self._coloured:
            return f"{_COLOURS[kind]}{text}\033[0m"
        before, after = _MARKS[kind]
        return f"{before}{text}{after}"


def summary(result: GenerationResult) -> str:
    stats = result.stats

    def shown(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    return "\n".join(
        [
            "",
            f"{stats.new_tokens} tokens in {stats.target_forwards} target forwards: "
            f"{shown(stats.mean_acceptance_length)} tokens per round",
            f"alpha (accepted / tested) {shown(stats.alpha)}, acceptance rate (accepted / proposed) "
            f"{shown(stats.draft_acceptance_rate)}, ended by {result.finish_reason}",
        ]
    )


if __name__ == "__main__":
    cli.run(main)
