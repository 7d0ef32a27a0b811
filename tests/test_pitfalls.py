"""The faults that other implementations had, by number, as far as they are not tested where their subject is.

a01 to a20 and f01 to f13 are reports of speculative decoding, model loading and DVC pipelines gone wrong in other projects; each
number stands in the name of every test that would notice that fault here. The last test counts them.
"""

import ast
import json
import random
import re
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import fake_cells
import numpy as np
import pytest
import torch
from laws import g_statistic, law_of_the_loop, total_variation
from ruamel.yaml import YAML
from stand_ins import ScriptedModel, Spy, nearby, random_table, tiny_gpt2, tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pipeline import bench, benchmark, cells, chat, methods, sweep, timed
from pipeline.acceptance import PromptResult, acceptance_record
from pipeline.hardware import describe
from pipeline.study import Pair
from pipeline.timed import Setting, TextPrompt
from pipeline.weights import LoadedPair, load_pair
from specdec import generate, identity
from specdec.cache import CachedModel
from specdec.chance import GeneratorChooser
from specdec.drafters import Draft, ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.generate import autoregressive_generate, speculative_generate
from specdec.identity import DEVICE_ERROR, NEAR_TIE_ULPS, check_device, emitted_gaps
from specdec.models import random_prompt, toy_draft, toy_target
from specdec.sampling import SamplingConfig, to_probs
from specdec.timing import StepClock, time_generation
from specdec.verify import VERIFIERS

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
PROMPT = torch.tensor([[1, 3, 2, 3]])


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def plain(target, prompt, tokens, **options):
    return autoregressive_generate(target, prompt, max_new_tokens=tokens, **options).new_tokens


def scripted(seed=0, vocabulary=8):
    return ScriptedModel(random_table(vocabulary, seed))


# a01, f01: the law that a draft token is drawn from is not the one that it is verified against

P, Q = (0.30, 0.50, 0.20), (0.45, 0.30, 0.25)
LAWS = {
    "plain": (1, {"temperature": 1.0}, dict(enumerate(P))),
    "filtered": (1, {"temperature": 1.0, "top_k": 2}, {0: 0.375, 1: 0.625}),
    "k = 3": (3, {"temperature": 1.0}, dict(enumerate(P))),
}


def always(*law):
    return ScriptedModel(torch.tensor(law, dtype=torch.float64).expand(len(law), len(law), -1))


class GreedyWithSoftmax(ModelDrafter):
    """A wrong draft: the likeliest token, handed over with the law of sampling."""

    def propose(self, context, max_tokens, chooser):
        return super().propose(context, max_tokens, SimpleNamespace(categorical=lambda law: int(law.argmax())))


class FilteredWithUnfiltered(ModelDrafter):
    """A wrong draft: drawn from the filtered law, handed over with the unfiltered one."""

    def propose(self, context, max_tokens, chooser):
        draft = super().propose(context, max_tokens, chooser)
        return Draft(draft.tokens, torch.tensor(Q, dtype=torch.float64).expand(len(draft.tokens), -1))


# For a single token nothing is drafted. So k + 1 are asked for, and any token ends the text.
ONE_ROUND = {"eos_token_id": range(3)}


def law_of_the_first_token(drafter, k, sampling, verify="token"):
    law = law_of_the_loop(always(*P), drafter, (0,), k, k + 1, verify=verify, **sampling, **ONE_ROUND)
    return {token: probability for (token,), probability in law.items()}


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("case", LAWS)
def test_a01_f01_the_first_token_has_the_targets_law(case, verify):
    k, sampling, expected = LAWS[case]
    law = law_of_the_first_token(ModelDrafter(always(*Q)), k, sampling, verify)
    assert total_variation(law, expected) < 1e-9


@pytest.mark.parametrize("case", LAWS)
def test_a01_f01_generations_that_have_a_seed_each_follow_it(case):
    k, sampling, expected = LAWS[case]
    target, drafter = always(*P), ModelDrafter(always(*Q))
    options = {"drafter": drafter, "k": k, "max_new_tokens": k + 1, **sampling, **ONE_ROUND}
    counts = Counter(
        speculative_generate(target, torch.tensor([[0]]), generator=seeded(seed), **options).new_tokens[0]
        for seed in range(1200)
    )
    g, limit = g_statistic(counts, expected)
    assert g < limit


@pytest.mark.parametrize(
    ("wrong", "case", "distance"),
    [(GreedyWithSoftmax, "plain", 0.55 / 1.5), (FilteredWithUnfiltered, "filtered", 0.125)],
)
def test_a01_f01_f02_a_draft_with_another_law_is_that_far_off(wrong, case, distance):
    k, sampling, expected = LAWS[case]
    law = law_of_the_first_token(wrong(always(*Q)), k, sampling)
    assert total_variation(law, expected) == pytest.approx(distance)


# a02, f04: a residual of nothing (the rest: test_verify.py, test_generate_toy.py)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e-4, 1.0])
def test_a02_f04_in_block_verification_too_a_target_accepts_itself(toy_pair, temperature):
    target, _ = toy_pair
    options = {"temperature": temperature, "generator": seeded(0), "max_new_tokens": 100, "verify": "block"}
    prompt = random_prompt(target, 8, seeded(0))
    stats = speculative_generate(target, prompt, drafter=ModelDrafter(target), k=4, **options).stats
    assert stats.alpha >= 0.99


# a03: what counts as greedy, and as a valid option

INVALID = [
    *(("temperature", value) for value in (-1, float("nan"), float("inf"))),
    *(("top_p", value) for value in (-0.1, 1.5, float("nan"), 0)),
    ("top_k", -3),
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_a03_an_invalid_option_is_refused_by_both_decoders_before_any_forward(name, value):
    target, draft = scripted(), scripted(1)
    options = {"max_new_tokens": 5, "temperature": 1.0} | {name: value}
    with pytest.raises(InputError, match=rf"{name} is .*allowed: "):
        autoregressive_generate(target, PROMPT, **options)
    with pytest.raises(InputError, match=rf"{name} is .*allowed: "):
        speculative_generate(target, PROMPT, drafter=ModelDrafter(draft), k=2, **options)
    assert target.fed == draft.fed == []


# a04, f05: who drives the draws


class Uniforms(GeneratorChooser):
    def __init__(self, generator=None):
        super().__init__(generator)
        self.drawn = []

    def _uniform(self):
        self.drawn.append(super()._uniform())
        return self.drawn[-1]


def test_a04_f05_every_draw_of_a_generation_is_a_new_one(monkeypatch):
    """Also with seed and global state fixed: a loop that seeds anew before each test would draw one number again and again."""
    choosers = []
    monkeypatch.setattr(
        generate, "GeneratorChooser", lambda generator: choosers.append(Uniforms(generator)) or choosers[-1]
    )
    for verify in VERIFIERS:
        options = {"temperature": 1.0, "generator": seeded(3), "verify": verify, "max_new_tokens": 60}
        stats = speculative_generate(scripted(), PROMPT, drafter=ModelDrafter(scripted(1)), k=3, **options).stats
        drawn = choosers[-1].drawn
        assert len(drawn) == len(set(drawn)) >= sum(r.drafted + 1 for r in stats.rounds)


def test_a04_other_things_drawn_between_the_rounds_change_nothing():
    def disturb(_):
        torch.rand(3), random.random(), np.random.rand()

    def sampled(**options):
        options |= {"temperature": 1.0, "generator": seeded(3), "max_new_tokens": 64}
        return speculative_generate(scripted(), PROMPT, drafter=ModelDrafter(scripted(1)), k=4, **options)

    first, again = sampled(), sampled(on_round=disturb)
    assert (first.new_tokens, first.stats) == (again.new_tokens, again.stats)


# a07, f08: end tokens inside a block


@pytest.mark.parametrize("verify", VERIFIERS)
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_a07_an_end_token_of_the_prompt_ends_the_text_only_where_it_is_generated(k, verify):
    target = scripted()
    text = plain(target, PROMPT, 24)
    shared = [token for token in text if token in PROMPT[0]]
    assert shared
    for end in shared:
        options = {"drafter": ModelDrafter(target), "k": k, "max_new_tokens": 24, "eos_token_id": end, "verify": verify}
        assert speculative_generate(target, PROMPT, **options).new_tokens == text[: text.index(end) + 1]


def test_f08_an_end_token_ends_the_text_as_accepted_corrected_and_bonus_token_at_any_place_of_a_round():
    target, k = tiny_llama(), 3
    text = plain(target, PROMPT, 24)
    ends = set()
    for draft in (target, nearby(target, 0.05), nearby(target, 0.3)):
        for end in sorted(set(text)):
            seen = []
            options = {"drafter": ModelDrafter(draft), "k": k, "max_new_tokens": 24, "eos_token_id": end}
            result = speculative_generate(target, PROMPT, on_round=seen.append, **options)
            assert result.new_tokens == text[: text.index(end) + 1]
            ends.add((seen[-1].kinds[-1], len(seen[-1].tokens)))
    assert ends >= {("accepted", 1), ("accepted", 2), ("accepted", 3), ("corrected", 1), ("corrected", 2), ("bonus", 4)}


# a09: a draft with another tokenizer

WORDS = ["<unk>", *(f"word{i}" for i in range(1, 20))]
SWAPPED = [*WORDS[:7], WORDS[12], *WORDS[8:12], WORDS[7], *WORDS[13:]]


def save_model(folder, words=WORDS, end="word3", dtype=torch.float32, seed=0):
    tiny_gpt2(seed, vocabulary=len(words)).to(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=end).save_pretrained(folder)
    return str(folder)


def command(monkeypatch, module, *arguments):
    monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *arguments])
    module.main()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"words": SWAPPED}, "Token 7 is 'word7' to the target and 'word12' to the draft"),
        ({"end": "word4"}, "eos_token is 'word3' to the target and 'word4' to the draft"),
        ({}, None),
    ],
    ids=["two words swapped", "another end token", "a copy"],
)
def test_a09_a_draft_with_another_tokenizer_is_refused_by_every_command(tmp_path, monkeypatch, options, message):
    target, draft = save_model(tmp_path / "target"), save_model(tmp_path / "draft", **options)
    reached = []
    monkeypatch.setattr(benchmark, "measure", lambda *_: reached.append("benchmark") or {})
    monkeypatch.setattr(benchmark, "render", str)
    monkeypatch.setattr(chat, "speculative_generate", lambda *_, **__: reached.append("chat"))
    monkeypatch.setattr(chat, "summary", lambda *_: "")
    monkeypatch.chdir(ROOT)
    pair = ["--target", target, "--draft", draft]
    for module, arguments in ((benchmark, ["--backend", "hf", *pair, "--threads", "1"]), (chat, ["hello", *pair])):
        if message is None:
            command(monkeypatch, module, *arguments)
        else:
            with pytest.raises(InputError, match=message):
                command(monkeypatch, module, *arguments)
    assert reached == ([] if message else ["benchmark", "chat"])


# a10, f09: identical in float32; in bfloat16 identical but for near-ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a10_f09_twenty_prompts_of_the_toy_pair(dtype):
    target, drafter = toy_target().to(dtype), ModelDrafter(toy_draft().to(dtype))
    for seed in range(20):
        prompt = random_prompt(target, 8, seeded(seed))
        tokens = speculative_generate(target, prompt, drafter=drafter, k=4, max_new_tokens=64).new_tokens
        if dtype == torch.float32:
            assert tokens == plain(target, prompt, 64)
        else:
            assert largest_gap_in_ulps(target, prompt, tokens) <= NEAR_TIE_ULPS


def largest_gap_in_ulps(target, prompt, tokens):
    gaps = emitted_gaps(target, prompt, tokens)
    return float((gaps.below_best / gaps.ulp).max())


class OneTooFew(CachedModel):
    """A rollback leaves one rejected token in the cache."""

    def rollback(self, length):
        super().rollback(min(length + 1, self.length))


@pytest.mark.parametrize("seed", range(3))
def test_a10_the_limit_lets_no_fault_of_the_cache_pass(seed, monkeypatch):
    target = tiny_gpt2(seed).to(torch.bfloat16)
    drafter, prompt = ModelDrafter(nearby(target, 0.1)), random_prompt(target, 8, seeded(seed))
    options = {"drafter": drafter, "k": 4, "max_new_tokens": 40}
    sound = speculative_generate(target, prompt, **options).new_tokens
    assert largest_gap_in_ulps(target, prompt, sound) <= NEAR_TIE_ULPS
    monkeypatch.setattr(generate, "open_cache", OneTooFew)
    faulty = speculative_generate(target, prompt, **options).new_tokens
    assert largest_gap_in_ulps(target, prompt, faulty) > 10 * NEAR_TIE_ULPS


# a11, f12: clocks and devices, and what a comparison counts


@pytest.mark.parametrize("name", ["cpu", "cuda", "mps"])
def test_a11_f12_the_device_is_drained_right_before_every_reading_of_the_clock(name, monkeypatch):
    log = []
    monkeypatch.setattr(time, "perf_counter", lambda: log.append("clock") or float(len(log)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: log.append("cuda"))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: log.append("mps"))
    target, device = scripted(), torch.device(name)
    target.register_forward_hook(lambda *_: log.append("forward"))
    options = {"max_new_tokens": 4}
    for drafter, k in ((None, 0), (PromptLookupDrafter(), 2)):
        log.clear()
        time_generation(
            lambda done, drafter=drafter, k=k: speculative_generate(
                target, PROMPT, drafter=drafter, k=k, on_prefill=done, **options
            ),
            device,
        )
        drained = ["clock"] if name == "cpu" else [name, "clock"]
        forwards = ["forward"] * (len(log) - 3 * len(drained) - 1)
        assert forwards and log == [*drained, "forward", *drained, *forwards, *drained]
    log.clear()
    StepClock({"step": lambda: log.append("forward")}, device).sample(2)
    assert (
        log == ["forward", *drained, "forward", *drained] * 2
    )  # each timed call stands behind one that does not count


def test_f12_every_run_reads_its_own_prompt_and_all_methods_count_the_same_tokens():
    """No cache is handed from run to run, the prompt's tokens are not counted, and the baseline does one forward a token."""
    target = scripted()
    setting = Setting(2, SamplingConfig(), 9, [], 0, runs=2, warmup=1)
    for drafter in (None, PromptLookupDrafter()):
        method = timed.own_method(target, drafter, setting)
        for length in (3, 12):
            prompt = TextPrompt(0, "", torch.arange(length)[None] % 8)
            for _ in range(2):
                target.fed.clear()
                outcome = method(prompt)
                prefill, *forwards = target.fed
                assert (prefill.cached, len(prefill.tokens)) == ((), length - 1)
                assert (outcome.run.decoded, len(outcome.new_tokens)) == (9, 9)
                assert len(forwards) == (9 if drafter is None else outcome.stats.target_forwards)
                if drafter is None:
                    assert all(len(fed.tokens) == 1 for fed in forwards)


# a12: what is counted


class Coins:
    """Answers the tests as told, and draws the likeliest token."""

    def __init__(self, *answers):
        self.answers = iter(answers)

    def bernoulli(self, probability):
        return next(self.answers)

    def categorical(self, weights):
        return int(weights.argmax())


def test_a12_rounds_with_given_coins_are_counted_as_defined(monkeypatch):
    # Of [yes, no, yes] the third coin is never tossed. Then all three, then two proposals of which the first is rejected.
    coins = Coins(True, False, True, True, True, False, True)
    monkeypatch.setattr(generate, "GeneratorChooser", lambda generator: coins)
    options = {"drafter": ModelDrafter(always(*Q)), "k": 3, "max_new_tokens": 9, "temperature": 1.0}
    result = speculative_generate(always(*P), torch.tensor([[0]]), **options)
    rounds = result.stats.rounds

    def counted(count):
        record = acceptance_record([PromptResult(0, "", type(result.stats)(rounds[:count]))])
        assert 0 <= record["draft_acceptance_rate"] <= 1 and 0 <= record["alpha"] <= 1
        return [
            record[key] for key in ("accepted", "proposed", "new_tokens", "draft_acceptance_rate", "tested", "alpha")
        ]

    assert counted(2) == [4, 6, 6, pytest.approx(0.667, abs=1e-3), 5, 0.8]
    assert counted(3) == [4, 8, 7, 0.5, 6, pytest.approx(4 / 6)]
    assert result.stats.new_tokens == len(result.new_tokens) == 9


def test_a12_the_readme_defines_the_two_rates_as_they_are_counted():
    terms = dict(re.findall(r"(?m)^\| ([^|]+?) \| (.+) \|$", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert terms["acceptance rate"].startswith("accepted / *proposed*")
    assert terms["α"].startswith("accepted / *tested*")
    assert "(1 − α^(k+1)) / (1 − α)" in terms["α"]
    assert "bonus token included" in terms["τ"]


# a13, f13: settings on their way, by command line and by parameter file (by function argument: test_generate.py)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder with prompts and params.yaml, and a pair that drafts for itself; `lab(module, ...)` runs a script there."""
    target = tiny_gpt2()
    prompts = ({"question_id": i, "category": "qa", "turns": [f"Question {i}?"]} for i in range(4))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    calls = []
    for module in (sweep, benchmark, chat):
        pair = LoadedPair(target, ModelDrafter(target), 0, None, [], None, None)
        monkeypatch.setattr(module, "load_pair", lambda *_, pair=pair, **__: pair)
        owner = methods if module is benchmark else module

        def noted(*arguments, **options):
            calls.append((options, speculative_generate(*arguments, **options)))
            return calls[-1][1]

        monkeypatch.setattr(owner, "speculative_generate", noted)
    monkeypatch.setattr(timed, "COST_RUNS", 1)
    monkeypatch.setattr(benchmark, "encode_prompt", lambda tokenizer, prompt: PROMPT)
    monkeypatch.setattr(sweep, "encode_prompt", lambda tokenizer, prompt: PROMPT)
    monkeypatch.setattr(chat, "encode_conversation", lambda *_: PROMPT)
    monkeypatch.setattr(
        chat, "RoundPrinter", lambda *_: SimpleNamespace(on_round=lambda _: None, end=lambda: None, legend="")
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    cells.write_json(cells.HARDWARE, {"fingerprint": {"threads": 1, "cpu": "x"}})

    def run(module, *arguments, **changes):
        """`changes` are keys of decoding, and max_new_tokens; returns the calls of the loop, and the record if there is one."""
        params = YAML(typ="safe").load(fake_cells.PARAMS)
        for name, value in changes.items():
            params["study" if name == "max_new_tokens" else "decoding"][name] = value
        params["timing"] |= {"device": "cpu", "runs": 2}
        params["study"]["prompts_per_category"] = 1
        params["studies"] = {"fake": params["study"]}
        (tmp_path / "params.yaml").write_text(json.dumps(params), encoding="utf-8")
        calls.clear()
        command(monkeypatch, module, *arguments)
        out = tmp_path / "out.json"
        return list(calls), cells.read_json(out) if out.exists() else None

    return run


def assert_k_was_drafted(calls, k, tokens):
    assert calls
    for _, result in calls:
        drafted = [r.drafted for r in result.stats.rounds]
        assert drafted[:-1] == [k] * (len(drafted) - 1) and drafted[-1] <= k
        assert result.stats.new_tokens == tokens


HF = ["--backend", "hf", "--target", "small", "--prompts-per-category", "1"]


@pytest.mark.parametrize("k", range(1, 9))
def test_a13_f13_k_reaches_the_draft_by_command_line_and_by_parameter_file(lab, k):
    calls, _ = lab(chat, "hello", "--k", str(k), "--max-new-tokens", "60")
    assert_k_was_drafted(calls, k, 60)
    calls, record = lab(sweep, "--pair", "small_int8", "--k", str(k), "--out", "out.json", max_new_tokens=60)
    assert_k_was_drafted(calls, k, 60)
    assert record["k"] == k and max(record["proposed_per_position"]) > 0 and len(record["proposed_per_position"]) == k
    calls, record = lab(
        sweep, "--pair", "small_int8", "--temperature", "1.0", "--out", "out.json", max_new_tokens=60, k=k
    )
    assert_k_was_drafted(calls, k, 60)
    assert (record["k"], record["temperature"]) == (k, 1.0)


def test_a13_f13_k_reaches_a_timed_run_by_command_line_and_by_parameter_file(lab):
    run = ["--max-new-tokens", "20", "--runs", "2", "--json", "out.json"]
    calls, record = lab(benchmark, *HF, "--k", "3", *run)
    assert_k_was_drafted(calls, 3, 20)
    assert (record["k"], record["max_new_tokens"]) == (3, 20)
    cell = ["--cell", "--backend", "hf", "--pair", "small_int8", "--json", "out.json"]
    calls, record = lab(benchmark, *cell, "--k", "5", max_new_tokens=14)
    assert_k_was_drafted(calls, 5, 14)
    assert (record["k"], record["max_new_tokens"]) == (5, 14)


CHANGES = [
    ({}, {"temperature": 1.3}),
    ({"temperature": 1.3}, {"top_k": 2}),
    ({"temperature": 1.3}, {"top_p": 0.3}),
    ({"temperature": 1.3}, {"seed": 5}),
    ({}, {"max_new_tokens": 9}),
]


@pytest.mark.parametrize(("base", "change"), CHANGES, ids=str)
def test_a13_f13_every_other_option_reaches_the_loop_and_changes_the_text_by_every_route(lab, base, change):
    routes = {
        "chat": lambda options: lab(chat, "hello", *flags(options)),
        "benchmark": lambda options: lab(benchmark, *HF, "--runs", "2", *flags(options)),
        "sweep": lambda options: lab(sweep, "--pair", "small_int8", "--k", "4", "--out", "out.json", **options),
        "cell": lambda options: lab(
            benchmark, "--cell", "--backend", "hf", "--pair", "small_int8", "--k", "4", "--json", "out.json", **options
        ),
    }
    for name, route in routes.items():
        calls, _ = route({"max_new_tokens": 12} | base)
        text = calls[0][1].new_tokens
        calls, record = route({"max_new_tokens": 12} | base | change)
        asked, result = calls[0]
        assert result.new_tokens != text
        assert asked.items() >= {key: value for key, value in change.items() if key != "seed"}.items()
        if name in ("sweep", "cell"):
            assert record.items() >= change.items()


def flags(options):
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


# a14: half a model


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a14_a_folder_with_some_of_its_files_is_no_model_until_the_others_come(tmp_path):
    """Copying was stopped after the first of the files, then goes on. (Without the small files a folder may be whole.)"""
    whole = Path(save_model(tmp_path / "whole"))
    folder = tmp_path / "partial"
    folder.mkdir()
    needed = ["config.json", "model.safetensors", "tokenizer.json"]
    for file in [*sorted({path.name for path in whole.iterdir()} - set(needed)), *needed]:
        with pytest.raises(InputError):
            load(folder, "lookup")
        (folder / file).write_bytes((whole / file).read_bytes())
    load(folder, "lookup")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a14_a_file_cut_in_half_is_noticed_and_the_folder_named(tmp_path, file):
    for role in ("target", "draft"):
        folders = {name: Path(save_model(tmp_path / role / name)) for name in ("target", "draft")}
        cut(folders[role] / file)
        with pytest.raises(InputError, match=re.escape(str(folders[role]))) as caught:
            load(folders["target"], str(folders["draft"]))
        assert "\n" not in str(caught.value)


def load(target, draft, dtype=torch.float32):
    pair = Pair.model_construct(target=str(target), draft=str(draft))
    return load_pair(pair, {}, device=CPU, dtype=dtype)


# a15: the dtype of the weights is the one asked for, whatever the files and transformers say


def save_in(folder, stored):
    """A checkpoint whose weights, or whose configuration alone, are in half precision."""
    save_model(folder, dtype=torch.float16 if stored == "float16" else torch.float32, seed=len(stored))
    if stored == "bfloat16 by name":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}), encoding="utf-8")
    return str(folder)


STORED = ["float16", "bfloat16 by name"]


def dtypes(model):
    return {parameter.dtype for parameter in model.parameters()}


@pytest.fixture
def brief(monkeypatch):
    """A benchmark of one prompt that takes seconds."""
    monkeypatch.setattr(timed, "COST_RUNS", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(benchmark, "encode_prompt", lambda tokenizer, prompt: torch.tensor([[5, 6, 7]]))
    monkeypatch.setattr(benchmark, "select_prompts", lambda prompts, *_: prompts[:1])
    return ["--backend", "hf", "--max-new-tokens", "4", "--runs", "2", "--k", "2", "--device", "cpu"]


@pytest.mark.parametrize("stored", STORED)
def test_a15_without_a_dtype_both_models_are_loaded_in_float32_and_the_record_says_so(
    tmp_path, brief, stored, monkeypatch
):
    one, other = save_in(tmp_path / "one", stored), save_in(tmp_path / "other", "float32")
    seen = []
    honest = bench.compare
    monkeypatch.setattr(bench, "compare", lambda *a, **o: seen.append((a[0], a[1].model)) or honest(*a, **o))
    for target, draft in ((one, other), (other, one)):
        command(
            monkeypatch, benchmark, *brief, "--target", target, "--draft", draft, "--json", str(tmp_path / "out.json")
        )
        assert dtypes(seen[-1][0]) == dtypes(seen[-1][1]) == {torch.float32}
        record = cells.read_json(tmp_path / "out.json")
        assert (record["dtype"], record["draft_dtype"]) == ("float32", "float32")


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a15_the_dtype_asked_for_is_that_of_both_models(tmp_path, stored, asked):
    one, other = save_in(tmp_path / "one", stored), save_in(tmp_path / "other", "float32")
    for target, draft in ((one, other), (other, one)):
        pair = load(target, draft, asked)
        assert dtypes(pair.target) == dtypes(pair.drafter.model) == {asked}
        speculative_generate(pair.target, torch.tensor([[5, 6]]), drafter=pair.drafter, k=2, max_new_tokens=4)


def test_a15_a_draft_in_another_dtype_is_recorded_and_shown(tmp_path, brief, monkeypatch, capsys):
    target = save_in(tmp_path / "one", "float16")
    out = str(tmp_path / "out.json")
    command(monkeypatch, benchmark, *brief, "--target", target, "--draft", "bf16", "--json", out)
    record = cells.read_json(out)
    assert (record["dtype"], record["draft_dtype"]) == ("float32", "bfloat16")
    assert "bfloat16" in capsys.readouterr().out


def test_a15_a_dtype_that_is_not_known_is_refused_with_those_that_are(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        command(monkeypatch, benchmark, "--dtype", "float8")
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(name in message for name in ("float8", "float32", "bfloat16", "float16"))


# a16: a device that computes something else


class OnTheDevice:
    """A hook that goes wrong on the device, which bfloat16 stands for here, and does nothing in float32 on the CPU."""

    def __init__(self, effect):
        self.effect = effect

    def __call__(self, module, *arguments):
        return self.effect(module, *arguments) if next(module.parameters()).dtype == torch.bfloat16 else None


def noise(module, arguments, output):
    """Logits off by about 3, the same in every call."""
    return 3 * torch.sin(torch.arange(output.numel(), dtype=torch.float32)).view_as(output).to(output.dtype) + output


def swap_blocks(module, *_):
    module.h[0], module.h[1] = module.h[1], module.h[0]


def swapped_blocks(model):
    """While the model computes."""
    model.transformer.register_forward_pre_hook(OnTheDevice(swap_blocks))
    model.transformer.register_forward_hook(OnTheDevice(swap_blocks))


PERTURBATIONS = {
    "noise": lambda model: model.lm_head.register_forward_hook(OnTheDevice(noise)),
    "two blocks swapped": swapped_blocks,
}


def on_a_device(seed=0):
    """The toy target in bfloat16, as if that were another device: unlike float32 on the CPU, it is not its own reference."""
    return toy_target(seed).to(torch.bfloat16)


def test_a16_a_sound_device_passes_quickly():
    model = on_a_device()
    start = time.perf_counter()
    error = check_device(model, random_prompt(model, 12, seeded(0)))
    assert time.perf_counter() - start < 5
    assert 0 < error < DEVICE_ERROR[torch.bfloat16] / 2


def test_a16_float32_on_the_cpu_is_the_reference_itself(monkeypatch):
    model = toy_target()
    monkeypatch.setattr(identity, "_float32_on_the_cpu", lambda _: pytest.fail("moved"))
    assert check_device(model, random_prompt(model, 12, seeded(0))) == 0.0


@pytest.mark.parametrize("name", PERTURBATIONS)
def test_a16_a_device_that_computes_something_else_agrees_with_itself_and_is_refused(name):
    model = on_a_device()
    PERTURBATIONS[name](model)
    prompt = random_prompt(model, 12, seeded(0))
    speculative = speculative_generate(model, prompt, drafter=ModelDrafter(model), k=3, max_new_tokens=20)
    assert speculative.stats.alpha > 0.9  # what a comparison on the device alone sees
    with pytest.raises(InputError, match=r"differ from the CPU's by .*torch .*allowed: at most"):
        check_device(model, prompt)


@pytest.mark.parametrize("wrong", ["target", "draft"])
def test_a16_a_benchmark_checks_the_device_before_it_times_anything(wrong, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(timed, "COST_RUNS", 1)
    monkeypatch.setattr(benchmark, "TOY_PROMPTS", 1)
    toy = ["--backend", "toy", "--dtype", "bfloat16", "--device", "auto", "--max-new-tokens", "4", "--runs", "2"]
    monkeypatch.setattr(benchmark, "resolve_device", lambda name: CPU)
    out = tmp_path / "out.json"
    command(monkeypatch, benchmark, *toy, "--json", str(out))
    record = cells.read_json(out)
    assert record["torch"] == torch.__version__ and re.search(r"\d", record["os"])
    assert 0 < record["device_logit_error"] < DEVICE_ERROR[torch.bfloat16]
    out.unlink()

    def perturbed(seed=0):
        model = (toy_target if wrong == "target" else toy_draft)(seed)
        model.lm_head.register_forward_hook(OnTheDevice(noise))
        return model

    monkeypatch.setattr(benchmark, f"toy_{wrong}", perturbed)
    monkeypatch.setattr(bench, "compare", lambda *_: pytest.fail("timed"))
    with pytest.raises(InputError, match="differ from the CPU's"):
        command(monkeypatch, benchmark, *toy, "--json", str(out))
    assert not out.exists()


# a17: results that belong to other packages (the rest: test_pipeline.py, test_dvc_yaml.py)


def test_a17_timed_cells_depend_on_the_versions_of_the_packages_that_they_time():
    fingerprint = describe(None)["fingerprint"]
    assert {name: fingerprint.get(name) for name in ("torch", "transformers")} == {
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


# a19: undefined figures


def refuse(constant):
    raise ValueError(f"{constant} is not JSON")


def test_a19_nothing_to_divide_by_gives_null_in_strict_json(tmp_path):
    target = scripted()
    silent = SimpleNamespace(
        begin=lambda *_: None, propose=lambda *_: Draft((), None), rollback=lambda *_: None, check=lambda *_: None
    )
    for drafter, k, tokens in ((ModelDrafter(target), 0, 5), (silent, 3, 5), (ModelDrafter(target), 3, 0)):
        result = speculative_generate(target, PROMPT, drafter=drafter, k=k, max_new_tokens=tokens)
        cells.write_json(tmp_path / "cell.json", acceptance_record([PromptResult(0, "qa", result.stats)]))
        record = json.loads((tmp_path / "cell.json").read_text(encoding="utf-8"), parse_constant=refuse)
        assert (record["new_tokens"], record["proposed"]) == (tokens, 0)
        assert record["alpha"] is record["alpha_overlap"] is record["draft_acceptance_rate"] is None
        assert record["mean_acceptance_length"] == (1 if tokens else None)


def test_a19_equal_start_and_end_times_give_null(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(timed, "COST_RUNS", 1)
    target = tiny_gpt2()
    setting = Setting(2, SamplingConfig(), 4, [], 0, runs=2, warmup=0)
    record = timed.compare(target, ModelDrafter(target), [TextPrompt(0, "qa", PROMPT)], setting, "")
    json.dumps(record, allow_nan=False)
    for key in ("speedup", "speedup_lo", "ar_tokens_per_second", "predicted_speedup", "noise_floor"):
        assert record[key] is None


# f02: the laws that tests of losslessness are made on do not agree anyway


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("vocabulary", [3, 4, 6])
def test_f02_the_tables_of_the_law_tests_differ_and_every_branch_has_its_share(vocabulary, zeros):
    for p_seed, q_seed in ((0, 1), (4, 5)):
        p, q = (random_table(vocabulary, seed, zeros=zeros).flatten(0, 1) for seed in (p_seed, q_seed))
        overlap = torch.minimum(p, q).sum(dim=-1)
        assert 0.2 < overlap.mean() < 0.9
        assert ((p - q).clamp_min(0).sum(dim=-1) > 0).all()  # a residual is left everywhere
        if zeros:
            assert ((p == 0) & (q > 0)).any() and ((p > 0) & (q == 0)).any()


# f03: u = 0


@pytest.mark.parametrize("verify", VERIFIERS)
def test_f03_a_token_that_the_target_excludes_is_not_accepted_even_at_u_0(verify, monkeypatch):
    chooser = GeneratorChooser(seeded(0))
    monkeypatch.setattr(chooser, "_uniform", lambda: 0.0)
    p, q = torch.tensor([[0.0, 1.0, 0.0]] * 3), torch.tensor([[0.5, 0.25, 0.25]] * 2)
    verdict = VERIFIERS[verify]([0, 2], p, q, chooser)
    assert (verdict.accepted, verdict.token) == (0, 1)


# f06: the order of the filters


def test_f06_temperature_comes_before_the_nucleus():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    nucleus_last = to_probs(logits, SamplingConfig(0.3, top_p=0.7))
    assert nucleus_last.tolist() == [1, 0, 0]  # at T = 0.3 the first token alone has 0.81
    first = to_probs(to_probs(logits, SamplingConfig(1.0, top_p=0.7)).log(), SamplingConfig(0.3))
    assert (first > 0).tolist() == [True, True, False]  # the other order


# f10: a draft that stops early keeps its last token


def test_f10_the_token_behind_which_a_draft_stops_is_kept():
    """Dropping it for its own probability would bias the text; that the law is the target's: test_exact_laws.py."""
    target, draft = scripted(), scripted(1)
    spy = Spy(ModelDrafter(draft, confidence_threshold=0.15))
    speculative_generate(target, PROMPT, drafter=spy, k=4, max_new_tokens=80, temperature=1.0, generator=seeded(0))
    lengths = set()
    for (_, limit), proposed in zip(spy.asked, spy.drafts, strict=True):
        chances = [float(law[token]) for law, token in zip(proposed.probs, proposed.tokens, strict=True)]
        assert all(chance >= 0.15 for chance in chances[:-1])
        assert chances and (chances[-1] < 0.15 or len(chances) == limit)
        lengths.add(len(chances))
    assert {1, 2, 3, 4} <= lengths


# All of them


def test_every_pitfall_has_a_test():
    names = [
        node.name
        for file in sorted(Path(__file__).parent.glob("test_*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    found = {number for name in names for number in re.match(r"test_((?:[af]\d\d_)*)", name)[1].split("_") if number}
    wanted = {f"a{n:02}" for n in range(1, 21)} | {f"f{n:02}" for n in range(1, 14)}
    assert wanted - found == set() == found - wanted
