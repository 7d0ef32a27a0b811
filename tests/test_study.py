"""params.yaml is refused with one clear sentence before anything is measured; what follows a run (README, last line) is right."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipeline import cells, hardware
from pipeline.hardware import describe, linux_cpu_name
from pipeline.markers import fill
from pipeline.run_study import provenance, study_cells, update_readme
from pipeline.study import DEVICES, KERNELS, HubModel, LocalModel, WheelModel, load_params, pair_spec
from specdec.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "params.yaml").read_text(encoding="utf-8")
GOOD = YAML(typ="safe").load(TEXT)
PAIR = "smollm2-135m_lookup"
COMPARED = GOOD["comparisons"][PAIR]
MISSING = object()


def refusal(tmp_path, text):
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_params(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and message.endswith(".") and "\n" not in message
    return message.removeprefix(f"{path}: ")


def changed(place, value):
    """params.yaml's content, as JSON (which is YAML), with one place changed; a study is changed where it is chosen too."""
    params = copy.deepcopy(GOOD)  # keeps `study` and its entry in `studies` one and the same object
    here = params
    for key in place[:-1]:
        here = here[key]
    if value is MISSING:
        del here[place[-1]]
    else:
        here[place[-1]] = value
    return json.dumps(params).replace("NaN", ".nan").replace("Infinity", ".inf")


def test_the_committed_file_is_good():
    params = load_params(ROOT / "params.yaml")
    assert params.study.name == "embedded"
    assert isinstance(params.models["smollm2-135m"], WheelModel)
    assert pair_spec(params, "smollm2-135m_int8").draft == "int8"
    assert params.decoding.top_k is None and params.decoding.temperature == 0.0
    for study in params.studies.values():
        assert study.prompts_per_category * len(params.prompts.categories) >= (
            1 if study.name in ("quick", "quantized") else 12
        )


def test_a_local_model(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(changed(("models", "mine"), {"source": "local", "path": "some/folder"}), encoding="utf-8")
    assert load_params(path).models["mine"] == LocalModel(source="local", path="some/folder", format="safetensors")


@pytest.mark.parametrize(
    ("repo", "repository", "revision"),
    [
        ("openai-community/gpt2", "openai-community/gpt2", None),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct@v1.0", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "v1.0"),
        ("a/b_c@refs/pr/1", "a/b_c", "refs/pr/1"),
        (f"a/b@{'0' * 40}", "a/b", "0" * 40),
    ],
)
@pytest.mark.parametrize("sums", [{}, {"weights_sha256": None}, {"weights_sha256": "0a" * 32}])
def test_a_model_of_the_hub(tmp_path, repo, repository, revision, sums):
    path = tmp_path / "params.yaml"
    path.write_text(changed(("models", "mine"), {"source": "hub", "repo": repo, **sums}), encoding="utf-8")
    model = load_params(path).models["mine"]
    assert model == HubModel(source="hub", repo=repo, weights_sha256=sums.get("weights_sha256"))
    assert (model.repository, model.revision) == (repository, revision)


@pytest.mark.parametrize(
    "repo",
    ["gpt2", "", "a/", "/b", "a/b/c", "a/b@", "a/b@x y", "a/b@x@y", "-a/b", "a/.b", "a /b", "a/b\n", "https://a/b", 5, ["a/b"]],
)  # fmt: skip
def test_names_that_no_model_of_the_hub_has(tmp_path, repo):
    message = refusal(tmp_path, changed(("models", "mine"), {"source": "hub", "repo": repo}))
    assert message == f"models.mine.repo is {json.dumps(repo)}; allowed: names such as organisation/name@revision."


def test_models_of_the_hub_in_the_committed_file_are_pinned():
    found = [model for model in load_params(ROOT / "params.yaml").models.values() if isinstance(model, HubModel)]
    assert found and all(re.fullmatch("[0-9a-f]{40}", model.revision) for model in found)


@pytest.mark.parametrize("device", [*DEVICES, None])
def test_a_pair_may_have_a_device_of_its_own(tmp_path, device):
    path = tmp_path / "params.yaml"
    path.write_text(changed(("pairs", "gpt2_distilgpt2", "device"), device), encoding="utf-8")
    params = load_params(path)
    assert params.pairs["gpt2_distilgpt2"].device == device
    assert params.pairs["smollm2-135m_int8"].device is None  # which is timing.device


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (("study", "k", 2), -1, "study.k[2] is -1; allowed: integers of at least 1."),
        (("study", "k", 0), True, "study.k[0] is true; allowed: integers of at least 1."),
        (("study", "k", 0), 1.0, "study.k[0] is 1.0; allowed: integers of at least 1."),
        (("study", "k", 0), "1", 'study.k[0] is "1"; allowed: integers of at least 1.'),
        (("study", "k"), [], "study.k is []; allowed: lists of at least one value."),
        (("study", "k"), 4, "study.k is 4; allowed: lists of at least one value."),
        (("study", "k"), [2, 4, 2], "study.k is [2, 4, 2]; allowed: lists without repeats."),
        (("study", "benchmark_k"), [4, 4], "study.benchmark_k is [4, 4]; allowed: lists without repeats."),
        (("study", "temperature", 1), 0.0, "study.temperature[1] is 0.0; allowed: numbers above 0 written with a decimal"),
        (("study", "temperature", 1), 1, "study.temperature[1] is 1; allowed: numbers above 0 written with a decimal point"),
        (("study", "temperature", 1), float("nan"), "study.temperature[1] is NaN; allowed: numbers above 0"),
        (("study", "temperature", 1), float("inf"), "study.temperature[1] is Infinity; allowed: numbers above 0"),
        (("study", "pairs", 0), "nosuch", 'study.pairs[0] is "nosuch"; allowed: smollm2-135m_int8, smollm2-135m_bf16,'),
        (("study", "prompts_per_category"), 0, "study.prompts_per_category is 0; allowed: integers of at least 1."),
        (("study", "max_new_tokens"), None, "study.max_new_tokens is null; allowed: integers of at least 1."),
        (("study", "kk"), [1], "study.kk is not a known key; allowed: name, pairs, k, temperature, benchmark_k,"),
        (("study", "max_new_tokens"), MISSING, "study.max_new_tokens is missing, but every key needs a value."),
        (
            ("study",),
            "embedded",
            'study is "embedded"; allowed: *embedded, *quick, *gpt2, *smollm2, *quantized, *llama_cpp, with the star.',
        ),
        (("study",), 3, "study is 3; allowed: a mapping with the keys name, pairs,"),
        (("study",), {**GOOD["study"], "k": [9]}, "study is none of studies; allowed: an alias of one, such as *embedded, *"),
        (("studies", "quick", "name"), "embedded", 'studies.quick.name is "embedded"; allowed: quick.'),
        (("studies", "quick", "pairs", 0), "x", 'studies.quick.pairs[0] is "x"; allowed: smollm2-135m_int8,'),
        (("studies", "a.b"), GOOD["study"], 'studies has the key "a.b"; allowed: names of letters, digits, - and _.'),
        (("pairs", "a@b"), {"target": "smollm2-135m", "draft": "int8"}, 'pairs has the key "a@b"; allowed: names of letters,'),
        (("pairs", "p"), {"target": "gone", "draft": "int8"}, 'pairs.p.target is "gone"; allowed: smollm2-135m, gpt2, '),
        (("pairs", "p"), {"target": "smollm2-135m", "draft": "int3"}, 'pairs.p.draft is "int3"; allowed: int4, int8, bf16, lo'),
        (("pairs", "p"), {"target": "smollm2-135m"}, "pairs.p.draft is missing"),
        (("models", "m.1"), GOOD["models"]["smollm2-135m"], 'models has the key "m.1"; allowed: names of letters, digits, -'),
        (("models", "int8"), {"source": "local", "path": "x"}, 'models has the key "int8"; allowed: names other than int4, in'),
        (("models", "m"), {"source": "ftp"}, 'models.m is {"source": "ftp"}; allowed: a mapping with source: wheel or source'),
        (("models", "m"), {"path": "x"}, 'models.m is {"path": "x"}; allowed: a mapping with source: wheel or source: local or'),
        (("models", "m"), {"source": "local", "path": ""}, 'models.m.path is ""; allowed: texts that are not empty.'),
        (("models", "m"), {"source": "local", "path": "x", "format": "bin"}, 'models.m.format is "bin"; allowed: safetensors'),
        (("models", "m"), {"source": "local", "path": "x", "z": 1}, "models.m.z is not a known key; allowed: source, path,"),
        (("models", "smollm2-135m", "wheel_sha256"), "abc", 'models.smollm2-135m.wheel_sha256 is "abc"; allowed: sha256 sums'),
        (("models", "smollm2-135m", "package"), "-r x", 'models.smollm2-135m.package is "-r x"; allowed: package names.'),
        (("models", "smollm2-135m", "version"), 1.0, "models.smollm2-135m.version is 1.0; allowed: versions in quotes"),
        (("models",), [], "models is []; allowed: a mapping."),
        (("prompts", "categories"), [], "prompts.categories is []; allowed: lists of at least one value."),
        (("prompts", "file"), None, "prompts.file is null; allowed: texts that are not empty."),
        (("decoding", "seed"), -1, "decoding.seed is -1; allowed: integers from 0 to 2^63 - 1."),
        (("decoding", "temperature"), -0.5, "decoding.temperature is -0.5; allowed: numbers of at least 0."),
        (("decoding", "temperature"), float("nan"), "decoding.temperature is NaN; allowed: numbers of at least 0."),
        (("decoding", "temperature"), False, "decoding.temperature is false; allowed: numbers of at least 0."),
        (("decoding", "top_k"), 0, "decoding.top_k is 0; allowed: null or integers of at least 1."),
        (("study", "timed_pairs", 0), "x", 'study.timed_pairs[0] is "x"; allowed: smollm2-135m_int8, smollm2-135m_bf16,'),
        (("study", "detail_pairs", 0), "x", 'study.detail_pairs[0] is "x"; allowed: smollm2-135m_int8, smollm2-135m_bf16,'),
        (("study", "detail_pairs"), ["smollm2-135m_lookup"], 'study.detail_pairs[0] is "smollm2-135m_lookup", whose draft has'),
        (("study", "confidence", 0), 0, "study.confidence[0] is 0; allowed: probabilities written with a decimal point"),
        (("study", "confidence", 0), 1.5, "study.confidence[0] is 1.5; allowed: probabilities written with a decimal point"),
        (("study", "identity_dtypes", 0), "float32", 'study.identity_dtypes[0] is "float32"; allowed: bfloat16 or fl'),
        (("decoding", "verifier"), "tree", 'decoding.verifier is "tree"; allowed: token or block.'),
        (("decoding", "top_p"), 0.0, "decoding.top_p is 0.0; allowed: null or numbers above 0 and up to 1."),
        (("decoding", "top_p"), 1.5, "decoding.top_p is 1.5; allowed: null or numbers above 0 and up to 1."),
        (("timing", "runs"), 1, "timing.runs is 1; allowed: integers of at least 2."),
        (("timing", "warmup"), 0, "timing.warmup is 0; allowed: integers of at least 1."),
        (("models", "m"), {"source": "hub", "path": "x"}, "models.m.path is not a known key; allowed: source, repo, wei"),
        (("models", "m"), {"source": "hub"}, "models.m.repo is missing, but every key needs a value."),
        (("models", "gpt2", "repo"), "gpt2", 'models.gpt2.repo is "gpt2"; allowed: names such as organisation/name@revision.'),
        (("models", "gpt2", "repo"), None, "models.gpt2.repo is null; allowed: names such as organisation/name@revision."),
        (("models", "gpt2", "weights_sha256"), "AB" * 32, 'models.gpt2.weights_sha256 is "ABABABAB'),
        (("models", "gpt2", "weights_sha256"), "0" * 63, 'models.gpt2.weights_sha256 is "00000000'),
        (("models", "gpt2", "weights_sha256"), "x", 'models.gpt2.weights_sha256 is "x"; allowed: null or sha256 sums of 64 '),
        (("pairs", "gpt2_distilgpt2", "device"), "gpu", 'pairs.gpt2_distilgpt2.device is "gpu"; allowed: null or auto or cpu '),
        (("pairs", "gpt2_distilgpt2", "device"), 0, "pairs.gpt2_distilgpt2.device is 0; allowed: null or auto or cpu or cuda"),
        (("timing", "device"), "spread", 'study.pairs[0] is "smollm2-135m_int8", whose draft int8 copies a target'),
        (
            ("pairs", "smollm2-135m_bf16", "device"),
            "spread",
            'study.pairs[1] is "smollm2-135m_bf16", whose draft bf16 copies a target on one device, and it is timed on spread',
        ),
        (("timing", "device"), None, "timing.device is null; allowed: auto or cpu or cuda or mps or spread."),
        (("timing", "device"), "gpu", 'timing.device is "gpu"; allowed: auto or cpu or cuda or mps or spread.'),
        (("timing", "dtype"), "int8", 'timing.dtype is "int8"; allowed: float32 or bfloat16 or float16.'),
        (("timing", "threads"), 0, "timing.threads is 0; allowed: null or integers of at least 1."),
        (("timing", "kernels"), "fast", 'timing.kernels is "fast"; allowed: auto or default or joined or packed or comp'),
        (("timing", "kernels"), None, "timing.kernels is null; allowed: auto or default or joined or packed or comp"),
        (("timing", "kernels"), ["packed"], 'timing.kernels is ["packed"]; allowed: auto or default or joined or packed or comp'),
        (("timing", "kernels"), MISSING, "timing.kernels is missing, but every key needs a value."),
        (("study", "kernels_compared", 1), "oneDNN", 'study.kernels_compared[1] is "oneDNN"; allowed: default or joined or'),
        (("study", "kernels_compared"), ["packed"] * 2, 'study.kernels_compared is ["packed", "packed"]; allowed: lists without'),
        (("study", "kernels_compared"), [], "study.kernels_compared is []; allowed: lists of at least one value."),
        (("study", "comparisons"), [], "study.comparisons is []; allowed: lists of at least one value."),
        (("study", "comparisons", 0), "x", 'study.comparisons[0] is "x"; allowed: a pair of study.pairs that comparisons has'),
        (("study", "comparisons", 0), "gpt2_distilgpt2", 'study.comparisons[0] is "gpt2_distilgpt2"; allowed: a pair of study.'),
        (("comparisons", "nobody"), COMPARED, 'comparisons has the key "nobody"; allowed: smollm2-135m_int8,'),
        (("comparisons", PAIR, "kernels", 0), "fast", f'comparisons.{PAIR}.kernels[0] is "fast"; allowed: default or joined or'),
        (("comparisons", PAIR, "kernels"), [], f"comparisons.{PAIR}.kernels is []; allowed: lists of at least one value."),
        (("comparisons", PAIR, "k", 0), 0, f"comparisons.{PAIR}.k[0] is 0; allowed: integers of at least 1, or auto."),
        (("comparisons", PAIR, "k", 0), "many", f'comparisons.{PAIR}.k[0] is "many"; allowed: integers of at least 1, or auto.'),
        (("comparisons", PAIR, "k"), [True], f"comparisons.{PAIR}.k[0] is true; allowed: integers of at least 1, or auto."),
        (("comparisons", PAIR, "k"), ["auto"] * 2, f'comparisons.{PAIR}.k is ["auto", "auto"]; allowed: lists without repeats.'),
        (("comparisons", PAIR, "categories", 0), "", f'comparisons.{PAIR}.categories[0] is ""; allowed: texts that are not'),
        (("comparisons", PAIR, "pair"), "x", f"comparisons.{PAIR}.pair is not a known key; allowed: categories, prompts_per_"),
        (("comparisons", PAIR, "expected_alpha"), 1.5, f"comparisons.{PAIR}.expected_alpha is 1.5; allowed: pr"),
        (("cost_curve", "rows"), 0, "cost_curve.rows is 0; allowed: integers of at least 1."),
        (("cost_curve", "contexts", 0), 0, "cost_curve.contexts[0] is 0; allowed: integers of at least 1."),
        (("cost_curve", "contexts"), [64, 64], "cost_curve.contexts is [64, 64]; allowed: lists without repeats."),
        (("cost_curve", "runs"), 1, "cost_curve.runs is 1; allowed: integers of at least 2."),
        (("cost_curve", "k"), 1, "cost_curve.k is not a known key; allowed: rows, contexts, runs."),
        (("timing",), MISSING, "timing is missing, but every key needs a value."),
        (("toy", "temperature", 0), 2, "toy.temperature[0] is 2; allowed: numbers above 0 written with a decimal point"),
        (("study", "quantized_pairs"), [], "study.quantized_pairs is []; allowed: lists of at least one value."),
        (("study", "quantized_pairs"), ["gpt2_distilgpt2"], 'study.quantized_pairs[0] is "gpt2_distilgpt2"; allowed: smollm2'),
        (("study", "contexts"), "large", 'study.contexts is "large"; allowed: full, small.'),
        (("study", "variants", 0), "int4", 'study.variants[0] is "int4"; allowed: bf16, fp16 or names such as w4-g64-gptq'),
        (("study", "variants", 0), "w1-row-rtn", 'study.variants[0] is "w1-row-rtn"; allowed: bf16, fp16 or names such as'),
        (("study", "variants", 0), "w4-g0-rtn", 'study.variants[0] is "w4-g0-rtn"; allowed: bf16, fp16 or names such as'),
        (("study", "loop_variants", 0), "w5-row-rtn", 'study.loop_variants[0] is "w5-row-rtn"; allowed: w8-row-sym-rtn,'),
        (
            ("study", "kernel_variants", 0),
            "w4-row-rtn",
            'study.kernel_variants[0] is "w4-row-rtn", which no kernel here runs; allowed: bf16, w8-row-sym-rtn',
        ),
        (("contexts", "full", "temperature"), [0.0], "contexts.full.temperature[0] is 0.0; allowed: numbers above 0 written"),
        (("contexts", "full", "loop_tokens"), 0, "contexts.full.loop_tokens is 0; allowed: integers of at least 1."),
        (
            ("toys",),
            {},
            "toys is not a known key; allowed: models, pairs, study, studies, prompts, context_prompts, contexts, comparisons",
        ),
    ],
)  # fmt: skip
def test_bad_values(tmp_path, place, value, sentence):
    assert refusal(tmp_path, changed(place, value)).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (TEXT.replace("study: *embedded", "study: *embeded"), "line {}: not valid YAML: found undefined alias 'embeded'."),
        (TEXT.replace("  seed: 0", "  seed: [0"), "line {}: not valid YAML: "),
        (TEXT.replace("  seed: 0", "\tseed: 0"), "line {}: not valid YAML: found character '\\t' that cannot start any token"),
        (TEXT.replace("  seed: 0", "  seed: 0\n  seed: 1"), 'line {}: not valid YAML: found duplicate key "seed"'),
        ("", "the file is null; allowed: a mapping with the keys models, pairs, study,"),
        ("- 1\n", "the file is [1]; allowed: a mapping with the keys"),
    ],
)  # fmt: skip
def test_bad_yaml(tmp_path, text, sentence):
    message = refusal(tmp_path, text)
    line = re.match(r"line (\d+)", message)
    assert message.startswith(sentence.format(line[1] if line else ""))
    if line and "seed" in sentence:
        assert "seed: 1" in text.splitlines()[int(line[1]) - 1]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(
        InputError, match=r"nowhere.yaml: cannot be read \(No such file or directory\); run this from the rep"
    ):
        load_params("nowhere.yaml")
    path = tmp_path / "params.yaml"
    path.write_bytes(TEXT.encode("utf-8") + b"# caf\xe9\n")
    with pytest.raises(InputError, match="not valid YAML"):
        load_params(path)


def test_numbers_are_read_as_dvc_reads_them(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(TEXT.replace("temperature: [1.0]", "temperature: [1e-3]"), encoding="utf-8")
    assert load_params(path).studies["quick"].temperature == [0.001]  # a text, to a parser of YAML 1.1


def test_unknown_pair():
    with pytest.raises(
        InputError, match=r"The pair 'x' is not in params\.yaml; allowed: smollm2-135m_int8, smollm2-135m_bf16"
    ):
        pair_spec(load_params(ROOT / "params.yaml"), "x")


# The hardware stage


def run_hardware(folder):
    return subprocess.run(
        [sys.executable, str(ROOT / "pipeline" / "hardware.py")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_hardware_stops_bad_input_before_it_touches_anything(tmp_path):
    (tmp_path / "pipeline").mkdir()
    prompts = tmp_path / "pipeline" / "prompts.jsonl"
    prompts.write_bytes((ROOT / "pipeline" / "prompts.jsonl").read_bytes())
    shutil.copy(ROOT / "pipeline" / "context_prompts.jsonl", tmp_path / "pipeline")
    record = tmp_path / "metrics" / "hardware.json"
    record.parent.mkdir()
    record.write_text("as it was")
    for name, text in {
        "params": changed(("toy", "seeds"), -1),
        "category": changed(("prompts", "categories"), ["poetry"]),
        "too few": changed(("study", "prompts_per_category"), 10**6),
        "no file": changed(("prompts", "file"), "gone.jsonl"),
        "no context prompts": changed(("context_prompts",), "gone.jsonl"),
        "category of a comparison": changed(("comparisons", PAIR, "categories"), ["poetry"]),
        "too few for a comparison": changed(("comparisons", PAIR, "prompts_per_category"), 25),
        "too few for contexts": changed(("contexts", "full", "calibration_per_category"), 4),
        "device": changed(("timing", "device"), "mps" if sys.platform != "darwin" else "cuda"),
        "kernels": changed(("timing",), {**GOOD["timing"], "device": "cpu", "dtype": "bfloat16", "kernels": "packed"}),
    }.items():
        (tmp_path / "params.yaml").write_text(text, encoding="utf-8")
        done = run_hardware(tmp_path)
        assert (done.returncode, done.stdout) == (1, ""), name
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
        assert record.read_text() == "as it was", name

    (tmp_path / "params.yaml").write_text(TEXT, encoding="utf-8")
    with prompts.open("a") as file:
        file.write("{broken\n")
    assert run_hardware(tmp_path).returncode == 1 and record.read_text() == "as it was"

    prompts.write_bytes((ROOT / "pipeline" / "prompts.jsonl").read_bytes())
    assert run_hardware(tmp_path).returncode == 0
    first = record.read_bytes()
    assert set(json.loads(first)["fingerprint"]) == {"cpu", "device", "cores", "threads", "torch", "transformers", "os"}
    assert run_hardware(tmp_path).returncode == 0 and record.read_bytes() == first


def test_a_device_that_is_not_here_is_refused_if_the_study_asks_for_it(tmp_path):
    """Nobody who runs one study needs the devices of another."""
    (tmp_path / "pipeline").mkdir()
    for name in ("prompts.jsonl", "context_prompts.jsonl"):
        shutil.copy(ROOT / "pipeline" / name, tmp_path / "pipeline")
    absent = "mps" if sys.platform != "darwin" else "cuda"
    record = tmp_path / "metrics" / "hardware.json"
    params = tmp_path / "params.yaml"
    params.write_text(changed(("pairs", "smollm2-135m_bf16", "device"), absent), encoding="utf-8")
    done = run_hardware(tmp_path)
    assert (done.returncode, done.stdout) == (1, "") and not record.exists()
    sentence = f"pairs.smollm2-135m_bf16.device is {absent}, which is not on this machine; allowed: auto, cpu,"
    assert done.stderr.startswith(f"error: params.yaml: {sentence}") and done.stderr.count("\n") == 1
    assert "smollm2-135m_bf16" in GOOD["study"]["pairs"] and "gpt2_distilgpt2" not in GOOD["study"]["pairs"]
    params.write_text(changed(("pairs", "gpt2_distilgpt2", "device"), absent), encoding="utf-8")
    assert run_hardware(tmp_path).returncode == 0 and record.exists()


@pytest.mark.parametrize(
    ("here", "allowed"),
    [({}, "auto, cpu, spread"), ({"cuda": "some GPU"}, "auto, cpu, spread, cuda"), ({"mps": "mps"}, "auto, cpu, spread, mps")],
)  # fmt: skip
def test_devices_that_are_here(monkeypatch, here, allowed):
    monkeypatch.setattr(hardware, "accelerators", lambda: here)
    for device in DEVICES:
        asked = {"timing.device": None, "pairs.p.device": device}
        if device in allowed.split(", "):
            hardware.check_devices(asked)
        else:
            with pytest.raises(InputError) as caught:
                hardware.check_devices(asked)
            assert str(caught.value) == (
                f"params.yaml: pairs.p.device is {device}, which is not on this machine; allowed: {allowed}."
            )


def test_the_kernels_are_those_of_the_library():
    """Named twice, for importing the library takes seconds, and every stage reads params.yaml."""
    from specdec import runners

    assert KERNELS == runners.KERNELS


@pytest.mark.parametrize(
    ("kernels", "dtype", "device", "here", "fault"),
    [
        ("packed", "float32", "auto", {}, None),
        ("packed", "float32", "cpu", {"cuda": "some GPU"}, None),
        ("packed", "float32", "auto", {"cuda": "some GPU"}, "packed, and the pair p is timed on cuda in float32; allowed: cpu"),
        ("packed", "bfloat16", "cpu", {}, "packed, and the pair p is timed on cpu in bfloat16; allowed: cpu and float32, or"),
        ("packed", "float32", "spread", {}, "packed, and the pair p is timed on spread in float32; allowed: cpu and float32"),
        ("joined", "bfloat16", "auto", {"cuda": "some GPU"}, None),
        ("joined", "float32", "spread", {}, "joined, and the pair p is timed on spread; allowed: one device, or timing.kernels:"),
        ("default", "float16", "spread", {"mps": "mps"}, None),
    ],
)  # fmt: skip
def test_kernels_that_cannot_run_where_a_pair_is_timed_are_refused(monkeypatch, kernels, dtype, device, here, fault):
    monkeypatch.setattr(hardware, "accelerators", lambda: here)
    if fault is None:
        hardware.check_kernels(kernels, dtype, {"p": device})
    else:
        with pytest.raises(InputError) as caught:
            hardware.check_kernels(kernels, dtype, {"p": device})
        assert str(caught.value).startswith(f"params.yaml: timing.kernels is {fault}")


def test_threads_of_params_yaml_are_part_of_the_fingerprint():
    assert describe(7)["fingerprint"]["threads"] == 7
    assert 1 <= describe(None)["fingerprint"]["threads"] <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Intel(R)  Xeon(R) Platinum 8488C\n\nprocessor\t: 1\n",
            "Intel(R) Xeon(R) Platinum 8488C",
        ),
        (
            "cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Processor @ 2.20GHz\nstepping\t: 8\nflags\t\t:\n",
            "Intel(R) Xeon(R) Processor @ 2.20GHz (family 6, model 143, stepping 8)",
        ),
        (
            "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd40\n",
            "aarch64 (implementer 0x41, part 0xd40, variant 0x1)",
        ),
        ("", "aarch64"),
    ],
)  # fmt: skip
def test_processor_names_tell_machines_apart(monkeypatch, cpuinfo, name):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert linux_cpu_name(cpuinfo) == name


# After a run


def test_provenance_counts_what_ran_and_names_where_the_rest_did(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = study_cells(load_params(ROOT / "params.yaml"))
    for path in found.values():
        cells.write_json(path, {"cpu": "Old"} if "benchmark" in str(path) else {})
    sweep = [stage for stage in found if stage.startswith("sweep_k@")]
    line = provenance(found, {"hardware", "tables", *sweep})
    assert line == f"{len(sweep)} cells measured now on this machine; {len(found) - len(sweep)} from committed results, " \
        "measured on CPU Old"  # fmt: skip
    timed = {stage for stage in found if "benchmark" in stage}
    assert "measured on" not in provenance(found, timed).split(";")[1]  # no other cell says where it was measured
    assert provenance(found, set(found)).endswith("; 0 from committed results")


def test_readme_takes_the_embedded_results_and_no_others(tmp_path):
    readme = tmp_path / "README.md"
    reports = {}
    for study in ("embedded", "quick"):
        reports[study] = tmp_path / study / "report.md"
        cells.write_text(reports[study], f"# Title\n<!-- table:begin -->\n| {study} \\1 |\n<!-- table:end -->\nrest\n")
    text = "# Lab\n<!-- results:begin -->\nold\n<!-- results:end -->\nmore\n"
    readme.write_text(text)
    update_readme(readme, reports["quick"])
    assert readme.read_text() == text
    update_readme(readme, reports["embedded"])
    new = "# Lab\n<!-- results:begin -->\n| embedded \\1 |\n<!-- results:end -->\nmore\n"
    assert readme.read_text() == new
    before = readme.stat().st_mtime_ns
    update_readme(readme, reports["embedded"])
    assert (readme.read_text(), readme.stat().st_mtime_ns) == (new, before)
    for broken in ("no markers\n", text + text, text.replace("begin", "x").replace("end", "begin").replace("x", "end")):
        readme.write_text(broken)
        with pytest.raises(InputError, match="results:begin"):
            update_readme(readme, reports["embedded"])
        assert readme.read_text() == broken


def test_a_filled_file_keeps_its_line_ends_and_its_link(tmp_path):
    real, link = tmp_path / "real.md", tmp_path / "README.md"
    real.write_bytes(b"# Lab\r\n<!-- a -->\r\n<!-- b -->\r\nmore\r\n")
    link.symlink_to(real)
    fill(link, "<!-- a -->", "<!-- b -->", "one\ntwo")
    assert link.is_symlink() and real.read_bytes() == b"# Lab\r\n<!-- a -->\r\none\r\ntwo\r\n<!-- b -->\r\nmore\r\n"


def test_a_file_to_fill_that_is_not_utf_8_is_named(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_bytes("# Lab \xe9\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"README\.md is not UTF-8 \(.* at byte 6\)\.$"):
        fill(readme, "<!-- a -->", "<!-- b -->", "text")


@pytest.mark.parametrize("arguments", [[], ["--measure"], ["--", "-s", "tables"]])
def test_run_study_calls_dvc_and_passes_its_exit_code_on(tmp_path, arguments):
    """A stand-in for DVC shows what it was called with; the real one is what the study itself runs."""
    (tmp_path / "dvc.py").write_text("import sys, shutil\nprint(sys.argv[1:], shutil.which('python'))\nsys.exit(251)\n")
    (tmp_path / "params.yaml").write_text(TEXT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "pipeline" / "run_study.py"), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 251, done.stderr
    expected = {"--measure": ["--force", "--no-run-cache"], "--": ["-s", "tables"]}.get("".join(arguments[:1]), [])
    assert done.stdout.startswith(f"{['repro', *expected]} {Path(sys.executable).parent}{os.sep}")
