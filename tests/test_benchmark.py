"""The command that times: its errors, its settings on their way to the comparison, its record and how it is shown."""

import json
import re
from types import SimpleNamespace

import fake_cells
import pytest
import torch
from stand_ins import tiny_gpt2

from pipeline import bench, benchmark, cells, cli, timed
from pipeline.acceptance import prompt_generator
from pipeline.methods import Setting
from pipeline.weights import LoadedPair
from specdec.drafters import PromptLookupDrafter
from specdec.errors import InputError
from specdec.models import random_prompt, toy_draft, toy_target
from specdec.sampling import SamplingConfig

TINY = ["--k", "2", "--max-new-tokens", "4", "--runs", "2"]
ABOUT_THE_RUN = """
study pair target draft target_revision draft_revision k temperature top_k top_p seed prompts max_new_tokens backend device
dtype threads torch transformers runs kernels target_parameters draft_parameters peak_memory_bytes cpu device_name
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with its own params.yaml, whose values differ from the command line's defaults."""
    text = fake_cells.PARAMS.replace("k_for_temperature: 4", "k_for_temperature: 3")
    text = text.replace("max_new_tokens: 64", "max_new_tokens: 5").replace(
        "prompt_tokens: 8\n  runs: 5", "prompt_tokens: 6\n  runs: 3"
    )
    text = text.replace(
        "seed: 0, k: 4, temperature: 0.0, top_k: null, top_p: null, verifier: token",
        "seed: 4, k: 4, temperature: 0.5, top_k: 7, top_p: 0.9, verifier: block",
    )
    text = text.replace("runs: 5, warmup: 1, device: auto", "runs: 6, warmup: 2, device: cpu")
    text = text.replace("kernels: default}", "kernels: packed}")
    (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timed, "COST_RUNS", 1)
    return tmp_path


@pytest.fixture
def threads(monkeypatch):
    """What the command sets, without setting it."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


@pytest.fixture
def seen(monkeypatch):
    """What reaches the comparison, which measures nothing here."""
    seen = SimpleNamespace()

    def compare(target, drafter, prompts, setting, label, rival):
        vars(seen).update(target=target, drafter=drafter, prompts=prompts, setting=setting, label=label)
        return {"measured": True}

    monkeypatch.setattr(bench, "compare", compare)
    monkeypatch.setattr(benchmark, "render", str)
    return seen


def start(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["benchmark.py", *arguments])
    return benchmark.main()


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "--k is 0; allowed: integers of at least 1"),
        (["--k", "-3"], "--k is -3; allowed: integers of at least 1"),
        (["--k", "2.5"], "invalid int value: '2.5'"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; allowed: integers of at least 1"),
        (["--runs", "1"], "--runs is 1; allowed: integers of at least 2"),
        (["--threads", "0"], "--threads is 0; allowed: integers of at least 1"),
        (["--prompts-per-category", "0"], "--prompts-per-category is 0; allowed: integers of at least 1"),
        (["--temperature", "warm"], "invalid float value: 'warm'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--backend", "vllm"], "invalid choice: 'vllm'"),
        (["--cell", "--backend", "hf", "--k", "4"], "--cell --backend hf needs --pair"),
        (["--target", "some"], "--target is some with the toy pair; allowed: only with --backend hf"),
        (["--draft", "int8"], "--draft is int8 with the toy pair; allowed: only with --backend hf"),
        (["--verifier", "tree"], "invalid choice: 'tree'"),
        (["--kernels", "fast"], "invalid choice: 'fast' (choose from"),
        (["--cell", "--kernels", "packed"], "--kernels is packed with --cell; allowed: only what params.yaml says"),
        (["--cell", "--verifier", "block"], "--verifier is block with --cell; allowed: only what params.yaml says"),
        (["--cell", "--top-k", "4"], "--top-k is 4 with --cell; allowed: only what params.yaml says"),
        (["--confidence", "1.5"], "--confidence is 1.5; allowed: a number from 0 to 1"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_a_faulty_command_line_exits_2_with_the_value_named(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.argv", ["benchmark.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.run(benchmark.main)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_least_allowed_values_pass(monkeypatch):
    least = ["--k", "1", "--max-new-tokens", "1", "--runs", "2", "--threads", "1", "--prompts-per-category", "1"]
    monkeypatch.setattr("sys.argv", ["benchmark.py", *least])
    args = benchmark.parse_arguments()
    assert (args.k, args.max_new_tokens, args.runs, args.threads, args.prompts_per_category) == (1, 1, 2, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-k", "0"], "top_k is 0"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--max-new-tokens", "600"], "max_new_tokens=600"),
        (
            ["--kernels", "joined"],
            "kernels is 'joined' for a GPT2LMHeadModel in torch.float32 on cpu; allowed: default",
        ),
        (["--backend", "hf", "--target", "nowhere"], "'nowhere' is not known"),
        (["--cell", "--backend", "hf", "--pair", "nobody"], "'nobody' is not in params.yaml"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_sentence(folder, threads, monkeypatch, arguments, message):
    cells.write_json(cells.HARDWARE, {"fingerprint": {"threads": 1, "cpu": "x"}})
    (folder / "prompts.jsonl").write_text(PROMPTS, encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(message)):
        start(monkeypatch, *arguments)


def test_a_seed_that_is_too_large_is_one_sentence(folder, monkeypatch):
    try:
        start(monkeypatch, *TINY, "--seed", str(2**64))
    except (InputError, SystemExit):
        return
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {error}")


# A run


@pytest.fixture
def toy_run(folder, monkeypatch, capsys):
    start(monkeypatch, *TINY, "--json", "out/record.json")
    return capsys.readouterr().out, json.loads(
        (folder / "out/record.json").read_text(encoding="utf-8"), parse_constant=pytest.fail
    )


def test_the_toy_run_writes_what_it_shows(toy_run):
    shown, record = toy_run
    assert shown == benchmark.render(record) + "\n"
    assert set(ABOUT_THE_RUN.split()) <= record.keys()
    expected = {
        "backend": "toy",
        "target": "toy-target",
        "draft": "toy-draft",
        "target_revision": None,
        "draft_revision": None,
        "k": 2,
        "max_new_tokens": 4,
        "runs": 2,
        "temperature": 0,
        "prompts": 12,
        "new_tokens": 48,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "torch": torch.__version__,
        "identical": "identical",
        "target_parameters": 724480,
        "draft_parameters": 724480,
    }
    expected |= {"kernels": "default", "kernels_logit_error": 0, "hf_assisted_identical_prompts": 12}
    assert {key: record[key] for key in expected} == expected
    assert {sample["prompt_tokens"] for sample in record["samples"]} == {6}
    assert record["speedup_lo"] < record["speedup"] < record["speedup_hi"]
    assert 2**25 < record["peak_memory_bytes"] < 2**37
    assert 0.5 < record["alpha"] <= 1


def test_a13_a_cell_of_the_toy_has_the_settings_of_params(folder, monkeypatch):
    monkeypatch.setattr(benchmark, "TOY_PROMPTS", 2)
    cells.write_json(cells.HARDWARE, {"fingerprint": {"threads": 1, "cpu": "Imaginary 1"}})
    start(monkeypatch, "--cell", "--json", "cell.json")
    record = cells.read_json("cell.json")
    expected = {"study": None, "pair": "toy", "k": 3, "max_new_tokens": 5, "runs": 3, "seed": 4, "temperature": 0}
    expected |= {"cpu": "Imaginary 1", "threads": 1, "top_k": None, "top_p": None, "prompts": 2, "new_tokens": 10}
    assert {key: record[key] for key in expected} == expected
    assert set(ABOUT_THE_RUN.split()) <= record.keys()
    assert [len(sample["decode_seconds"]["spec"]) for sample in record["samples"]] == [3, 3]
    assert (
        record["kernels"] == "default"
    )  # whatever timing.kernels says, for the toy shows the loop and not the machine
    assert record["speedup_lo"] is None


# Settings on their way


def test_a13_f13_every_option_reaches_the_toy_comparison(folder, threads, seen, monkeypatch):
    options = [
        "--k",
        "5",
        "--max-new-tokens",
        "9",
        "--runs",
        "4",
        "--temperature",
        "0.7",
        "--top-k",
        "3",
        "--top-p",
        "0.8",
    ]
    options += ["--verifier", "block", "--confidence", "0.3", "--kernels", "packed"]
    start(monkeypatch, *options, "--seed", "11", "--threads", "2", "--dtype", "bfloat16", "--device", "cpu")
    assert seen.setting == Setting(5, SamplingConfig(0.7, 3, 0.8), 9, [], 11, 4, 1, "block", "packed")
    assert seen.drafter.confidence_threshold == 0.3
    assert threads == [2]
    assert seen.target.dtype == seen.drafter.model.dtype == torch.bfloat16
    assert [p.question_id for p in seen.prompts] == list(range(12))
    assert torch.equal(seen.prompts[3].input_ids, random_prompt(seen.target, 6, prompt_generator(11, 3)))
    assert seen.label == "toy k=5 T=0.7"


def test_the_toy_models_are_the_two_of_the_study(folder, threads, seen, monkeypatch):
    start(monkeypatch, "--device", "cpu")
    assert torch.equal(seen.target.lm_head.weight, toy_target().lm_head.weight)
    ours, studied = (m.transformer.h[0].mlp.c_fc.weight for m in (seen.drafter.model, toy_draft()))
    assert torch.equal(ours, studied) and not torch.equal(ours, toy_target().transformer.h[0].mlp.c_fc.weight)
    assert threads == [1]
    assert seen.setting == Setting(4, SamplingConfig(), 128, [], 0, 5, 1)


def test_a_cell_of_the_toy_warms_up_by_params_and_runs_on_one_thread(folder, threads, seen, monkeypatch):
    cells.write_json(cells.HARDWARE, {"fingerprint": {"threads": 7, "cpu": "Imaginary 1"}})
    start(monkeypatch, "--cell")
    assert seen.setting == Setting(3, SamplingConfig(), 5, [], 4, 3, 2, "block")
    assert threads == [1]


PROMPTS = "".join(
    json.dumps({"question_id": i, "category": "qa", "turns": [f"Question {i}?"]}) + "\n" for i in range(4)
)


@pytest.fixture
def loaded(folder, monkeypatch):
    """A real pair without its weights: notes what was asked for."""
    (folder / "prompts.jsonl").write_text(PROMPTS, encoding="utf-8")
    loaded = SimpleNamespace(folder=folder, target=tiny_gpt2())

    def load_pair(pair, models, *, device, dtype, confidence_threshold, manifest):
        loaded.asked = (pair.target, pair.draft, str(device), dtype, confidence_threshold)
        loaded.manifest = manifest
        return LoadedPair(loaded.target, PromptLookupDrafter(), 0, None, [5], "1" * 40, None)

    monkeypatch.setattr(benchmark, "load_pair", load_pair)
    monkeypatch.setattr(benchmark, "encode_prompt", lambda tokenizer, prompt: torch.tensor([[prompt.question_id]]))
    return loaded


def test_a13_a_cell_of_a_real_pair_has_the_settings_of_params(loaded, threads, seen, monkeypatch):
    cells.write_json(cells.HARDWARE, {"fingerprint": {"threads": 7, "cpu": "Imaginary 1"}})
    start(monkeypatch, "--cell", "--backend", "hf", "--pair", "small_lookup", "--k", "6", "--json", "cell.json")
    assert loaded.asked == ("small", "lookup", "cpu", torch.float32, 0.0)
    assert loaded.manifest == cells.manifest("small_lookup")
    assert seen.setting == Setting(6, SamplingConfig(0.5, 7, 0.9), 32, [5], 4, 6, 2, "block", "packed", False)
    assert [(p.question_id, p.input_ids.tolist()) for p in seen.prompts] == [(0, [[0]]), (1, [[1]])]
    assert threads == [7]
    record = cells.read_json("cell.json")
    expected = {"study": "fake", "pair": "small_lookup", "target": "small", "draft": "lookup", "k": 6, "runs": 6}
    expected |= {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "draft_parameters": 0, "backend": "hf", "measured": True}
    expected |= {"target_revision": "1" * 40, "draft_revision": None, "kernels": "packed"}
    assert {key: record[key] for key in expected} == expected


def test_a13_f13_every_option_reaches_the_comparison_of_a_real_pair(loaded, threads, seen, monkeypatch):
    options = ["--backend", "hf", "--target", "some/folder", "--draft", "int8", "--dtype", "float16", "--device", "cpu"]
    options += ["--verifier", "block", "--confidence", "0.3", "--kernels", "joined"]
    start(monkeypatch, *options, "--prompts-per-category", "3", "--k", "2", "--json", "cell.json")
    assert loaded.asked == ("some/folder", "int8", "cpu", torch.float16, 0.3)
    assert len(seen.prompts) == 3
    assert seen.setting == Setting(2, SamplingConfig(), 128, [5], 0, 5, 1, "block", "joined")
    record = cells.read_json("cell.json")
    assert (record["study"], record["pair"]) == (None, "some/folder + int8")
    assert loaded.manifest is None  # a folder of the command line is in none


@pytest.mark.parametrize(
    ("timing", "pair", "placed"),
    [("cpu", None, "cpu"), ("cpu", "spread", "spread"), ("spread", "cpu", "cpu"), ("spread", None, "spread")],
)
def test_a_pair_is_timed_on_its_own_device_or_else_on_the_studys(
    loaded, threads, seen, monkeypatch, timing, pair, placed
):
    cells.write_json(cells.HARDWARE, {"fingerprint": {"threads": 7, "cpu": "Imaginary 1"}})
    text = (loaded.folder / "params.yaml").read_text(encoding="utf-8").replace("device: cpu", f"device: {timing}")
    for draft in ("int8", "bf16"):  # other pairs, which cannot be spread
        text = text.replace(f"draft: {draft}}}", f"draft: {draft}, device: cpu}}")
    if pair:
        text = text.replace("{target: small, draft: lookup}", f"{{target: small, draft: lookup, device: {pair}}}")
    (loaded.folder / "params.yaml").write_text(text, encoding="utf-8")
    start(monkeypatch, "--cell", "--backend", "hf", "--pair", "small_lookup", "--k", "6")
    assert loaded.asked[2] == placed


def test_a_target_over_several_devices_is_called_spread_and_not_compared_with_the_cpu(
    loaded, threads, seen, monkeypatch
):
    """It may be larger than the main memory."""
    monkeypatch.setattr(bench, "check_device", lambda *_: pytest.fail("copied"))
    loaded.target = tiny_gpt2().bfloat16()
    loaded.target.hf_device_map = {"": "cpu"}
    options = ["--backend", "hf", "--target", "some/folder", "--draft", "lookup", "--device", "spread"]
    start(monkeypatch, *options, "--json", "cell.json")
    record = cells.read_json("cell.json")
    assert loaded.asked[2] == "spread" == record["device"] and record["device_logit_error"] is None
    assert seen.target is loaded.target


def test_the_toy_pair_is_not_spread():
    assert benchmark.toy_device("spread") == benchmark.toy_device("auto") == torch.device("cpu")
    with pytest.raises(InputError, match="not available here"):
        benchmark.toy_device("gpu")


# How it is shown


def shown(**changes):
    record = fake_cells.interval("draft_acceptance_rate", 0.9, 0.1) | fake_cells.benchmark("small_int8", 4) | changes
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in benchmark.render(record).splitlines())


def test_values_are_shown_with_their_intervals():
    rows = shown(speedup=1.2345, speedup_lo=1.1, speedup_hi=1.4, speedup_over_fastest=1.1, speedup_over_fastest_lo=None)
    assert rows["speed-up over plain decoding"] == "1.234   95 % interval 1.100 to 1.400"
    assert rows["speed-up over the fastest (Hugging Face generate)"] == "1.100"
    assert rows["target"] == "small (134,515,008 parameters)"
    assert rows["draft"] == "int8 (134,515,008 parameters)"
    assert rows["decoding"].startswith("k = 4, greedy, 12 prompts, ")
    assert rows["plain decoding, tokens/s"] == "20.0"
    assert rows["kernels"] == "default"
    assert rows["Hugging Face generate with the draft, tokens/s"] == "16.0"
    assert re.fullmatch(r"\d\.\d{3}   95 % interval .*", rows["speed-up over Hugging Face with the draft"])
    assert rows["cost coefficient c, verify cost ratio v"] == "0.450, 1.250"
    assert rows["greedy output against plain decoding"] == "identical"


def test_what_is_undefined_is_a_dash():
    undefined = dict.fromkeys(("alpha", "alpha_lo", "alpha_hi", "hf_tokens_per_second", "predicted_speedup"))
    rows = shown(**undefined, draft="lookup", draft_parameters=0, temperature=0.7)
    assert rows["alpha, accepted / tested"] == rows["Hugging Face generate, tokens/s"] == "–"
    assert rows["predicted speed-up, tau / (kc + v)"] == "–"
    assert rows["draft"] == "lookup (no model)"
    assert "temperature 0.7" in rows["decoding"]


def test_a12_the_two_alphas_and_the_rate_are_told_apart():
    names = ("alpha", "alpha_overlap", "draft_acceptance_rate", "mean_accepted_per_round", "mean_acceptance_length")
    rows = shown(**{name: i + 0.5 for i, name in enumerate(names)}, **{f"{name}_lo": None for name in names})
    assert [value for name, value in rows.items() if name.startswith(("alpha", "accept", "tokens per"))] == [
        "0.500",
        "1.500",
        "2.500",
        "3.500",
        "4.500",
    ]
