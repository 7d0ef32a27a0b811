"""The study on models of the hub: a copy of the pipeline (see pipeline_copy.py) and a hub on this machine (see local_hub.py).

The client is the real one, in the processes of the stages. What each answer of the hub becomes is tested in test_hub.py.
"""

import csv
import json
import re
import shutil
import sys
import time

import pytest
from hub_checkpoints import gpt2_files, llama_files
from local_hub import LocalHub
from pipeline_copy import kill, make, use_hub, with_git

from pipeline import cells

PARAMS = """\
models:
  gpt2: {{source: hub, repo: "openai/gpt2-tiny@{gpt2}"}}
  distilgpt2: {{source: hub, repo: "distil/gpt2-tiny@{distilgpt2}"}}
  qwen: {{source: hub, repo: qwen/tiny}}
  qwen-small: {{source: hub, repo: qwen/tiny-small@main}}
  gated: {{source: hub, repo: meta/gated}}
  wrong: {{source: hub, repo: lab/wrong}}
  broken: {{source: hub, repo: lab/broken}}
  unknown: {{source: hub, repo: "openai/gpt2-tiny@v9"}}
  absent: {{source: hub, repo: lab/absent}}
  large: {{source: hub, repo: lab/large}}
pairs:
  gpt2: {{target: gpt2, draft: distilgpt2}}
  qwen: {{target: qwen, draft: qwen-small}}
  gated: {{target: gated, draft: lookup}}
  wrong: {{target: wrong, draft: lookup}}
  broken: {{target: broken, draft: lookup}}
  unknown: {{target: unknown, draft: lookup}}
  absent: {{target: absent, draft: lookup}}
  fine: {{target: gpt2, draft: lookup}}
  large: {{target: large, draft: lookup}}
  misfit: {{target: gpt2, draft: qwen-small}}
studies:
  chain: &chain
    name: chain
    pairs: [gpt2, qwen]
    k: [2]
    temperature: [1.0]
    benchmark_k: [2]
    timed_pairs: [gpt2, qwen]
    detail_pairs: [gpt2]
    confidence: [0.5]
    confidence_k: 2
    identity_dtypes: [bfloat16]
    quantized_pairs: [gpt2]
    contexts: few
    variants: [w4-g32-awq]
    loop_variants: [w4-g32-awq]
    kernel_variants: [w4-g32-awq]
    kernels_compared: [default, packed]
    comparisons: [gpt2]
    llama_cpp_pairs: []
    prompts_per_category: 1
    max_new_tokens: 6
  troubled: &troubled
    name: troubled
    pairs: [gated, broken, fine]
    k: [2]
    temperature: [1.0]
    benchmark_k: [2]
    timed_pairs: [gated, broken, fine]
    detail_pairs: [fine]
    confidence: [0.0]
    confidence_k: 2
    identity_dtypes: [bfloat16]
    quantized_pairs: [fine]
    contexts: few
    variants: [bf16]
    loop_variants: [bf16]
    kernel_variants: [bf16]
    kernels_compared: [default]
    comparisons: [fine]
    llama_cpp_pairs: []
    prompts_per_category: 1
    max_new_tokens: 4
study: *chain
prompts:
  file: pipeline/prompts.jsonl
  categories: [qa, math_reasoning]
context_prompts: pipeline/context_prompts.jsonl
contexts:
  few:
    prompts_per_category: 1
    max_new_tokens: 5
    temperature: [1.0]
    calibration_per_category: 1
    calibration_tokens: 16
    loop_prompts_per_category: 1
    loop_tokens: 4
comparisons:
  gpt2: {{categories: [qa], prompts_per_category: 1, max_new_tokens: 6, kernels: [default, packed], k: [2, auto],
     expected_alpha: 0.8}}
  fine: {{categories: [qa], prompts_per_category: 1, max_new_tokens: 6, kernels: [default], k: [2],
     expected_alpha: 0.8}}
decoding: {{seed: 0, k: 2, temperature: 0.0, top_k: null, top_p: null, verifier: token}}
timing: {{runs: 2, warmup: 1, device: cpu, dtype: float32, threads: 1, kernels: default}}
cost_curve: {{rows: 2, contexts: [4], runs: 2}}
toy:
  k: [1]
  temperature: [0.2]
  seeds: 1
  k_for_temperature: 2
  max_new_tokens: 4
  prompt_tokens: 4
  runs: 2
"""
CHUNK = 10 * 2**20  # what the client writes at once


@pytest.fixture(scope="module")
def hub():
    with LocalHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def lab(hub, tmp_path_factory):
    """A copy whose models are on the hub; each test leaves the hub mended and the study `chain`."""
    copy = make(tmp_path_factory.mktemp("hub") / "lab")
    shutil.rmtree(copy.root / "models")
    commits = {
        "gpt2": hub.add("openai/gpt2-tiny", gpt2_files()),
        "distilgpt2": hub.add("distil/gpt2-tiny", gpt2_files(noise=0.02), licence="apache-2.0"),
    }
    hub.add("qwen/tiny", llama_files(vocabulary=448, shards=2))
    hub.add("qwen/tiny-small", llama_files(noise=0.02, vocabulary=416))
    (copy.root / "params.yaml").write_text(PARAMS.format(**commits), encoding="utf-8")
    use_hub(copy, hub)
    return with_git(copy)


def manifest(copy, pair):
    return json.loads((copy.root / cells.manifest(pair)).read_text(encoding="utf-8"))


def asked(hub, since=0):
    return [request.path for request in hub.requests[since:]]


def stages_done(copy):
    """The stages that DVC holds for done."""
    return set(re.findall(r"(?m)^  (\S+):$", (copy.root / "dvc.lock").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def measured(lab):
    """The whole study, once."""
    stages = lab.repro()
    lab.commit()
    return stages


def test_the_chain_from_the_hub_to_the_tables(lab, measured, hub):
    families = [name.split("@")[0] for name in measured]
    assert families[0] == "hardware" and families[-3:] == ["tables", "plot", "report"]
    for pair in ("gpt2", "qwen"):
        assert measured.index(f"download@{pair}") < measured.index(f"sweep_k@chain-{pair}-2")
    assert {"download", "sweep_k", "sweep_temperature", "hf_benchmark", "tables", "plot", "report"} <= set(families)
    gpt2, qwen = manifest(lab, "gpt2"), manifest(lab, "qwen")
    assert gpt2["target"]["revision"] in gpt2["target"]["source"]["repo"]
    assert (gpt2["target"]["licence"], gpt2["draft"]["licence"]) == ("mit", "apache-2.0")
    assert qwen["target"]["source"]["repo"] == "qwen/tiny" and re.fullmatch(r"[0-9a-f]{40}", qwen["target"]["revision"])
    assert (qwen["target"]["vocabulary"], qwen["draft"]["vocabulary"]) == (448, 416)
    assert len([name for name in qwen["target"]["files"] if name.endswith(".safetensors")]) == 2
    # GPT-2 with its head tied, and without the masks in the file
    width, words, context, layers = 32, 400, 1024, 2
    block = 12 * width**2 + 13 * width
    assert gpt2["target"]["parameters"] == (words + context) * width + layers * block + 2 * width
    fetched = {path.rsplit("/", 1)[-1] for path in asked(hub) if "/resolve/" in path}
    assert not fetched & {"pytorch_model.bin", "tf_model.h5", "README.md", "consolidated.safetensors"}
    for pair in ("gpt2", "qwen"):
        timed = cells.read_json(lab.root / cells.hf_benchmark("chain", pair, 2))
        assert timed["identical"] == "identical"
        revisions = [manifest(lab, pair)[role]["revision"] for role in ("target", "draft")]
        assert [timed["target_revision"], timed["draft_revision"]] == revisions
        swept = cells.read_json(lab.root / cells.sweep_k("chain", pair, 2))
        assert 0 < swept["alpha"] <= 1 and swept["new_tokens"] == 12
    judged = cells.read_json(lab.root / cells.quantized_alpha("few", "gpt2", "w4-g32-awq"))
    assert (judged["target"], judged["draft"]) == ("gpt2", "distilgpt2")
    # The draft is no copy of its target, so that α begins below 1, and both layers and head were rounded.
    assert 0 < judged["alpha_unquantized_1"] < 1 and 0 < judged["tv_1"] < 1 and 0 < judged["body_tv_1"] < 1
    assert judged["largest_excess_1"] < 1e-5
    quick = cells.read_json(lab.root / cells.quantized_benchmark("chain", "gpt2", "w4-g32-awq"))
    assert quick["identical"] == "identical" and quick["draft_revision"] == manifest(lab, "gpt2")["draft"]["revision"]
    with (lab.root / "plots" / "chain" / "hf_benchmark.csv").open(encoding="utf-8") as file:
        assert {row["pair"] for row in csv.DictReader(file)} == {"gpt2", "qwen"}


def test_a_branch_that_moves_changes_nothing_and_what_is_there_needs_no_hub(lab, measured, hub):
    before = manifest(lab, "qwen")
    hub.add("qwen/tiny", llama_files(seed=7, vocabulary=448))
    try:
        lab.dvc("repro", "--force", "--single-item", "download@qwen")
        assert manifest(lab, "qwen") == before and lab.changes() == {}
        since = len(hub.requests)
        lab.dvc("repro", "--force", "--single-item", "sweep_k@chain-qwen-2")
        assert asked(hub, since) == [] and lab.changes() == {}
    finally:
        hub.add("qwen/tiny", llama_files(vocabulary=448, shards=2))


def test_without_a_network_a_warm_cache_is_enough_and_a_cold_one_is_refused(lab, measured, tmp_path):
    clone = lab.another(tmp_path / "lab")
    shutil.rmtree(clone.root / "models")  # as git gives it: the manifests, but no weights
    swept = cells.sweep_k("chain", "gpt2", 2)
    before = cells.read_json(clone.root / swept)
    clone.environment |= lab.environment | {"PYTHONPATH": str(clone.root), "HF_HUB_OFFLINE": "1"}
    clone.environment["DVC_SITE_CACHE_DIR"] = str(tmp_path / "site")
    clone.python("pipeline/sweep.py", "--pair", "gpt2", "--k", "2", "--out", str(swept))
    assert cells.read_json(clone.root / swept) == before
    for offline, why in (("1", "HF_HUB_OFFLINE is set"), ("0", "cannot be reached")):
        shutil.rmtree(clone.root / "models")
        clone.environment |= {
            "HF_HOME": str(tmp_path / "cold"),
            "HF_HUB_OFFLINE": offline,
            "HF_ENDPOINT": "http://127.0.0.1:9",
        }
        done = clone.dvc("repro", "--force", "--single-item", "sweep_k@chain-gpt2-2", code=255)
        (sentence,) = re.findall(r"(?m)^error: .*", done.stderr)
        assert re.search(
            rf"{why}.*, and the cache .*cold.* does not hold all of openai/gpt2-tiny@[0-9a-f]{{40}}; ", sentence
        )
        assert not (clone.root / swept).exists() and "Traceback" not in done.stderr


SENTENCES = {
    "gated": r"The hub keeps meta/gated for those who accepted its terms on its page, and HF_TOKEN is not set\.",
    "wrong": r"model\.safetensors of lab/wrong@\w{40} arrived with the hash \w{64} instead of \w{64} and was deleted; .*",
    "broken": r"The connection broke while model\.safetensors of lab/broken@\w{40} was fetched; run again to go on from there\.",
    "unknown": r"The hub's openai/gpt2-tiny has no revision v9; allowed: a branch, tag or commit of it\.",
    "absent": r"The hub has no model lab/absent, or it is private and HF_TOKEN is not set\.",
    "misfit": r".*to the target and .* to the draft; allowed: .*",
}


def test_a14_what_cannot_be_had_is_one_sentence_and_the_other_pairs_go_on(lab, measured, hub):
    for name in ("meta/gated", "lab/wrong", "lab/broken"):
        hub.add(name, gpt2_files(seed=len(name), context=128))
    hub.gate("meta/gated", "hf_right")
    hub.corrupt("lab/wrong/")
    hub.cut("lab/broken/", 5000)
    lab.replace("params.yaml", "study: *chain", "study: *troubled")
    try:
        # The scripts themselves: exit code 1, one sentence, no manifest
        commands = [["pipeline/download.py", "--pair", pair, "--out", str(cells.manifest(pair))] for pair in SENTENCES]
        for pair, (code, stderr) in zip(SENTENCES, lab.command_lines(*commands), strict=True):
            last = stderr.strip().splitlines()[-1]
            assert code == 1 and re.fullmatch(f"error: {SENTENCES[pair]}", last), (pair, stderr)
            assert "Traceback" not in stderr and not (lab.root / cells.manifest(pair)).exists()
        # The study: the pair that is fine is measured, and nothing else
        done = lab.dvc("repro", "--keep-going", "download", "sweep_k", code=255)
        sentences = re.findall(r"(?m)^error: (.*)", done.stderr)
        assert len(sentences) == 2 and "Traceback" not in done.stderr
        for pair in ("gated", "broken"):
            assert any(re.fullmatch(SENTENCES[pair], sentence) for sentence in sentences), (pair, sentences)
            assert not (lab.root / cells.sweep_k("troubled", pair, 2)).exists()
        assert (lab.root / cells.sweep_k("troubled", "fine", 2)).exists()
        done_now = stages_done(lab)
        assert {"download@fine", "sweep_k@troubled-fine-2"} <= done_now
        assert not [name for name in done_now if any(pair in name for pair in SENTENCES)]
        # Mended, the run goes on
        hub.mend()
        lab.environment["HF_TOKEN"] = "hf_right"
        mended = lab.repro("download", "sweep_k@troubled-broken-2")
        # DVC orders stages that do not depend on each other as it likes.
        assert set(mended) == {"download@gated", "download@broken", "sweep_k@troubled-broken-2"} and len(mended) == 3
        assert mended.index("download@broken") < mended.index("sweep_k@troubled-broken-2")
    finally:
        hub.mend()
        lab.environment.pop("HF_TOKEN", None)
        lab.replace("params.yaml", "study: *troubled", "study: *chain")


def test_a14_a_download_that_is_killed_goes_on_where_it_stopped(lab, measured, hub):
    hub.add("lab/large", gpt2_files(context=2048))
    hub.stall("lab/large/", CHUNK + 10**6)
    lab.replace("params.yaml", "    pairs: [gpt2, qwen]\n", "    pairs: [gpt2, qwen, large]\n")
    try:
        process = lab.start(sys.executable, "-m", "dvc", "repro", "download@large")
        assert hub.stalled.wait(60)
        time.sleep(0.5)  # until what was sent is written
        kill(process)
        assert not (lab.root / cells.manifest("large")).exists() and "download@large" not in stages_done(lab)
        (partial,) = (lab.root.parent / "home" / "hub" / "models--lab--large" / "blobs").glob("*.partial")
        assert partial.stat().st_size == CHUNK
        hub.mend()
        hub.sent.clear()
        assert lab.repro("download@large") == ["download@large"]
        # The killed one's response ends with its connection, whenever that is noticed.
        assert [sent.start for sent in hub.sent if "safetensors" in sent.file and sent.start > 0] == [CHUNK]
        assert not partial.exists() and "download@large" in stages_done(lab)
        files = manifest(lab, "large")["target"]["files"]
        assert files["model.safetensors"]["bytes"] == len(gpt2_files(context=2048)["model.safetensors"])
    finally:
        hub.mend()
        lab.replace("params.yaml", "    pairs: [gpt2, qwen, large]\n", "    pairs: [gpt2, qwen]\n")


def test_a_model_of_the_hub_on_the_command_line(lab, measured, hub, tmp_path):
    commit = manifest(lab, "gpt2")["target"]["revision"]
    options = ["--k", "2", "--runs", "2", "--threads", "1", "--max-new-tokens", "4", "--prompts-per-category", "1"]
    options += ["--json", str(tmp_path / "result.json"), "--device", "cpu"]
    names = [
        "--target",
        "openai/gpt2-tiny",
        "--draft",
        f"distil/gpt2-tiny@{manifest(lab, 'gpt2')['draft']['revision']}",
    ]
    lab.python("pipeline/benchmark.py", "--backend", "hf", *names, *options)
    record = cells.read_json(tmp_path / "result.json")
    assert record["target"] == "openai/gpt2-tiny" and record["target_revision"] == commit
    assert record["draft_revision"] in record["draft"] and record["identical"] == "identical"
