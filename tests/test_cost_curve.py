"""T(n): what is timed, in which turns, behind what; its intervals and the machine's limits; and the profile of one step."""

import json
import time
from collections import Counter
from math import comb
from pathlib import Path
from types import SimpleNamespace

import fake_cells
import pytest
import torch
from stand_ins import ScriptedModel, nearby, random_table, tiny_gpt2, tiny_llama

from pipeline import cells, cli, cost_curve, profile_step, steps
from pipeline.curves import curve, median_interval, roof
from pipeline.steps import context_for, machine_steps, passes, sampled, weights_read
from pipeline.weights import LoadedPair
from specdec.drafters import ModelDrafter, PromptLookupDrafter
from specdec.errors import InputError
from specdec.models import count_parameters
from specdec.quantize import bfloat16_copy, int8_copy

CPU = torch.device("cpu")


# Medians and limits


@pytest.mark.parametrize("count", range(13))
def test_the_interval_holds_the_median_as_often_as_it_says_and_is_the_narrowest_that_does(count):
    values = [float(value) for value in range(count)]
    low, high = median_interval(values[::-1])

    def coverage(rank):
        """Of values[rank − 1] to values[−rank]: at least `rank` values on either side of the median."""
        return sum(comb(count, below) for below in range(rank, count - rank + 1)) / 2**count

    if count < 6:
        assert low is high is None and (count < 2 or coverage(1) < 0.95)
    else:
        rank = int(low) + 1
        assert high == values[-rank] and coverage(rank) >= 0.95 > coverage(rank + 1)


def test_nine_runs_leave_one_out_on_either_side():
    assert median_interval([5, 1, 9, 2, 8, 3, 7, 4, 6]) == (2, 8)


def test_a_curve_is_of_medians_and_keeps_its_samples():
    samples = [[3.0, 1.0, 2.0], [4.0, 4.0, 7.0]]
    assert curve(samples) == {
        "seconds": [2.0, 4.0],
        "seconds_lo": [None, None],
        "seconds_hi": [None, None],
        "samples": samples,
    }
    assert curve([[]] * 2)["seconds"] == [None, None]


def test_the_roof_is_memory_for_few_tokens_and_arithmetic_for_many():
    assert roof(4, 100, 25, 50.0, 50.0) == [2.0, 2.0, 3.0, 4.0]
    assert roof(2, 100, 25, None, 50.0) == roof(2, 100, 25, 50.0, None) == [None, None]


# Passes


def test_a_pass_feeds_n_tokens_behind_the_context_again_and_again_and_the_context_is_read_once():
    model = ScriptedModel(random_table(5, 0))
    context = torch.tensor([4, 3, 2])
    found = passes(model, context, 5)
    assert list(found) == [1, 2, 3, 4, 5]
    for n in (5, 1, 2, 2):
        assert found[n]().shape == (n, 5)
    assert [(fed.cached, len(fed.tokens)) for fed in model.fed] == [
        ((), 3),
        *(((4, 3, 2), n) for n in (5, 1, 2, 2)),
    ]


def test_a_pass_behind_a_context_that_the_model_does_not_reach_is_refused():
    model = ScriptedModel(random_table(5, 0), context=8)
    assert set(passes(model, torch.tensor([1] * 5), 3)) == {1, 2, 3}
    with pytest.raises(InputError, match="4 tokens behind a context of 5 are more than the 8 that the model reaches"):
        passes(model, torch.tensor([1] * 5), 4)


def test_the_context_has_tokens_that_all_models_know():
    large, small = tiny_gpt2(vocabulary=400), tiny_gpt2(vocabulary=40)
    context = context_for([large, small], 100)
    assert context.shape == (100,) and int(context.min()) >= 0 and 30 < int(context.max()) < 40
    assert torch.equal(context, context_for([small, large], 100))


def test_steps_take_turns_and_a_slow_first_call_does_not_count(monkeypatch):
    clock, calls = SimpleNamespace(time=0.0), []
    monkeypatch.setattr(time, "perf_counter", lambda: clock.time)

    def step(name, seconds):
        def run():
            clock.time += seconds + 100 * (name not in calls)
            calls.append(name)

        return run

    found = sampled({"a": step("a", 1.0), "b": step("b", 2.0)}, 3, CPU, "test")
    assert found == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert "".join(calls) == "ab" + "abbaab"


def test_the_machines_steps_do_the_work_that_they_are_said_to_do(monkeypatch):
    monkeypatch.setattr(steps, "SUM_FLOATS", 1000)
    monkeypatch.setattr(steps, "PRODUCT_SIDE", 8)
    found = machine_steps(CPU)
    assert float(found["sum"]()) == 1000 and found["product"]().shape == (8, 8)
    assert steps.MACHINE == {"sum": 4 * 2**26, "product": 2 * 2048**3}


def test_a_pass_reads_all_weights_but_embeddings():
    for tied in (False, True):
        model = tiny_llama(tie_word_embeddings=tied)
        embedding = 40 * 16
        assert sum(t.numel() for t in weights_read(model)) == count_parameters(model) - (0 if tied else embedding)
    levels = weights_read(int8_copy(tiny_llama()))
    assert Counter(t.dtype for t in levels)[torch.int8] == 2 * 7 + 1  # the layers' and the head's
    assert not any(t.shape == (40, 16) and t.is_floating_point() for t in levels)


# A cell


@pytest.fixture
def load(monkeypatch, tmp_path):
    """`cost_curve.measure` of a pair of tiny models, in a working directory with its own params.yaml."""
    monkeypatch.chdir(tmp_path)
    text = fake_cells.PARAMS.replace("rows: 16, contexts: [64, 512], runs: 9", "rows: 3, contexts: [4, 7], runs: 6")
    (tmp_path / "params.yaml").write_text(text.replace("device: auto", "device: cpu"), encoding="utf-8")
    cells.write_json(cells.HARDWARE, {"fingerprint": {"threads": 1, "cpu": "Imaginary 1"}})
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    found = {"sum": lambda: time.sleep(1e-4), "product": lambda: time.sleep(1e-4)}
    monkeypatch.setattr(cost_curve, "machine_steps", lambda device: found)

    def load(target, drafter):
        loaded = LoadedPair(target, drafter, 17, None, [], "1" * 40, None)
        for module in (cost_curve, profile_step):
            monkeypatch.setattr(module, "load_pair", lambda *arguments, **options: loaded)

    return load


def run(script, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["script.py", *arguments])
    return script.main()


def measured(monkeypatch, pair):
    run(cost_curve, monkeypatch, "--pair", pair, "--out", "cell.json")
    return json.loads(Path("cell.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_a_cell_has_a_curve_for_each_model_kernels_and_context(load, monkeypatch):
    target = tiny_llama()
    load(target, ModelDrafter(int8_copy(target)))
    record = measured(monkeypatch, "small_int8")
    assert [(c["role"], c["model"], c["kernels"], c["context"]) for c in record["curves"]] == [
        (role, model, kernels, context)
        for role, model in (("target", "small"), ("draft", "int8"))
        for kernels in ("default", "joined", "packed")
        for context in (4, 7)
    ]
    for c in record["curves"]:
        assert [len(values) for values in c["samples"]] == [6] * 3 and c["refusal"] is None
        assert all(
            low <= middle <= high
            for low, middle, high in zip(c["seconds_lo"], c["seconds"], c["seconds_hi"], strict=True)
        )
        assert len(c["roof_seconds"]) == 3 and all(value > 0 for value in c["roof_seconds"])
    first = {(c["role"], c["kernels"]): c["seconds"] for c in record["curves"] if c["context"] == 4}
    for kernels in ("default", "joined", "packed"):
        one, draft = first["target", kernels][0], first["draft", kernels][0]
        assert record[f"target_seconds_1_{kernels}"] == one and record[f"draft_seconds_1_{kernels}"] == draft
        assert record[f"target_seconds_rows_{kernels}"] == first["target", kernels][2]
        assert record[f"cost_coefficient_{kernels}"] == pytest.approx(draft / one)
    expected = {"pair": "small_int8", "target": "small", "draft": "int8", "runs": 6, "rows": 3, "cpu": "Imaginary 1"}
    expected |= {
        "target_parameters": count_parameters(target),
        "draft_parameters": 17,
        "dtype": "float32",
        "study": "fake",
    }
    expected |= {"target_revision": "1" * 40, "draft_dtype": "bfloat16", "device": "cpu"}
    assert {key: record[key] for key in expected} == expected
    assert record["bytes_per_second"] > 0 and len(record["sum_samples"]) == len(record["product_samples"]) == 6


def test_what_a_copy_in_fewer_bits_reads_and_multiplies(load, monkeypatch):
    target = tiny_llama()
    for pair, draft in (("small_int8", int8_copy(target)), ("small_bf16", bfloat16_copy(target))):
        load(target, ModelDrafter(draft))
        record = measured(monkeypatch, pair)
        assert record["target_weight_bytes"] == 4 * sum(t.numel() for t in weights_read(target))
        assert record["draft_weight_bytes"] < 0.55 * record["target_weight_bytes"]
        of = {c["role"]: c["roof_seconds"] for c in record["curves"]}
        operations = 2 * sum(t.numel() for t in weights_read(target)) / record["operations_per_second"]
        for role, roof_seconds in of.items():
            reading = record[f"{role}_weight_bytes"] / record["bytes_per_second"]
            assert roof_seconds == pytest.approx([max(reading, n * operations) for n in (1, 2, 3)])


def test_a_draft_that_copies_text_has_no_curve_and_the_cell_the_same_keys(load, monkeypatch):
    target = tiny_llama()
    load(target, ModelDrafter(nearby(target, 0.1)))
    keys = measured(monkeypatch, "small_bf16").keys()
    load(target, PromptLookupDrafter())
    record = measured(monkeypatch, "small_lookup")
    assert record.keys() == keys
    assert {c["role"] for c in record["curves"]} == {"target"}
    assert (
        record["draft_weight_bytes"] is record["cost_coefficient_packed"] is record["draft_seconds_1_default"] is None
    )


def test_kernels_that_do_not_run_a_model_are_told_and_the_others_measured(load, monkeypatch):
    target = tiny_gpt2()
    load(target, ModelDrafter(nearby(target, 0.1)))
    record = measured(monkeypatch, "small_bf16")
    for c in record["curves"]:
        refused = c["kernels"] == "joined"
        assert (c["refusal"] or "").startswith("kernels is 'joined' for a GPT2LMHeadModel" if refused else "")
        assert c["seconds"] == [None] * 3 if refused else all(c["seconds"])
    assert record["target_seconds_1_joined"] is record["cost_coefficient_joined"] is None
    assert record["cost_coefficient_packed"] > 0


def test_a_target_that_no_kernels_run_is_one_sentence(load, monkeypatch):
    text = Path("params.yaml").read_text(encoding="utf-8")
    cells.write_text("params.yaml", text.replace("[default, joined, packed]", "[joined]"))
    load(tiny_gpt2(), PromptLookupDrafter())
    with pytest.raises(
        InputError, match=r"study.kernels_compared has no kernels for this target: kernels is 'joined' for"
    ):
        measured(monkeypatch, "small_lookup")


def test_a_context_that_the_model_does_not_reach_is_one_sentence(load, monkeypatch):
    load(tiny_llama(max_position_embeddings=8), PromptLookupDrafter())
    with pytest.raises(InputError, match="3 tokens behind a context of 7 are more than the 8 that the model reaches"):
        measured(monkeypatch, "small_lookup")


def test_kernels_and_models_take_turns_n_by_n(load):
    models = {"target": tiny_llama(), "draft": nearby(tiny_llama(), 0.1)}
    found, refusals = cost_curve.steps_of(models, ["default", "packed"], [4], 2)
    assert refusals == {}
    assert list(found) == [
        f"{role} {kernels} 4 {n}" for n in (1, 2) for role in ("target", "draft") for kernels in ("default", "packed")
    ]


# The profile of a step


def test_the_profile_shows_the_operators_of_target_and_draft(load, monkeypatch, capsys):
    target = tiny_llama()
    load(target, ModelDrafter(nearby(target, 0.1)))
    run(
        profile_step,
        monkeypatch,
        "--pair",
        "small_bf16",
        "--kernels",
        "joined",
        "--rows",
        "2",
        "--context",
        "5",
        "--top",
        "99",
    )
    out = capsys.readouterr().out
    assert "target small, kernels joined, 2 behind 5 tokens" in out and "draft bf16, kernels joined" in out
    assert out.count("aten::linear") == 2 and out.count("Self CPU time total") == 2
    for kind in (*profile_step.KINDS, profile_step.OUTSIDE):
        assert out.count(f"%  {kind}\n") == 2
    load(target, PromptLookupDrafter())
    run(profile_step, monkeypatch, "--pair", "small_lookup")
    assert "draft" not in capsys.readouterr().out


def test_kinds_and_what_lies_outside_of_operators_add_up_to_the_step(load):
    step = passes(tiny_llama(), torch.tensor([1, 2, 3]), 1)[1]
    first, whole, *kinds = [
        line.split() for line in profile_step.described(step, 1, CPU).split("\n---")[0].splitlines()
    ]
    assert first[1] == whole[1] == "ms" and "without" in first and int(whole[whole.index("calls") - 1]) > 10
    assert sum(float(line[0]) for line in kinds) == pytest.approx(float(whole[0]), abs=0.05)
    names = {" ".join(line[3:]): float(line[0]) for line in kinds}
    assert names.keys() == {*profile_step.KINDS, profile_step.OUTSIDE}
    assert all(names[kind] > 0 for kind in ("matrix products", "attention", profile_step.OUTSIDE))


@pytest.mark.parametrize(
    ("kind", "operators"),
    {
        "matrix products": "aten::mm aten::addmm aten::linear aten::matmul aten::mv mkldnn::_linear_pointwise mkl::_mkl_linear "
        "aten::_weight_int8pack_mm aten::_weight_int4pack_mm_for_cpu",
        "attention": "aten::bmm aten::baddbmm aten::softmax aten::_softmax aten::scaled_dot_product_attention "
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "norms": "aten::rms_norm aten::_fused_rms_norm aten::native_layer_norm aten::pow aten::mean aten::rsqrt",
        "copies and casts": "aten::copy_ aten::index_copy_ aten::_to_copy aten::to aten::cat aten::clone aten::contiguous",
        "compiled code": "Torch-Compiled~Region:~0/0 ##~Call~CompiledFxGraph~f5 cpp_fused_add_0 TorchDynamo~Cache~Lookup",
        "other operators": "aten::mul aten::add aten::silu aten::view aten::transpose aten::triu_ aten::embedding",
    }.items(),
)
def test_an_operator_is_of_one_kind(kind, operators):
    for operator in operators.split():
        assert profile_step.kind_of(operator.replace("~", " ")) == kind, operator


def test_what_no_operator_accounts_for_is_outside():
    totals = profile_step.by_kind(
        [("aten::mm", 0.5), ("aten::mm", 0.25), ("aten::bmm", 0.125), ("aten::mul", 0.0625)], 1.0
    )
    assert {kind: value for kind, value in totals.items() if value} == {
        "matrix products": 0.75,
        "attention": 0.125,
        "other operators": 0.0625,
        profile_step.OUTSIDE: 0.0625,
    }


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--pair", "small_int8", "--rows", "0"], 2, "--rows is 0; allowed: integers of at least 1"),
        (["--pair", "small_int8", "--kernels", "fast"], 2, "invalid choice: 'fast'"),
        (["--pair", "nobody"], 1, "The pair 'nobody' is not in params.yaml"),
        (["--pair", "small_bf16", "--kernels", "joined"], 1, "kernels is 'joined' for a GPT2LMHeadModel"),
    ],
)
def test_a_profile_that_cannot_be_is_one_sentence(load, monkeypatch, capsys, arguments, code, message):
    load(tiny_gpt2(), PromptLookupDrafter())
    monkeypatch.setattr("sys.argv", ["profile_step.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.run(profile_step.main)
    assert stop.value.code == code and message in capsys.readouterr().err
