"""One run in which kernels, k and baselines are compared: who takes part, in which turns, and what the figures are of."""

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_cells
import pytest
import torch
from stand_ins import disagreeing, nearby, tiny_gpt2, tiny_llama

from pipeline import cells, cli, comparison, contest, methods
from pipeline.contest import adaptive, compete, engines_of
from pipeline.methods import Setting, TextPrompt
from pipeline.standings import Contestant, StepCosts, line_up, standings
from pipeline.weights import LoadedPair
from specdec.drafters import Draft, ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.generate import speculative_generate
from specdec.policy import AdaptiveK
from specdec.sampling import SamplingConfig
from specdec.stats import AcceptanceStats, Round
from specdec.theory import optimal_k
from specdec.timing import TimedRun

SETTING = Setting(2, SamplingConfig(), max_new_tokens=8, end_tokens=[], seed=0, runs=2, warmup=1)
CONTESTANTS = [
    *("ar default", "ar joined", "spec default k=2", "spec joined k=2", "spec joined k=3", "spec joined k=auto"),
    *("hf", "hf_assisted k=2"),
]
FLAT = """
fastest_plain fastest_speculative fastest_kernels best_over_same_kernels best_fixed_k speedup_same_kernels
speedup_same_kernels_lo speedup_same_kernels_hi speedup_over_fastest speedup_over_fastest_lo speedup_over_fastest_hi
speedup_over_hf speedup_over_hf_lo speedup_over_hf_hi speedup_over_hf_assisted speedup_over_hf_assisted_lo
speedup_over_hf_assisted_hi ar_over_hf ar_over_hf_lo ar_over_hf_hi auto_over_best_fixed_k auto_over_best_fixed_k_lo
auto_over_best_fixed_k_hi measured_over_predicted measured_over_predicted_lo measured_over_predicted_hi noise_floor
noise_floor_lo noise_floor_hi identical identical_prompts ties unrepeatable_runs prompts
"""


class Silent:
    """A drafter that never proposes, and that Hugging Face does not have."""

    def begin(self, prompt, sampling):
        pass

    def propose(self, context, max_tokens, chooser):
        return Draft((), None)

    def rollback(self, length):
        pass


def prompt_of(length, seed):
    return torch.randint(40, (1, length), generator=torch.Generator().manual_seed(seed))


PROMPTS = [TextPrompt(i, "qa", prompt_of(length, i)) for i, length in enumerate((5, 9, 3))]


# Who takes part


def test_the_line_up_has_each_kernels_and_each_k_of_the_last_ones_and_nobody_twice():
    names = [x.name for x in line_up(["default", "joined"], 2, [2, 3, "auto"], assisted=True)]
    assert names == CONTESTANTS
    assert [x.name for x in line_up(["default"], 4, [4], assisted=False)] == ["ar default", "spec default k=4", "hf"]


def test_kernels_that_do_not_run_the_pair_are_left_out_with_the_reason():
    target = tiny_gpt2()
    drafter = ModelDrafter(nearby(target, 0.1))
    engines, refusals = engines_of(target, drafter, ["joined", "default", "packed"], PROMPTS[0])
    assert list(engines) == ["default", "packed"]
    assert refusals == {"joined": refusals["joined"]} and "'joined' for a GPT2LMHeadModel" in refusals["joined"]
    with pytest.raises(
        InputError, match="none of the kernels to compare run this pair: kernels is 'joined' for a GPT2"
    ):
        engines_of(target, drafter, ["joined"], PROMPTS[0])


def test_kernels_that_compute_something_else_stop_the_run(monkeypatch):
    target = tiny_llama()
    monkeypatch.setattr(methods, "run_with", lambda model, kernels, **options: nearby(model, 0.5))
    with pytest.raises(InputError, match="the logits of LlamaForCausalLM as a LlamaForCausalLM differ"):
        engines_of(target, PromptLookupDrafter(), ["joined"], PROMPTS[0])


def test_k_auto_knows_the_costs_and_starts_from_the_expected_acceptance():
    costs = StepCosts(0.1, (1.0, 1.1, 1.2, 1.3, 1.4))
    for alpha in (0.0, 0.5, 0.9):
        policy = adaptive(costs, alpha)
        assert policy.max_k == 4
        assert policy.next_k(9) == optimal_k(alpha, 0.1, costs.v)
    assert adaptive(StepCosts(0.0, (0.0, 0.0)), 0.5).next_k(9) == 1  # a clock that stands still


# The figures, by hand


def runs(tokens, *decodes):
    return [TimedRun(1.0, decode, tokens, tokens) for decode in decodes]


def stats(*rounds):
    """(drafted, emitted) of each round."""
    return AcceptanceStats(tuple(Round(d, d, e - 1, e, (1.0,) * min(e, d)) for d, e in rounds))


def test_ratios_are_of_seconds_per_token_and_name_what_they_are_over():
    line = line_up(["default", "joined"], 2, [3, "auto"], assisted=True)
    seconds = {
        "ar default": 12.0,
        "ar joined": 8.0,
        "spec default k=2": 6.0,
        "spec joined k=2": 5.0,
        "spec joined k=3": 4.0,
        "spec joined k=auto": 4.4,
        "hf": 10.0,
        "hf_assisted k=2": 9.0,
    }
    prompts = [{name: runs(12, value, value, value) for name, value in seconds.items()}] * 2
    of = {x.name: [stats((3, 4), (3, 4), (3, 4))] * 2 for x in line if x.method == "spec"}
    costs = {"default": StepCosts(0.25, (1.0, 1.0, 1.0, 1.0)), "joined": StepCosts(0.1, (1.0, 1.2, 1.4, 1.6))}
    record = standings(line, prompts, of, costs)
    json.dumps(record, allow_nan=False)
    rows = {row["name"]: row for row in record["contestants"]}
    assert list(rows) == [x.name for x in line] and len({frozenset(row) for row in rows.values()}) == 1
    for name, value in seconds.items():
        assert rows[name]["tokens_per_second"] == pytest.approx(12 / value)
        assert rows[name]["end_to_end_tokens_per_second"] == pytest.approx(12 / (value + 1))
    assert rows["spec default k=2"]["speedup"] == pytest.approx(12 / 6)
    assert rows["spec joined k=2"]["speedup"] == pytest.approx(8 / 5)
    assert rows["spec default k=2"]["speedup_over_fastest"] == pytest.approx(8 / 6)
    assert rows["spec default k=2"]["speedup_over_hf"] == pytest.approx(10 / 6)
    assert rows["spec default k=2"]["speedup_over_hf_assisted"] == pytest.approx(9 / 6)
    assert rows["ar default"]["speedup_over_hf"] == pytest.approx(10 / 12)
    assert rows["ar default"]["speedup"] is rows["hf"]["speedup_over_hf"] is rows["hf"]["predicted_speedup"] is None
    assert rows["spec joined k=3"]["predicted_speedup"] == pytest.approx(4 / (3 * 0.1 + 1.6))
    assert rows["spec default k=2"]["predicted_speedup"] == pytest.approx(4 / (3 * 0.25 + 1))
    assert rows["spec joined k=3"]["measured_over_predicted"] == pytest.approx(2 / (4 / 1.9))
    assert rows["spec joined k=3"]["mean_acceptance_length"] == 4
    assert (record["fastest_plain"], record["fastest_speculative"]) == ("ar joined", "spec joined k=3")
    assert record["fastest_kernels"] == "joined"
    assert record["speedup_same_kernels"] == pytest.approx(2) and record["best_over_same_kernels"] == "spec default k=2"
    assert record["speedup_over_fastest"] == pytest.approx(2)
    assert record["speedup_over_hf"] == pytest.approx(10 / 4)
    assert record["speedup_over_hf_assisted"] == pytest.approx(9 / 4)
    assert record["ar_over_hf"] == pytest.approx(10 / 8)
    assert record["measured_over_predicted"] == rows["spec joined k=3"]["measured_over_predicted"]
    assert (record["best_fixed_k"], record["auto_over_best_fixed_k"]) == (3, pytest.approx(4 / 4.4))
    assert record["noise_floor"] == pytest.approx(1)
    assert record["speedup_over_fastest_lo"] is record["measured_over_predicted_lo"] is None  # two prompts


def test_hugging_face_may_be_the_fastest_without_a_draft():
    line = line_up(["default"], 2, [2], assisted=False)
    prompts = [{"ar default": runs(4, 4, 4), "spec default k=2": runs(4, 2, 2), "hf": runs(4, 3, 3)}]
    record = standings(line, prompts, {"spec default k=2": [stats((2, 2), (2, 2))]}, {})
    assert record["fastest_plain"] == "hf" and record["speedup_over_fastest"] == pytest.approx(3 / 2)
    assert record["speedup_over_hf_assisted"] is record["auto_over_best_fixed_k"] is record["best_fixed_k"] is None
    assert record["measured_over_predicted"] is None  # nobody measured the costs


def test_intervals_are_over_prompts_and_the_prediction_resamples_its_acceptance_with_the_times():
    line = line_up(["default"], 2, ["auto"], assisted=False)
    prompts, of = [], {"spec default k=2": [], "spec default k=auto": []}
    for i in range(12):
        rounds = [(2, 1 + (i + j) % 3) for j in range(3)]
        tokens, steps = sum(e for _, e in rounds), 3 * (2 * 0.5 + 1.5)
        prompts.append(
            {
                "ar default": runs(tokens, *[float(tokens)] * 3),
                "spec default k=2": runs(tokens, *[steps * 1.25] * 3),
                "spec default k=auto": runs(tokens, *[steps * (1.1 + 0.01 * i)] * 3),
                "hf": runs(tokens, *[float(tokens)] * 3),
            }
        )
        of["spec default k=2"].append(stats(*rounds))
        of["spec default k=auto"].append(stats(*rounds))
    record = standings(line, prompts, of, {"default": StepCosts(0.5, (1.0, 1.25, 1.5))})
    row = next(row for row in record["contestants"] if row["name"] == "spec default k=2")
    for end in ("", "_lo", "_hi"):  # whatever was accepted, rounds took a quarter longer than predicted
        assert row[f"measured_over_predicted{end}"] == pytest.approx(0.8)
    assert record["auto_over_best_fixed_k_lo"] < record["auto_over_best_fixed_k"] < record["auto_over_best_fixed_k_hi"]


# The run


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def drafter(target):
    return ModelDrafter(nearby(target, 0.2))


def measured(target, drafter, setting=SETTING, kernels=("default", "joined"), lengths=(2, 3, "auto"), prompts=PROMPTS):
    record = compete(target, drafter, prompts, setting, kernels, lengths, 0.8, "test")
    json.dumps(record, allow_nan=False)
    return record


@pytest.fixture(scope="module")
def record(target, drafter):
    return measured(target, drafter)


def test_every_contestant_is_timed_on_every_prompt_and_its_output_checked(record):
    assert set(FLAT.split()) <= record.keys()
    assert [row["name"] for row in record["contestants"]] == CONTESTANTS
    for row in record["contestants"]:
        assert (row["identical"], row["identical_prompts"], row["ties"]) == ("identical", 3, 0)
        assert row["unrepeatable_runs"] == 0 and row["tokens_per_second"] > 0
    assert (record["identical"], record["identical_prompts"]) == ("identical", 18)  # ours
    assert record["refusals"] == []
    for sample, prompt in zip(record["samples"], PROMPTS, strict=True):
        assert sample["prompt_tokens"] == prompt.input_ids.shape[1]
        assert sample["new_tokens"] == dict.fromkeys(CONTESTANTS, 8)
        for part in ("prefill_seconds", "decode_seconds"):
            assert list(sample[part]) == CONTESTANTS
            assert all(len([float(s) for s in text.split()]) == 2 for text in sample[part].values())


def test_costs_are_those_of_each_kernels_up_to_the_longest_draft(record):
    for entry, kernels in zip(record["kernels_run"], ("default", "joined"), strict=True):
        assert entry["kernels"] == kernels and len(entry["target_seconds"]) == len(entry["verify_cost_ratios"]) == 4
        assert entry["verify_cost_ratios"][0] == 1
        assert entry["cost_coefficient"] == entry["draft_seconds"] / entry["target_seconds"][0]
        assert entry["kernels_logit_error"] < 1e-3
    assert record["kernels_run"][0]["draft_kernels_logit_error"] == 0  # transformers' model itself


def test_the_acceptance_of_a_fixed_k_is_that_of_the_loop(record, target, drafter):
    rows = {row["name"]: row for row in record["contestants"]}
    for k in (2, 3):
        pooled = AcceptanceStats()
        for prompt in PROMPTS:
            pooled += speculative_generate(target, prompt.input_ids, drafter=drafter, k=k, max_new_tokens=8).stats
        assert rows[f"spec joined k={k}"]["mean_acceptance_length"] == pooled.mean_acceptance_length
        assert rows[f"spec joined k={k}"]["alpha"] == pooled.alpha


def test_the_policy_decides_for_auto_and_starts_each_text_anew(target, drafter, monkeypatch):
    begun, asked = [], []

    class Never(AdaptiveK):
        def begin(self):
            begun.append(1)
            super().begin()

        def next_k(self, limit):
            asked.append(limit)
            return 0

    monkeypatch.setattr(contest, "adaptive", lambda costs, alpha: Never(costs.c, costs.v, alpha))
    found = measured(target, drafter)
    row = next(row for row in found["contestants"] if row["name"] == "spec joined k=auto")
    assert row["mean_drafted_per_round"] == 0 and row["mean_acceptance_length"] == 1 and row["alpha"] is None
    texts = SETTING.warmup + len(PROMPTS) * SETTING.runs
    assert len(begun) == 1 + texts and Counter(asked) == dict.fromkeys(range(8), texts)


def test_runs_take_turns_there_and_back_after_a_warm_up(target, drafter, monkeypatch):
    calls = []

    def recording(make):
        def wrapped(*arguments):
            method = make(*arguments)
            return method and (lambda prompt: calls.append((id(method), prompt.question_id)) or method(prompt))

        return wrapped

    for name in ("own_method", "hugging_face_method", "assisted_method"):
        monkeypatch.setattr(contest, name, recording(getattr(contest, name)))
    measured(target, drafter)
    there = [method for method, _ in calls[:8]]
    assert len(set(there)) == 8 and {prompt for _, prompt in calls[:8]} == {0}
    assert calls[8:] == [(method, p.question_id) for p in PROMPTS for method in [*there, *there[::-1]]]


def test_a_draft_that_copies_text_competes_too(target):
    found = measured(target, PromptLookupDrafter())
    assert [row["name"] for row in found["contestants"]] == CONTESTANTS and found["identical"] == "identical"
    assert all(entry["draft_kernels_logit_error"] is None for entry in found["kernels_run"])


def test_where_hugging_face_cannot_use_the_draft_the_keys_are_the_same(target, record):
    found = measured(target, Silent(), kernels=("default",), lengths=(2,))
    assert [row["name"] for row in found["contestants"]] == ["ar default", "spec default k=2", "hf"]
    assert found.keys() == record.keys() and found["speedup_over_hf_assisted"] is None
    assert found["contestants"][0].keys() == record["contestants"][0].keys()


def test_sampled_runs_are_decoded_once_more_greedily(target, drafter):
    found = measured(target, drafter, replace(SETTING, sampling=SamplingConfig(1.0)))
    rows = {row["name"]: row for row in found["contestants"]}
    assert found["identical"] == rows["spec joined k=auto"]["identical"] == "identical"
    assert rows["hf"]["identical"] is rows["hf_assisted k=2"]["identical_prompts"] is None
    assert found["unrepeatable_runs"] == 0


def test_one_new_token_is_enough(target, drafter):
    found = measured(target, drafter, replace(SETTING, max_new_tokens=1))
    assert (
        found["identical"] == "identical" and found["ar_over_hf"] is None
    )  # Hugging Face's came with the prompt's pass


def test_a19_a_clock_that_stands_still_stops_nothing(target, drafter, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    found = measured(target, drafter)
    assert found["speedup_over_fastest"] is found["measured_over_predicted"] is found["auto_over_best_fixed_k"] is None
    assert found["kernels_run"][0]["cost_coefficient"] is None


def test_faulty_output_of_one_contestant_stops_the_run(target, drafter, monkeypatch):
    honest = contest.own_method

    def faulty(*arguments):
        method = honest(*arguments)

        def wrong(prompt):
            outcome = method(prompt)
            is_wrong = arguments[3] == 3 and prompt.question_id == 1
            others = tuple((token + 1) % 40 for token in outcome.new_tokens)
            return replace(outcome, new_tokens=others) if is_wrong else outcome

        return wrong

    monkeypatch.setattr(contest, "own_method", faulty)
    message = (
        "greedy output of spec joined k=3 for prompt 1 differs from plain decoding at new token 0 with a logit gap"
    )
    with pytest.raises(InputError, match=message):
        measured(target, drafter)
    found = measured(tiny_llama().bfloat16(), PromptLookupDrafter())  # told, where sums are coarse
    row = next(row for row in found["contestants"] if row["name"] == "spec joined k=3")
    assert row["identical_prompts"] < 3


def test_other_output_of_hugging_face_is_told_and_stops_nothing(target, drafter, monkeypatch):
    honest = contest.hugging_face_method

    def other(*arguments):
        method = honest(*arguments)
        return lambda prompt: (o := method(prompt)) and replace(o, new_tokens=o.new_tokens[:-1])

    monkeypatch.setattr(contest, "hugging_face_method", other)
    found = measured(target, drafter)
    row = next(row for row in found["contestants"] if row["name"] == "hf")
    assert row["identical"] == "0 of 3 prompts identical" and found["identical"] == "identical"


# Times, on a clock that only forwards move: 1 s for one token and 0.1 s for each further one, half of that on faster kernels.


@pytest.fixture
def slow(monkeypatch):
    clock = SimpleNamespace(time=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.time)

    def slow(model, seconds):
        def tick(model, args, kwargs, output):
            tokens = args[0] if args else kwargs["input_ids"]
            clock.time += seconds * (1 + 0.1 * (tokens.shape[1] - 1))

        model = nearby(model, 0.0)
        model.register_forward_hook(tick, with_kwargs=True)
        return model

    return slow


def test_where_only_forwards_cost_time_predictions_and_ratios_are_exact(slow, monkeypatch, target):
    draft = disagreeing(target)  # one that is always rejected has nothing left to read
    faster = {False: slow(target, 0.5), True: slow(draft, 0.125)}

    def run_with(model, kernels, *, draft=False):
        return faster[draft] if kernels == "joined" else model

    monkeypatch.setattr(methods, "run_with", run_with)
    found = measured(slow(target, 1.0), ModelDrafter(slow(draft, 0.25)))
    rows = {row["name"]: row for row in found["contestants"]}
    assert rows["ar default"]["tokens_per_second"] == pytest.approx(1)
    assert rows["ar joined"]["tokens_per_second"] == rows["ar joined"]["speedup_over_hf"] == pytest.approx(2)
    for entry, seconds in zip(found["kernels_run"], (1.0, 0.5), strict=True):
        assert entry["target_seconds"] == pytest.approx([seconds * (1 + 0.1 * n) for n in range(4)])
        assert entry["cost_coefficient"] == pytest.approx(0.25)
    for name in ("spec default k=2", "spec joined k=2", "spec joined k=3", "spec joined k=auto"):
        assert rows[name]["measured_over_predicted"] == pytest.approx(1)
        assert rows[name]["speedup"] == pytest.approx(rows[name]["predicted_speedup"])
    assert rows["spec default k=2"]["speedup_over_fastest"] == pytest.approx(rows["spec default k=2"]["speedup"] / 2)
    assert (found["fastest_plain"], found["ar_over_hf"], found["best_fixed_k"]) == ("ar joined", pytest.approx(2), 2)
    # Nothing is ever accepted: k: auto soon drafts less, and is the fastest.
    assert found["fastest_speculative"] == "spec joined k=auto" and found["auto_over_best_fixed_k"] > 1


# A cell


@pytest.fixture
def load(monkeypatch, tmp_path):
    """`comparison.measure` of a pair of tiny models, in a working directory with its own params.yaml."""
    monkeypatch.chdir(tmp_path)
    text = fake_cells.PARAMS.replace("device: auto", "device: cpu").replace("runs: 5, warmup", "runs: 2, warmup")
    text = text.replace("max_new_tokens: 32, kernels", "max_new_tokens: 6, kernels").replace(
        "seed: 0, k: 4", "seed: 3, k: 3"
    )
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    lines = [json.dumps({"question_id": i, "category": "qa", "turns": [f"Question {i}?"]}) for i in range(4)]
    (tmp_path / "context_prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    cells.write_json(cells.HARDWARE, {"fingerprint": {"threads": 1, "cpu": "Imaginary 1"}})
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(comparison, "encode_prompt", lambda tokenizer, prompt: prompt_of(4, prompt.question_id))

    def load(target, drafter):
        loaded = LoadedPair(target, drafter, 17, None, [], "1" * 40, None)
        monkeypatch.setattr(comparison, "load_pair", lambda *arguments, **options: loaded)

    return load


def start(monkeypatch, pair):
    monkeypatch.setattr("sys.argv", ["comparison.py", "--pair", pair, "--out", "cell.json"])
    cli.run(comparison.main)


def cell_of(monkeypatch, pair):
    with pytest.raises(SystemExit) as stop:
        start(monkeypatch, pair)
    assert not stop.value.code
    return json.loads(Path("cell.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_a13_a_cell_has_the_settings_of_params(load, monkeypatch):
    target = tiny_llama()
    load(target, ModelDrafter(nearby(target, 0.2)))
    record = cell_of(monkeypatch, "small_int8")
    expected = {"study": "fake", "pair": "small_int8", "target": "small", "draft": "int8", "k": 3, "seed": 3, "runs": 2}
    expected |= {"max_new_tokens": 6, "prompts": 2, "expected_alpha": 0.8, "verifier": "token", "temperature": 0.0}
    expected |= {"cpu": "Imaginary 1", "draft_parameters": 17, "target_revision": "1" * 40, "dtype": "float32"}
    assert {key: record[key] for key in expected} == expected
    kernels, ks = ("default", "joined", "packed"), (3, 2, 8, "auto")
    names = [
        *(f"ar {n}" for n in kernels),
        *(f"spec {n} k=3" for n in kernels[:2]),
        *(f"spec packed k={k}" for k in ks),
    ]
    assert [row["name"] for row in record["contestants"]] == [*names, "hf", "hf_assisted k=3"]
    assert [sample["question_id"] for sample in record["samples"]] == [0, 1]
    assert set(FLAT.split()) <= record.keys()


def test_the_fake_cell_that_tables_are_tested_on_has_no_key_that_a_real_one_lacks(load, monkeypatch):
    load(tiny_llama(), PromptLookupDrafter())
    real, fake = cell_of(monkeypatch, "small_lookup"), fake_cells.comparison("small_lookup", comparison.load_params())
    assert fake.keys() <= real.keys()
    assert fake["contestants"][0].keys() <= real["contestants"][0].keys()


def test_kernels_that_do_not_run_here_are_in_the_cell(load, monkeypatch):
    load(tiny_gpt2(), PromptLookupDrafter())
    record = cell_of(monkeypatch, "small_int8")
    (refusal,) = record["refusals"]
    assert refusal["kernels"] == "joined" and refusal["reason"].startswith("kernels is 'joined' for a GPT2LMHeadModel")
    assert {row["kernels"] for row in record["contestants"]} == {"default", "packed", None}


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("nobody", "The pair 'nobody' is not in params.yaml"),
        ("small_bf16", "comparisons of params.yaml has no 'small_bf16'; allowed: small_int8, small_lookup."),
    ],
)
def test_a_pair_that_is_not_compared_is_one_sentence(load, monkeypatch, capsys, pair, message):
    load(tiny_gpt2(), PromptLookupDrafter())
    with pytest.raises(SystemExit) as stop:
        start(monkeypatch, pair)
    assert stop.value.code == 1 and message in capsys.readouterr().err


def test_contestants_have_names_that_say_what_they_are():
    assert Contestant("spec", "packed", "auto").name == "spec packed k=auto"
    assert Contestant("hf_assisted", k=4).name == "hf_assisted k=4" and Contestant("hf").name == "hf"
