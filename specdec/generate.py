"""Plain and speculative decoding with a KV cache (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2).

Invariant, before and after every round: the last token of the text, the *anchor*, has not been fed to the target; everything
before it has. So target cache length = text length − 1, whatever was accepted, and plain decoding is the same loop with an empty
draft: one verified token per target forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from specdec.cache import Model, context_length, open_cache
from specdec.chance import GeneratorChooser
from specdec.drafters import Draft, Drafter
from specdec.errors import InputError
from specdec.sampling import SamplingConfig, to_probs
from specdec.stats import AcceptanceStats, Round
from specdec.verify import VERIFIERS, Verdict, Verifier

if TYPE_CHECKING:  # decoding with a number needs nothing of what chooses one
    from specdec.policy import KPolicy

TokenKind = Literal["accepted", "corrected", "bonus"]


class Streamer(Protocol):
    """Hugging Face's streamer protocol: the prompt first, then 1-D tensors of new tokens, then `end`."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class RoundTokens:
    """What one round emitted, for `on_round`: token ids and the kind of each."""

    tokens: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    record: Round


@dataclass(frozen=True)
class GenerationResult:
    """
    Args:
        sequences: prompt and new tokens, shape (1, T + n), int64, on the CPU.
        new_tokens: the n new token ids, the end token included.
        stats: the rounds. Plain decoding has one round a token, without proposals.
        finish_reason: "eos" if the last token is an end token, else "length".
    """

    sequences: Tensor
    new_tokens: tuple[int, ...]
    stats: AcceptanceStats
    finish_reason: Literal["eos", "length"]


def autoregressive_generate(
    target: Model,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    generator: torch.Generator | None = None,
    streamer: Streamer | None = None,
    on_prefill: Callable[[], None] | None = None,
    on_round: Callable[[RoundTokens], None] | None = None,
) -> GenerationResult:
    """Plain decoding: one target forward per token. Arguments as for `speculative_generate`."""
    return speculative_generate(
        target,
        input_ids,
        drafter=None,
        k=0,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_token_id=eos_token_id,
        generator=generator,
        streamer=streamer,
        on_prefill=on_prefill,
        on_round=on_round,
    )


def speculative_generate(
    target: Model,
    input_ids: Tensor,
    *,
    drafter: Drafter | None,
    k: int | KPolicy,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    verify: str | Verifier = "token",
    generator: torch.Generator | None = None,
    streamer: Streamer | None = None,
    on_prefill: Callable[[], None] | None = None,
    on_round: Callable[[RoundTokens], None] | None = None,
    check_invariants: bool = False,
) -> GenerationResult:
    """Speculative decoding; the new tokens are distributed exactly as the target's.

    Args:
        target: a causal language model in eval mode, or a decoder (see specdec/runners.py).
        input_ids: the prompt, shape (1, T), T ≥ 1.
        drafter: who proposes; not needed, and not touched, at k = 0.
        k: draft tokens per round (γ in Leviathan et al.), or who chooses them from round to round (specdec/policy.py); fewer near
            the end; 0 is plain decoding.
        max_new_tokens: exactly so many new tokens, unless an end token comes first.
        temperature, top_k, top_p: see `SamplingConfig`; applied to target and draft alike. Temperature 0 is greedy.
        eos_token_id: one or several end tokens; the first one generated is the last token. End tokens in the prompt stop nothing.
        verify: "token" or "block", both lossless (see specdec/verify.py), or a function with the arguments of `verify_tokens`.
        generator: drives every draw of both models; global random state is neither read nor changed.
        streamer: receives the prompt, then the new tokens of each round.
        on_prefill: called once when the prompt is in all caches, before the first round.
        on_round: called after each round with its tokens and their kinds.
        check_invariants: for debugging, and slow: after each round compare both caches with those of a fresh pass over the text.

    Raises:
        InputError: an argument out of range, a batch, or a text longer than the target's context.
        InvariantError: only with `check_invariants`: a cache does not hold what it should.
    """
    sampling = SamplingConfig(temperature, top_k, top_p)
    verifier = _verifier(verify)
    prompt = _check_request(target, input_ids, k, max_new_tokens, drafter)
    end_tokens = _end_tokens(eos_token_id)
    chooser = GeneratorChooser(generator)
    text = torch.cat([prompt, prompt.new_zeros(max_new_tokens)])
    length, last = len(prompt), len(text)
    rounds: list[Round] = []
    finish_reason: Literal["eos", "length"] = "length"

    # 1. Feed the prompt but for its last token, the first anchor. Models that cannot be used are refused before anything streams.
    cached = open_cache(target)
    if k == 0 or max_new_tokens == 0:
        drafter = None  # not needed
    if drafter is not None:
        drafter.begin(prompt, sampling)
    if not isinstance(k, int):
        k.begin()
    if streamer is not None:
        streamer.put(input_ids.cpu())
    if length > 1 and max_new_tokens > 0:
        cached.forward(prompt[:-1], keep=1)
    if on_prefill is not None:
        on_prefill()

    while length < last and finish_reason == "length":
        # 2. Draft at most k tokens, leaving room for the token that the target adds.
        limit = _drafted_at_most(k, last - length - 1)
        draft = drafter.propose(text[:length], limit, chooser) if drafter is not None and limit > 0 else Draft((), None)
        # 3. Verify: one target forward over the anchor and the draft; the laws move to the CPU once.
        unread = torch.cat([text[length - 1 : length], torch.tensor(draft.tokens, dtype=torch.int64)])
        p = to_probs(cached.forward(unread), sampling).cpu()
        verdict = verifier(draft.tokens, p, draft.probs, chooser)
        # 4. Commit the accepted prefix and the next token, up to the first end token.
        emitted = _emit(draft, verdict, end_tokens)
        text[length : length + len(emitted.tokens)] = torch.tensor(emitted.tokens)
        length += len(emitted.tokens)
        if emitted.tokens[-1] in end_tokens:
            finish_reason = "eos"
        # 5. Roll both caches back to everything but the new anchor.
        cached.rollback(length - 1)
        if drafter is not None:
            drafter.rollback(length - 1)
        if check_invariants:
            cached.check(text[: length - 1])
            if drafter is not None and draft.tokens:
                drafter.check(text[: length - 1])
        # 6. Record and report.
        rounds.append(emitted.record)
        if not isinstance(k, int):
            k.observe(emitted.record)
        if streamer is not None:
            streamer.put(torch.tensor(emitted.tokens))
        if on_round is not None:
            on_round(emitted)
    if streamer is not None:
        streamer.end()
    new_tokens = tuple(text[len(prompt) : length].tolist())
    return GenerationResult(text[None, :length].clone(), new_tokens, AcceptanceStats(tuple(rounds)), finish_reason)


def _drafted_at_most(k: int | KPolicy, room: int) -> int:
    if isinstance(k, int):
        return min(k, room)
    chosen = k.next_k(room)
    if not 0 <= chosen <= room:
        raise ValueError(f"{type(k).__name__} chose {chosen} draft tokens; allowed: 0 to {room}")
    return chosen


def _emit(draft: Draft, verdict: Verdict, end_tokens: frozenset[int]) -> RoundTokens:
    """The tokens of one round. What the draft holds behind an end token could never be emitted, so it counts as not proposed."""
    accepted_kind: TokenKind = "accepted"
    last_kind: TokenKind = "bonus" if verdict.is_bonus else "corrected"
    tokens = (*draft.tokens[: verdict.accepted], verdict.token)
    kinds = (*[accepted_kind] * verdict.accepted, last_kind)
    drafted = len(draft.tokens)
    end = next((n for n, token in enumerate(draft.tokens, start=1) if token in end_tokens), None)
    if end is not None and verdict.accepted >= end:
        tokens, kinds = tokens[:end], kinds[:end]
    proposed = drafted if end is None else end
    accepted = min(verdict.accepted, proposed)
    return RoundTokens(tokens, kinds, Round(drafted, proposed, accepted, len(tokens), verdict.overlaps[:proposed]))


def _check_request(
    target: Model, input_ids: Tensor, k: int | KPolicy, max_new_tokens: int, drafter: Drafter | None
) -> Tensor:
    """Refuse what cannot be done before any forward; return the prompt as shape (T,), int64, on the CPU."""
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise InputError(
            f"input_ids has shape {tuple(input_ids.shape)}; allowed: (1, T) with T of at least 1, one text"
        )
    if not (_is_count(k) or hasattr(k, "next_k")):
        raise InputError(f"k is {k!r}; allowed: an integer of at least 0, or a KPolicy")
    if not _is_count(max_new_tokens):
        raise InputError(f"max_new_tokens is {max_new_tokens!r}; allowed: an integer of at least 0")
    if k != 0 and drafter is None:
        named = k if isinstance(k, int) else type(k).__name__
        raise InputError(f"k is {named} without a drafter; allowed: k = 0 (plain decoding), or a drafter")
    room = context_length(target)
    if input_ids.shape[1] + max_new_tokens > room:
        raise InputError(
            f"a prompt of {input_ids.shape[1]} tokens and max_new_tokens={max_new_tokens} exceed the target's context; "
            f"allowed: {room} tokens together"
        )
    return input_ids[0].to("cpu", torch.int64)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _verifier(verify: str | Verifier) -> Verifier:
    if callable(verify):
        return verify
    if not isinstance(verify, str) or verify not in VERIFIERS:
        raise InputError(f"verify is {verify!r}; allowed: {', '.join(VERIFIERS)}, or a function")
    return VERIFIERS[verify]


def _end_tokens(eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset()
    many = eos_token_id if isinstance(eos_token_id, Iterable) else [eos_token_id]
    return frozenset(int(token) for token in many)
