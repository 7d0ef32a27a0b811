"""llama.cpp beside ours, against a stand-in for its package that computes with transformers' model."""

import ctypes
import json
import re
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_cells
import pytest
import torch
from gguf import GGUFReader, GGUFWriter, quants
from report_text import table as rows_in
from stand_ins import nearby, tiny_llama
from test_weights import only_from, spec, wheel  # noqa: F401 (fixtures)

from pipeline import cells, cli, llama_cpp_benchmark, llamacpp, report, tables, timed, weights
from pipeline.llamacpp import LlamaCpp, float32_gguf, library, llama_cpp_method
from pipeline.methods import Setting, TextPrompt, own_method
from pipeline.study import HubModel, LocalModel, load_params
from pipeline.timed import Rival, compare
from pipeline.weights import LoadedPair
from specdec.cache import Decoder, open_cache
from specdec.drafters import ModelDrafter
from specdec.errors import InputError, InvariantError
from specdec.sampling import SamplingConfig
from specdec.timing import StepClock

SETTING = Setting(3, SamplingConfig(), max_new_tokens=10, end_tokens=[], seed=0, runs=2, warmup=1, hf_assisted=False)


class Options(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("ftype", "allow_requantize")]


class Api:
    """The functions of `llama_cpp` that are used, by a model of transformers without a cache; keeps what it was asked."""

    LLAMA_FTYPE_ALL_F32 = GGML_TYPE_F32 = LLAMA_FLASH_ATTN_TYPE_DISABLED = 0

    def __init__(self, model=None):
        self.model, self.fed, self.options, self.logged, self.widened = model, [], [], None, 0
        self.code, self.left, self.crops = 0, None, True

    def llama_log_set(self, callback, data):
        self.logged = callback

    def llama_backend_init(self):
        pass

    def llama_model_quantize_default_params(self):
        return Options(ftype=15, allow_requantize=False)

    def llama_model_quantize(self, source, target, options):
        options = options._obj
        assert (options.ftype, bool(options.allow_requantize)) == (0, True)
        self.widened += 1
        writer = GGUFWriter(target.decode(), "llama")
        for tensor in GGUFReader(source.decode()).tensors:
            if tensor.name == self.left:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            else:
                writer.add_tensor(tensor.name, quants.dequantize(tensor.data, tensor.tensor_type))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.code

    def llama_model_default_params(self):
        return SimpleNamespace(n_gpu_layers=-1)

    def llama_model_load_from_file(self, path, options):
        assert options.n_gpu_layers == 0
        return self.model if Path(path.decode()).is_file() else None

    def llama_model_get_vocab(self, model):
        return model

    def llama_vocab_n_tokens(self, vocabulary):
        return vocabulary.config.vocab_size

    def llama_context_default_params(self):
        return SimpleNamespace()

    def llama_init_from_model(self, model, options):
        self.options.append(options)
        return SimpleNamespace(text=[], logits=None, room=options.n_ctx)

    def llama_batch_init(self, size, embeddings, sequences):
        slots = {name: [None] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] * sequences for _ in range(size)], **slots)

    def llama_decode(self, context, batch):
        n = batch.n_tokens
        assert batch.pos[:n] == list(range(len(context.text), len(context.text) + n))
        assert batch.n_seq_id[:n] == [1] * n and batch.seq_id[:n] == [[0]] * n
        if len(context.text) + n > context.room:
            return 1
        self.fed.append((len(context.text), batch.token[:n]))
        context.text += batch.token[:n]
        with torch.inference_mode():
            logits = self.model(torch.tensor([context.text])).logits[0, -n:]
        context.logits = logits[torch.tensor(batch.logits[:n], dtype=torch.bool)].contiguous()
        return self.code

    def llama_get_logits_ith(self, context, row):
        return ctypes.cast(context.logits[row].data_ptr(), ctypes.POINTER(ctypes.c_float))

    def llama_get_memory(self, context):
        return context

    def llama_memory_seq_rm(self, memory, sequence, start, end):
        assert (sequence, end) == (0, -1)
        del memory.text[start:]
        return self.crops


def prompt_of(length, seed):
    return TextPrompt(seed, "qa", torch.randint(40, (1, length), generator=torch.Generator().manual_seed(seed)))


PROMPTS = [prompt_of(5, 0), prompt_of(9, 1), prompt_of(1, 2)]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def api(model):
    return Api(model)


@pytest.fixture
def decoder(api, model, tmp_path):
    (tmp_path / "tiny.gguf").touch()
    return LlamaCpp(api, tmp_path / "tiny.gguf", model.config, threads=3, context=32)


# Decoding


@pytest.mark.parametrize("prompt", PROMPTS, ids=["5", "9", "1"])
def test_the_tokens_are_those_of_our_plain_decoding_run_after_run(decoder, model, prompt):
    method = llama_cpp_method(decoder, SETTING)
    expected = own_method(model, None, SETTING)(prompt).new_tokens
    for _ in range(2):
        assert method(prompt).new_tokens == expected
    ends = replace(SETTING, end_tokens=[expected[4]])
    stopped = llama_cpp_method(decoder, ends)(prompt).new_tokens
    assert stopped == own_method(model, None, ends)(prompt).new_tokens and stopped[-1] == expected[4]


def test_the_prompt_but_for_its_last_token_is_prefill_and_each_new_token_is_one_pass(decoder, api, monkeypatch):
    clock = iter([100.0, 103.0, 110.0])
    monkeypatch.setattr(llamacpp, "now", lambda device: next(clock))
    outcome = llama_cpp_method(decoder, SETTING)(PROMPTS[0])
    ids = PROMPTS[0].input_ids[0].tolist()
    assert api.fed == [(0, ids[:-1]), *((4 + i, [t]) for i, t in enumerate([ids[-1], *outcome.new_tokens[:-1]]))]
    run = outcome.run
    assert (run.prefill, run.decode, run.decoded, run.new_tokens) == (3.0, 7.0, 10, 10)


def test_a_context_has_our_threads_and_float32(decoder, api):
    decoder.open()
    (options,) = api.options
    assert vars(options) == {
        **dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), 32),
        **dict.fromkeys(("n_threads", "n_threads_batch"), 3),
        **dict.fromkeys(("type_k", "type_v"), api.GGML_TYPE_F32),
        "flash_attn_type": api.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    }


def test_it_is_a_decoder_whose_logits_are_the_models(decoder, model):
    assert isinstance(decoder, Decoder)
    cache, text = open_cache(decoder), PROMPTS[1].input_ids[0]
    with torch.inference_mode():
        expected = model(text[None]).logits[0]
    torch.testing.assert_close(cache.forward(text[:3], keep=1), expected[2:3])
    torch.testing.assert_close(cache.forward(text[3:]), expected[3:])
    assert (cache.length, cache.room) == (9, 23)
    cache.rollback(4)
    torch.testing.assert_close(cache.forward(text[4:6]), expected[4:6])
    with pytest.raises(ValueError, match="6 tokens back to 7"):
        cache.rollback(7)
    cache.check(text[:6])
    assert cache.length == 6
    with pytest.raises(InvariantError, match="the cache of 9 tokens has the length 6"):
        cache.check(text)
    with pytest.raises(InvariantError, match="logits of the next token differ"):
        cache.check(text[:6].flip(0))


def test_what_llama_cpp_refuses_is_one_sentence(decoder, api, model, tmp_path):
    cache = decoder.open()
    with pytest.raises(InputError, match="33 tokens were fed to a cache of 0; allowed: 1 to 32"):
        cache.feed([1] * 33, keep=1)
    api.code = 2
    with pytest.raises(InputError, match=r"did not decode 2 tokens behind 0 \(code 2\)"):
        cache.feed([1, 2], keep=1)
    api.crops = False
    with pytest.raises(InputError, match="cannot roll its cache of 0 tokens back to 0"):
        cache.rollback(0)
    with pytest.raises(InputError, match=r"cannot load .*none\.gguf; delete it"):
        LlamaCpp(api, tmp_path / "none.gguf", model.config, 1, 32)


# The package and its file


def test_a_missing_package_is_one_sentence_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(
        InputError, match=r"^The package llama-cpp-python is not installed .*requirements-llama-cpp\.txt"
    ):
        library()


def test_the_package_is_silenced(monkeypatch, api):
    monkeypatch.setitem(sys.modules, "llama_cpp", api)
    assert library() is api
    assert api.logged(2, b"noise", None) is None


def test_no_script_hides_the_package():
    assert not (Path(llamacpp.__file__).parent / "llama_cpp.py").exists()


@pytest.fixture
def package(spec):  # noqa: F811
    return spec


def contents(folder):
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_the_file_is_made_once_from_the_wheels_and_holds_its_values(package, api, tmp_path, monkeypatch):
    path = float32_gguf(api, "tiny", package, tmp_path / "models")
    assert contents(tmp_path / "models") == {path.name} == {f"tiny-{package.member_sha256[:12]}-f32.gguf"}
    converted = weights.load_model(
        weights.fetch_model("tiny", package, tmp_path / "models")[0], dtype=torch.float32, device=torch.device("cpu")
    )
    (embedding,) = [t for t in GGUFReader(path).tensors if t.name == "token_embd.weight"]
    torch.testing.assert_close(torch.from_numpy(embedding.data.copy()), converted.model.embed_tokens.weight.detach())
    monkeypatch.setattr(weights, "_pip_download", lambda *_: pytest.fail("fetched again"))
    assert float32_gguf(api, "tiny", package, tmp_path / "models") == path and api.widened == 1
    other = package.model_copy(update={"member_sha256": "0" * 64})
    with pytest.raises(pytest.fail.Exception, match="fetched again"):
        float32_gguf(api, "tiny", other, tmp_path / "models")


def test_one_of_several_processes_makes_the_file(package, api, tmp_path):
    found = []
    ask = [
        threading.Thread(target=lambda: found.append(float32_gguf(api, "tiny", package, tmp_path))) for _ in range(3)
    ]
    for thread in ask:
        thread.start()
    for thread in ask:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1 and api.widened == 1


@pytest.mark.parametrize(
    ("change", "trouble", "message"),
    [
        ({}, {"code": 1}, r"llama\.cpp could not write tiny-\w+-f32\.gguf \(code 1\)"),
        ({}, {"left": "token_embd.weight"}, r"left tensors of tiny-\w+-f32\.gguf in Q8_0; allowed: F32"),
        ({"wheel_sha256": "0" * 64}, {}, r"models\.tiny\.wheel_sha256 in params\.yaml is 0"),
        ({"member_sha256": "0" * 64}, {}, r"models\.tiny\.member_sha256 in params\.yaml is 0"),
        ({"member": "fake_model/other.gguf"}, {}, r"holds no fake_model/other\.gguf"),
        ({"version": "2.0"}, {}, r"pip could not download fake-model==2\.0"),
    ],
)
def test_a_file_that_cannot_be_made_leaves_nothing_behind(package, api, tmp_path, change, trouble, message):
    for name, value in trouble.items():
        setattr(api, name, value)
    with pytest.raises(InputError, match=message):
        float32_gguf(api, "tiny", package.model_copy(update=change), tmp_path)
    assert contents(tmp_path) == set()


def test_what_a_killed_process_left_is_nobodys(package, api, tmp_path):
    name = f"tiny-{package.member_sha256[:12]}-f32.gguf"
    cells.write_text(tmp_path / f".{name}.partial" / name, "half")
    path = float32_gguf(api, "tiny", package, tmp_path)
    assert path.name == name and len(GGUFReader(path).tensors) > 1 and contents(tmp_path) == {name}


@pytest.mark.parametrize("model", [LocalModel(source="local", path="x"), HubModel(source="hub", repo="a/b")])
def test_a_model_without_a_gguf_file_is_one_sentence(api, model, tmp_path):
    with pytest.raises(InputError, match=f"The model m has source: {model.source}, and so no GGUF file for llama.cpp"):
        float32_gguf(api, "m", model, tmp_path)


# The comparison


def rival_of(decoder):
    costs = StepClock({"1": lambda: None}, decoder.device)
    return Rival("llama_cpp", llama_cpp_method(decoder, SETTING), costs)


def test_a_rival_takes_turns_and_is_compared_with_our_plain_decoding(decoder, model):
    rival = rival_of(decoder)
    record = compare(model, ModelDrafter(nearby(model, 0.2)), PROMPTS, SETTING, "test", rival)
    json.dumps(record, allow_nan=False)
    assert (record["llama_cpp_identical_prompts"], record["llama_cpp_ties"]) == (3, 0)
    assert record["llama_cpp_first_divergences"] == record["llama_cpp_divergence_gaps"] == [None] * 3
    for sample in record["samples"]:
        assert len(sample["decode_seconds"]["llama_cpp"]) == 2 and sample["new_tokens"]["llama_cpp"] == 10
    for name in ("ar", "spec", "hf"):
        ratio = record[f"{name}_tokens_per_second"] / record["llama_cpp_tokens_per_second"]
        assert record[f"{name}_over_llama_cpp"] == pytest.approx(ratio)
        assert {f"{name}_over_llama_cpp_lo", f"{name}_over_llama_cpp_hi"} <= record.keys()
    assert len(rival.costs._samples["1"]) == len(PROMPTS) * timed.COST_RUNS


def test_another_text_is_recorded_with_its_gap_and_fails_nothing(decoder, model):
    decoder.api.model = nearby(model, 0.5)
    record = compare(model, ModelDrafter(nearby(model, 0.2)), PROMPTS, SETTING, "test", rival_of(decoder))
    assert record["llama_cpp_identical_prompts"] < 3 and record["llama_cpp_ties"] == 0
    assert record["identical"] == "identical"  # ours, speculative against plain
    for at, gap in zip(record["llama_cpp_first_divergences"], record["llama_cpp_divergence_gaps"], strict=True):
        assert (at is None) == (gap is None) and (gap is None or gap > 0)


def test_without_a_rival_a_record_knows_of_none(model):
    record = compare(model, ModelDrafter(nearby(model, 0.2)), PROMPTS, SETTING, "test")
    assert not [key for key in record if "llama" in key]


def test_a_text_that_goes_on_has_no_gap(decoder, model):
    longer = llama_cpp_method(decoder, replace(SETTING, max_new_tokens=11))(PROMPTS[0])
    outcomes = [{name: [own_method(model, None, SETTING)(PROMPTS[0])] for name in ("ar", "spec", "hf")}]
    record = timed.rival_record("llama_cpp", model, PROMPTS[:1], [outcomes[0] | {"llama_cpp": [longer]}])
    assert (record["llama_cpp_first_divergences"], record["llama_cpp_divergence_gaps"]) == ([10], [None])
    json.dumps(record, allow_nan=False)


# The study and the cell

WHEEL = """small:
    source: wheel
    package: fake-model
    version: "1.0"
    wheel_sha256: "{0}"
    member: tiny.gguf
    member_sha256: "{0}"
""".format("0" * 64)
LOCAL = "small: {source: local, path: small, format: safetensors}\n"
PARAMS = fake_cells.PARAMS.replace(LOCAL, WHEEL).replace("llama_cpp_pairs: []", "llama_cpp_pairs: [small_int8]")


@pytest.mark.parametrize(
    ("text", "value", "sentence"),
    [
        (
            PARAMS,
            "[small_bf16, nobody]",
            r'study\.llama_cpp_pairs\[1\] is "nobody"; allowed: a pair .*small_int8, small_bf16',
        ),
        (PARAMS, "small_int8", r'llama_cpp_pairs is "small_int8"; allowed: lists\.'),
        (PARAMS, "[small_int8, small_int8]", r"allowed: lists without repeats"),
        (
            fake_cells.PARAMS,
            "[small_int8]",
            r'"small_int8"; allowed: a pair .*target comes as a GGUF file \(source: wheel\)\.$',
        ),
    ],
)
def test_pairs_that_llama_cpp_cannot_run_are_refused(tmp_path, text, value, sentence):
    text = text.replace("llama_cpp_pairs: [small_int8]", "llama_cpp_pairs: []")
    (tmp_path / "params.yaml").write_text(text.replace("llama_cpp_pairs: []", f"llama_cpp_pairs: {value}"))
    with pytest.raises(InputError, match=sentence):
        load_params(tmp_path / "params.yaml")


def test_only_its_own_study_has_such_pairs_and_every_study_says_so():
    params = load_params(Path(__file__).resolve().parents[1] / "params.yaml")
    assert {name for name, study in params.studies.items() if study.llama_cpp_pairs} == {"llama_cpp"}
    assert params.study.llama_cpp_pairs == []


@pytest.fixture
def lab(tmp_path, monkeypatch, api, model):
    """The script's surroundings: tiny models, prompts of random ids, and the stand-in."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(
        PARAMS.replace("device: auto", "device: cpu").replace("runs: 5, warmup", "runs: 2, warmup")
    )
    cells.write_json(cells.HARDWARE, {"fingerprint": {"threads": 1, "cpu": "Imaginary 1"}})
    loaded = LoadedPair(model, ModelDrafter(nearby(model, 0.1)), 17, None, [3], None, None)
    Path("tiny.gguf").write_bytes(b"weights")
    for name, value in {
        "load_pair": lambda *arguments, **options: loaded,
        "load_prompts": lambda path: None,
        "select_prompts": lambda *arguments: [
            SimpleNamespace(question_id=p.question_id, category="qa") for p in PROMPTS
        ],
        "encode_prompt": lambda tokenizer, prompt: PROMPTS[prompt.question_id].input_ids,
        "library": lambda: api,
        "float32_gguf": lambda *arguments: Path("tiny.gguf"),
        "package_version": lambda: "0.0.1",
    }.items():
        monkeypatch.setattr(llama_cpp_benchmark, name, value)
    monkeypatch.setattr("sys.argv", ["script.py", "--pair", "small_int8", "--out", "cell.json"])
    return api


def test_a_cell_has_speeds_passes_versions_and_the_machine(lab):
    llama_cpp_benchmark.main()
    record = json.loads(Path("cell.json").read_text(), parse_constant=pytest.fail)
    expected = {"pair": "small_int8", "study": "fake", "k": 4, "temperature": 0.0, "runs": 2, "max_new_tokens": 32}
    expected |= {
        "cpu": "Imaginary 1",
        "dtype": "float32",
        "kernels": "default",
        "llama_cpp_python": "0.0.1",
        "threads": 1,
    }
    expected |= {"llama_cpp_gguf_sha256": "9b2c3bb0", "llama_cpp_identical_prompts": 3, "prompts": 3}
    expected["llama_cpp_gguf_sha256"] = llama_cpp_benchmark.sha256(Path("tiny.gguf"))
    assert {key: record[key] for key in expected} == expected
    assert record["llama_cpp_logit_error"] < 1e-4
    assert min(record["llama_cpp_seconds_1"], record["llama_cpp_seconds_5"]) > 0
    assert {len(tokens) for _, tokens in lab.fed[-8:]} == {1, 5}, "passes are timed behind each prompt"
    assert set(tables.LLAMA_CPP) <= record.keys()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dtype: float32", "dtype: bfloat16", "is timed on cpu in bfloat16; allowed beside llama.cpp: cpu and float32"),
        ("device: cpu", "device: spread", "is timed on spread in float32; allowed beside llama.cpp: cpu and float32"),
    ],
)
def test_what_llama_cpp_is_not_compared_in_is_one_sentence(lab, capsys, old, new, message):
    text = Path("params.yaml").read_text(encoding="utf-8").replace(old, new).replace("[0.0, 0.4, 0.8]", "[0.0]")
    # int8 and bf16 copy a target on one device
    Path("params.yaml").write_text(re.sub("draft: (int8|bf16)", "draft: lookup", text), encoding="utf-8")
    with pytest.raises(SystemExit):
        cli.run(llama_cpp_benchmark.main)
    assert message in capsys.readouterr().err and not Path("cell.json").exists()


# Table and report


@pytest.fixture
def reported(lab, tmp_path):
    llama_cpp_benchmark.main()
    shutil.move("cell.json", "kept.json")
    params = fake_cells.write(tmp_path, PARAMS)
    fake = fake_cells.benchmark("small_int8", 4)
    cell = json.loads(Path("kept.json").read_text())
    record = fake | {key: value for key, value in cell.items() if "llama" in key or key.startswith("target_seconds")}
    cells.write_json(cells.llama_cpp("fake", "small_int8"), record)
    return params


def text():
    tables.main()
    return report.report("fake", Path("plots/fake"))


def test_the_table_and_the_report_hold_the_cell(reported, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tables.py"])
    values = {"ar_over_llama_cpp": 0.75, "ar_over_llama_cpp_lo": 0.7, "ar_over_llama_cpp_hi": 0.8}
    values |= {"spec_over_llama_cpp": 1.25, "spec_over_llama_cpp_lo": 1.1, "spec_over_llama_cpp_hi": 1.4}
    values |= {"hf_over_llama_cpp": 0.99, "hf_over_llama_cpp_lo": 0.9, "hf_over_llama_cpp_hi": 1.1}
    values |= {"llama_cpp_identical_prompts": 11, "llama_cpp_ties": 1, "llama_cpp_seconds_5": 0.0375}
    fake_cells.edit(cells.llama_cpp("fake", "small_int8"), **values)
    part = text().split("## Beside llama.cpp")[1].split("\n## ")[0]
    row = rows_in(part)[0]
    assert (row["plain / llama.cpp"], row["speculative / llama.cpp"]) == ("0.75 [0.70, 0.80]", "1.25 [1.10, 1.40]")
    assert "11 of 12" in part and "| 37.5 |" in part and "llama-cpp-python 0.0.1" in part
    assert "plain decoding 0.75 [0.70, 0.80], slower; our speculative decoding 1.25 [1.10, 1.40], faster" in part
    assert "HF generate 0.99 [0.90, 1.10], not distinguishable from it" in part
    ends = {f"{name}_over_llama_cpp_{end}": None for name in ("ar", "spec", "hf") for end in ("lo", "hi")}
    fake_cells.edit(cells.llama_cpp("fake", "small_int8"), **ends)
    assert text().count("too few prompts for an interval") >= 3


def test_a_missing_key_of_the_cell_is_named(reported):
    path = cells.llama_cpp("fake", "small_int8")
    record = cells.read_json(path)
    del record["llama_cpp_seconds_5"]
    cells.write_json(path, record)
    with pytest.raises(InputError, match=f"^{path} lacks the key llama_cpp_seconds_5"):
        tables.gather(reported)


def test_a_study_without_such_pairs_has_an_empty_table_and_no_section(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tables.py"])
    fake_cells.write(tmp_path)
    assert "llama" not in text()
    assert len(Path("plots/fake/llama_cpp.csv").read_text().splitlines()) == 1
