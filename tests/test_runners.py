"""On any kernels a pair decodes what it decodes on transformers' own."""

import copy
import itertools

import pytest
import torch
from stand_ins import disagreeing, nearby, tiny_gpt2, tiny_llama, tiny_mistral
from torch._dynamo.utils import counters

from specdec import native
from specdec.cache import CachedModel, Decoder, open_cache
from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.grid import Grid
from specdec.kernels import int4_copy, kernel_copy
from specdec.llama import LlamaDecoder, plain_linear
from specdec.lowbit import Recipe, lowbit_copy
from specdec.packed import DecodingLinear, PackedLinear, packs
from specdec.policy import AdaptiveK
from specdec.quantize import bfloat16_copy, int8_copy
from specdec.runners import KERNELS, compiles, fastest, runner
from specdec.timing import cached_step

TEXT = torch.randint(40, (20,), generator=torch.Generator().manual_seed(0))
CLASSES = {
    "llama": lambda: wide_llama(),
    "llama, tied": lambda: wide_llama(tie_word_embeddings=True),
    "gpt2": tiny_gpt2,
    "mistral": tiny_mistral,
}
needs_onednn = pytest.mark.skipif(not packs(torch.ones(1, 1)), reason="this torch has no oneDNN")


def require(*kernels):
    """A machine without a C++ compiler cannot run these; what happens there has a test of its own."""
    if "compiled" in kernels and not compiles():
        pytest.skip("torch.compile does not work here: no C++ compiler, or no headers of Python")
    if "native" in kernels and native.library() is None:
        pytest.skip("native code cannot be made here: no C++ compiler that knows OpenMP")


def wide_llama(**changes):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_llama(**sizes | {"vocab_size": 48, "initializer_range": 0.2} | changes)


def four_bits(model, head=True):
    return kernel_copy(lowbit_copy(model, Recipe(Grid(4, 32, "min"), head=head)))


LOW_BITS = {
    "8 bits": int8_copy,
    "4 bits": four_bits,
    "4 bits, head of 16": lambda model: four_bits(model, head=False),
    "4 bits, head of 8": int4_copy,
}


def logits(model, parts=(11, 1, 3, 5)):
    cached = open_cache(model)
    return torch.cat([cached.forward(part) for part in TEXT.split(parts)])


# What a name means


RUNS_ON = [
    (kernels, name) for kernels in KERNELS for name in CLASSES if kernels in ("default", "packed") or "llama" in name
]


@pytest.mark.parametrize(("kernels", "name"), RUNS_ON)
def test_logits_are_those_of_the_model(kernels, name):
    require(kernels)
    model = CLASSES[name]()
    torch.testing.assert_close(logits(runner(model, kernels)), logits(model), rtol=0, atol=1e-4)


def packed_layers(module_or_decoder):
    if isinstance(module_or_decoder, LlamaDecoder):
        blocks = module_or_decoder.stack.blocks
        runs = [run for b in blocks for run in (b.qkv, b.attention_out, b.gate_up, b.down)] + [
            module_or_decoder.stack.head
        ]
    else:
        runs = list(module_or_decoder.modules())
    return sum(isinstance(run, PackedLinear | DecodingLinear) for run in runs)


@needs_onednn
def test_what_runs():
    llama, gpt2 = tiny_llama(), tiny_gpt2()
    assert runner(llama, "default") is llama and runner(gpt2, "default") is gpt2
    joined, packed, other = runner(llama, "joined"), runner(llama, "packed"), runner(gpt2, "packed")
    assert type(joined) is type(packed) is LlamaDecoder and type(other) is type(gpt2)
    assert (packed_layers(joined), packed_layers(packed)) == (0, 2 * 4 + 1)
    assert packed_layers(other) == 2 * 4 + 1  # GPT-2's q, k and v are one layer of its own
    assert isinstance(joined, Decoder) and not isinstance(llama, Decoder)


@pytest.mark.parametrize("bits", LOW_BITS)
def test_layers_of_low_bits_run_on_their_own_kernels_by_both_names(bits):
    low = LOW_BITS[bits](wide_llama())
    before = copy.deepcopy(low.state_dict())
    decoders = [runner(low, kernels) for kernels in ("joined", "packed")]
    assert all(type(decoder) is LlamaDecoder and packed_layers(decoder) == 0 for decoder in decoders)
    first, second = (logits(decoder) for decoder in decoders)
    assert torch.equal(first, second) and torch.equal(first, logits(LlamaDecoder(low, plain_linear)))
    assert all(torch.equal(before[name], value) for name, value in low.state_dict().items())
    other = int8_copy(tiny_gpt2())
    assert all(runner(other, kernels, draft=True) is other for kernels in KERNELS)


def test_compiled_code_serves_any_number_of_tokens_behind_any_context():
    """One version for one token and one for more; every further one would take seconds in the middle of a text."""
    require("compiled")
    compiled = runner(tiny_llama(max_position_embeddings=600), "compiled")
    cached, reference = compiled.open(), CachedModel(tiny_llama(max_position_embeddings=600))
    seen = set()
    counters.clear()
    for rows in (5, 1, 3, 1, 130, 2, 1, 200, 7, 150, 1):  # beyond the first buffers of keys and values, too
        part = torch.randint(40, (rows,), generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(cached.forward(part), reference.forward(part), rtol=0, atol=1e-4)
        seen.add(counters["stats"]["unique_graphs"])
    assert max(seen) == 2 and cached.length == 501


def test_every_compiled_decoder_has_its_own_versions():
    """torch gives up on a function of which it has made so many."""
    require("compiled")
    with torch._dynamo.config.patch(recompile_limit=2):
        for heads in (2, 4):
            model = tiny_llama(1, num_attention_heads=heads, num_key_value_heads=2)
            torch.testing.assert_close(logits(runner(model, "compiled")), logits(model), rtol=0, atol=1e-4)


def test_compiled_code_is_kept_on_disk(tmp_path, monkeypatch):
    """As for a process that comes later: only what torch wrote is left."""
    require("compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        torch._inductor.codecache.PyCodeCache.cache_clear()
        counters.clear()
        logits(runner(wide_llama(num_hidden_layers=1), "compiled"))
        found.append(
            [counters["inductor"][name] for name in ("fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass")]
        )
    assert found == [[2, 0, 0], [0, 2, 0]]


def test_where_nothing_compiles_the_next_best_runs(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no working compiler")

    llama, gpt2 = wide_llama(), tiny_gpt2()
    assert fastest(gpt2) == ("packed" if packs(torch.ones(1, 1)) else "default")
    assert native.library() is None or fastest(llama) == "native"
    monkeypatch.setattr(native, "library", lambda: None)
    assert fastest(llama) == ("compiled" if compiles() else fastest(gpt2))
    assert fastest(tiny_llama().to("meta")) == "default" and fastest(bfloat16_copy(gpt2)) == "default"
    compiles.cache_clear()
    try:
        monkeypatch.setattr(torch, "compile", fails)
        assert fastest(llama) == fastest(gpt2)
        with pytest.raises(InputError, match=r"kernels is 'compiled' for a LlamaForCausalLM in .* with a C"):
            runner(llama, "compiled")
        with pytest.raises(InputError, match=r"kernels is 'native' for a LlamaForCausalLM in .* a C\+\+ compiler that"):
            runner(llama, "native")
        assert packed_layers(runner(llama, "native", draft=True)) == packed_layers(runner(llama, "packed"))
        draft = runner(bfloat16_copy(llama), "compiled", draft=True)
        assert torch.equal(logits(draft), logits(LlamaDecoder(bfloat16_copy(llama))))
    finally:
        compiles.cache_clear()


@needs_onednn
def test_a_draft_in_16_bits_has_nothing_to_pack_and_a_target_is_refused():
    for dtype in (torch.bfloat16, torch.float16):
        low = tiny_llama().to(dtype)
        drafts = [runner(low, kernels, draft=True) for kernels in ("joined", "packed")]
        assert all(type(draft) is LlamaDecoder and packed_layers(draft) == 0 for draft in drafts)
        assert torch.equal(logits(drafts[0]), logits(drafts[1]))
        assert type(runner(low, "joined")) is LlamaDecoder
        with pytest.raises(
            InputError,
            match=rf"^kernels is 'packed' for a LlamaForCausalLM in {dtype} on cpu; allowed: default, joined, or float32",
        ):
            runner(low, "packed")
    other = bfloat16_copy(tiny_gpt2())
    assert runner(other, "packed", draft=True) is other
    assert packed_layers(runner(tiny_llama(), "packed", draft=True)) > 0


def test_what_these_kernels_do_not_run_is_refused_by_name():
    with pytest.raises(InputError, match=r"^kernels is 'fast'; allowed: default, joined, packed, compiled, native$"):
        runner(tiny_llama(), "fast")
    with pytest.raises(
        InputError, match=r"for a GPT2LMHeadModel in torch.bfloat16 on cpu; allowed: default, or float3"
    ):
        runner(bfloat16_copy(tiny_gpt2()), "packed")
    with pytest.raises(InputError, match=r"in torch.float32 on meta; allowed: default, joined, or float32 on a CPU"):
        runner(tiny_llama().to("meta"), "packed")
    with pytest.raises(
        InputError, match=r"'joined' for a GPT2LMHeadModel in .* on cpu; allowed: default, (packed, )?or"
    ):
        runner(tiny_gpt2(), "joined")
    with pytest.raises(
        InputError, match=r"'joined' for a MistralForCausalLM in .*; allowed: default, or a LlamaForCausalLM"
    ):
        runner(bfloat16_copy(tiny_mistral()), "joined")
    with pytest.raises(
        InputError, match=r"'compiled' for a GPT2LMHeadModel in .*, or a LlamaForCausalLM on a CPU with a C"
    ):
        runner(tiny_gpt2(), "compiled")
    with pytest.raises(InputError, match="is in training mode"):
        runner(tiny_llama().train(), "joined")
    with pytest.raises(InputError, match=r"torch.float64; allowed: torch.float32, "):
        runner(tiny_llama().double(), "joined")


def test_without_onednn_nothing_is_called_packed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"^kernels is 'packed' .* with oneDNN$"):
        runner(tiny_llama(), "packed")


# Decoding


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def prompt_of(length, seed=0):
    return torch.randint(40, (1, length), generator=seeded(seed))


RUNS = [
    ("joined", "joined"),
    ("packed", "packed"),
    ("default", "joined"),
    ("packed", "default"),
    ("compiled", "compiled"),
    ("native", "native"),
    ("default", "native"),
]
SAMPLINGS = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}]


@pytest.mark.parametrize(("on_target", "on_draft"), RUNS)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_same_tokens_and_rounds_on_any_kernels(on_target, on_draft, rule):
    require(on_target, on_draft)
    target, drafted = wide_llama(), set()
    drafts = nearby(target, 0.05), wide_llama(seed=1, tie_word_embeddings=True)
    on_kernels = [
        (runner(target, of_target), [runner(draft, of_draft) for draft in drafts])
        for of_target, of_draft in (("default", "default"), (on_target, on_draft))
    ]
    for number, (sampling, threshold) in enumerate(itertools.product(SAMPLINGS, (0.0, 0.4))):
        prompt = prompt_of((6, 1, 4)[number % 3], number)
        expected, ours = (
            speculative_generate(
                a_target,
                prompt,
                drafter=ModelDrafter(its_drafts[number // 3], threshold),
                k=4,
                max_new_tokens=20,
                verify=rule,
                generator=seeded(number),
                check_invariants=True,
                **sampling,
            )
            for a_target, its_drafts in on_kernels
        )
        assert torch.equal(ours.sequences, expected.sequences)
        assert [(r.drafted, r.accepted) for r in ours.stats.rounds] == [
            (r.drafted, r.accepted) for r in expected.stats.rounds
        ]
        assert ours.stats.alpha_overlap == pytest.approx(expected.stats.alpha_overlap, abs=1e-4)
        if threshold:
            drafted |= {r.drafted for r in ours.stats.rounds[:-2]}
    assert {1} < drafted  # the confidence stop did stop


@pytest.mark.parametrize("kernels", ["joined", "packed", "native"])
def test_plain_decoding_look_up_and_an_end_token(kernels):
    require(kernels)
    model = wide_llama()
    ours = runner(model, kernels)
    prompt = torch.tensor([[1, 2, 3, 1, 2, 3, 1]])
    for sampling in SAMPLINGS:
        expected, said = (
            autoregressive_generate(m, prompt, max_new_tokens=40, generator=seeded(3), **sampling)
            for m in (model, ours)
        )
        assert torch.equal(said.sequences, expected.sequences)
    text = autoregressive_generate(model, prompt, max_new_tokens=40).new_tokens
    for drafter in (PromptLookupDrafter(), ModelDrafter(ours), ModelDrafter(runner(disagreeing(model), kernels))):
        options = {"drafter": drafter, "k": 3, "max_new_tokens": 40, "check_invariants": True}
        assert speculative_generate(ours, prompt, **options).new_tokens == text
        ended = speculative_generate(ours, prompt, eos_token_id=text[7], **options)
        assert ended.new_tokens == text[: text.index(text[7]) + 1] and ended.finish_reason == "eos"


@pytest.mark.parametrize("bits", LOW_BITS)
@pytest.mark.parametrize("kernels", ["joined", "packed", "compiled", "native"])
def test_a_draft_of_low_bits_drafts_for_its_target(bits, kernels):
    require(kernels)
    target = wide_llama()
    ours, drafter = runner(target, kernels), ModelDrafter(runner(LOW_BITS[bits](target), kernels, draft=True))
    for k in (3, AdaptiveK(0.2, [1, 1.1, 1.2, 1.3, 1.4], 0.8)):
        result = speculative_generate(
            ours, prompt_of(5), drafter=drafter, k=k, max_new_tokens=60, check_invariants=True
        )
        assert result.new_tokens == autoregressive_generate(target, prompt_of(5), max_new_tokens=60).new_tokens
        assert result.stats.alpha > 0.6


def test_the_context_of_a_decoder_limits_the_text_and_the_draft():
    target, draft = tiny_llama(max_position_embeddings=30), tiny_llama(max_position_embeddings=12)
    ours, drafter = runner(target, "joined"), ModelDrafter(runner(draft, "joined"))
    expected = autoregressive_generate(target, prompt_of(5), max_new_tokens=25)
    options = {"drafter": drafter, "k": 4, "check_invariants": True}
    result = speculative_generate(ours, prompt_of(5), max_new_tokens=25, **options)
    assert torch.equal(result.sequences, expected.sequences)
    assert 0 < result.stats.proposed < 12
    with pytest.raises(InputError, match=r"max_new_tokens=26 exceed the target's context; allowed: 30 tokens"):
        speculative_generate(ours, prompt_of(5), max_new_tokens=26, **options)


def test_vocabularies_of_different_sizes():
    target, draft = tiny_llama(vocab_size=40), tiny_llama(1, vocab_size=32)
    for on_kernels in (draft, runner(draft, "joined")):
        drafter = ModelDrafter(on_kernels, vocabulary=40)
        result = speculative_generate(
            runner(target, "joined"), torch.tensor([[39, 1]]), drafter=drafter, k=3, max_new_tokens=30
        )
        assert (
            result.new_tokens == autoregressive_generate(target, torch.tensor([[39, 1]]), max_new_tokens=30).new_tokens
        )


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_cached_step_feeds_n_tokens_behind_the_context(kernels):
    require(kernels)
    model, context = wide_llama(max_position_embeddings=16), TEXT
    step = cached_step(runner(model, kernels), context, 3)  # of the context 13 tokens fit beside them
    with torch.inference_mode():
        expected = model(torch.cat([context[-13:], context[-13:-10]])[None]).logits[0, -3:]
    for _ in range(2):
        torch.testing.assert_close(step(), expected, rtol=0, atol=1e-4)


def test_open_cache_is_the_models_own_where_it_has_one():
    model = tiny_llama()
    decoder = LlamaDecoder(model)
    assert type(open_cache(model)) is CachedModel and type(open_cache(decoder)) is type(decoder.open())
    first, second = open_cache(decoder), open_cache(decoder)
    first.forward(TEXT)
    assert (first.length, second.length) == (20, 0)
