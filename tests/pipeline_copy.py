"""A copy of this repository in which a tiny study takes seconds: own git, own DVC, own models, and no network.

What runs there is the copy's code. Two such copies are at hand: one measured by the real scripts, and one whose scripts are
replaced by `STAND_IN`, which writes a stage's outputs without measuring anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from dvc.repo import Repo
from local_hub import LocalHub
from stand_ins import nearby, tiny_llama
from sync_deps import ROOT, synchronised
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pipeline.prompts import load_prompts

PARTS = (
    *(".dvcignore", ".gitignore", ".gitattributes", ".dvc/.gitignore", ".dvc/config", ".dvc/plots"),
    *("dvc.yaml", "pyproject.toml", "pipeline", "specdec"),
)
PARAMS = """\
models:
  target: {source: local, path: models/target}
  draft: {source: local, path: models/draft}
  misfit: {source: local, path: models/misfit}
  packaged:
    source: wheel
    package: fake-model
    version: "1.0"
    wheel_sha256: "0000000000000000000000000000000000000000000000000000000000000000"
    member: tiny.gguf
    member_sha256: "0000000000000000000000000000000000000000000000000000000000000000"
pairs:
  int8: {target: target, draft: int8}
  lookup: {target: target, draft: lookup}
  model-draft: {target: target, draft: draft}
  misfit: {target: target, draft: misfit}
  packaged: {target: packaged, draft: lookup}
studies:
  tiny: &tiny
    name: tiny
    pairs: [int8, lookup, model-draft]
    k: [1, 2]
    temperature: [1.0]
    benchmark_k: [2]
    timed_pairs: [int8, lookup, model-draft]
    detail_pairs: [int8]
    confidence: [0.0, 0.5]
    confidence_k: 2
    identity_dtypes: [bfloat16]
    quantized_pairs: [model-draft]
    contexts: few
    variants: [bf16, w4-row-gptq]
    loop_variants: [w4-row-gptq]
    kernel_variants: [w8-row-sym-rtn]
    kernels_compared: [default, joined, packed]
    comparisons: [int8, lookup]
    llama_cpp_pairs: []
    prompts_per_category: 2
    max_new_tokens: 4
  other: &other
    name: other
    pairs: [lookup]
    k: [2]
    temperature: [1.0]
    benchmark_k: [2]
    timed_pairs: [lookup]
    detail_pairs: [lookup]
    confidence: [0.0]
    confidence_k: 2
    identity_dtypes: [bfloat16]
    quantized_pairs: [lookup]
    contexts: few
    variants: [w3-row-awq]
    loop_variants: [w3-row-awq]
    kernel_variants: [bf16]
    kernels_compared: [default]
    comparisons: [lookup]
    llama_cpp_pairs: []
    prompts_per_category: 1
    max_new_tokens: 4
study: *tiny
prompts:
  file: pipeline/prompts.jsonl
  categories: [multi_turn, translation, summarization, qa, math_reasoning, rag]
context_prompts: pipeline/context_prompts.jsonl
contexts:
  few:
    prompts_per_category: 2
    max_new_tokens: 6
    temperature: [0.7, 1.0]
    calibration_per_category: 1
    calibration_tokens: 24
    loop_prompts_per_category: 2
    loop_tokens: 4
comparisons:
  int8:
    {categories: [rag, qa], prompts_per_category: 1, max_new_tokens: 5, kernels: [default, joined], k: [1, 2, auto],
     expected_alpha: 0.8}
  lookup: {categories: [rag], prompts_per_category: 2, max_new_tokens: 5, kernels: [packed], k: [auto],
     expected_alpha: 0.8}
decoding: {seed: 0, k: 2, temperature: 0.0, top_k: null, top_p: null, verifier: token}
timing: {runs: 2, warmup: 1, device: cpu, dtype: float32, threads: 1, kernels: default}
cost_curve: {rows: 2, contexts: [8], runs: 2}
toy:
  k: [1, 2]
  temperature: [0.2]
  seeds: 1
  k_for_temperature: 2
  max_new_tokens: 8
  prompt_tokens: 8
  runs: 2
"""

STAND_IN = '''\
"""Writes the outputs of the stage whose script it replaces: what it was asked for, or a hash of the results it reads."""

import hashlib
import os
import re
import sys
from pathlib import Path

from pipeline import cells

TIMED = ("benchmark", "quantized_benchmark", "cost_curve", "comparison", "llama_cpp_benchmark")


def main(name, arguments):
    params = Path("params.yaml").read_text(encoding="utf-8")
    if name == "hardware":
        cells.write_json(cells.HARDWARE, {"fingerprint": {"cpu": os.environ["STAND_IN_CPU"]}})
    elif arguments:
        (out,) = (value for option, value in zip(arguments, arguments[1:]) if option in ("--out", "--json"))
        cells.write_json(out, {"arguments": arguments, "params": params, "cpu": cells.cpu() if name in TIMED else None})
    else:
        study = re.search(r"(?m)^study: [*](\\S+)", params)[1]
        contexts = re.search(rf"(?ms)^  {study}: &.*?^    contexts: (\\S+)", params)[1]
        text = Path("dvc.yaml").read_text(encoding="utf-8")
        text = text.replace("${study.name}", study).replace("${study.contexts}", contexts)
        stage = re.search(rf"(?ms)^  {name}:\\n(.*?)^  (?=\\S)|\\Z", text + "  end")[1]
        read = [Path(path) for path in re.findall(r"(?m)^      - ((?:metrics|plots)/[^:\\n]+)$", stage)]
        read = [file for path in read for file in (sorted(path.rglob("*.*")) if path.is_dir() else [path])]
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in read)).hexdigest()
        for out in re.findall(r"(?m)^      - (plots/[^:\\n]+):$", stage):
            cells.write_text(out, f"{digest} {cells.cpu() if name == 'report' else ''}")


def readme_part(report):
    """What run_study.py imports from the script of `report`."""
    return report


if __name__ == "__main__":
    main(Path(sys.argv[0]).stem, sys.argv[1:])
'''

# Runs several scripts in one process, for importing torch takes seconds: [code, stdout, stderr] of each, as JSON on stdout.
COMMAND_LINES = """\
import contextlib, io, json, runpy, sys, traceback

def outcome(arguments):
    sys.argv = arguments
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(stdout):
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, stdout.getvalue(), stderr.getvalue()

print(json.dumps([outcome(arguments) for arguments in json.load(sys.stdin)]))
"""


class PipelineCopy:
    """A copy of the repository at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("PIP_", "GIT_", "DVC_", "HF_"))
            },
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # stages call plain `python`
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_CEILING_DIRECTORIES": str(root.parent),
            **{
                f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
            },
            "DVC_NO_ANALYTICS": "1",
            "DVC_GLOBAL_CONFIG_DIR": str(root / ".dvc" / "tmp"),
            "DVC_SYSTEM_CONFIG_DIR": str(root / ".dvc" / "tmp"),
            "DVC_SITE_CACHE_DIR": str(self._site),
            "STAND_IN_CPU": "first",
        }

    @property
    def _site(self) -> Path:
        return self.root / ".dvc" / "tmp" / "site"

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Run in the background; what it prints lands beside `root`, in `stdout` and `stderr`."""
        with (self.root.parent / "stdout").open("w") as stdout, (self.root.parent / "stderr").open("w") as stderr:
            return subprocess.Popen(command, cwd=self.root, env=self.environment, stdout=stdout, stderr=stderr)

    def run(self, *command: str, code: int = 0, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            encoding="utf-8",
            capture_output=True,
            input=stdin,
            timeout=900,
        )
        assert done.returncode == code, (
            f"{command} exits with {done.returncode}\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}"
        )
        return done

    def python(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, *arguments, code=code)

    def dvc(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "dvc", *arguments, code=code)

    def repro(self, *arguments: str) -> list[str]:
        """The stages that ran, in their order."""
        return stages_run(self.dvc("repro", *arguments).stdout)

    def git(self, *arguments: str) -> str:
        return self.run("git", *arguments).stdout

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "all")

    def command_lines(self, *commands: list[str]) -> list[tuple[int, str]]:
        """Exit code and stderr of each script call, all in one process."""
        return [(code, stderr) for code, _, stderr in self.outcomes(*commands)]

    def outcomes(self, *commands: list[str]) -> list[tuple[int, str, str]]:
        """The same with stdout between them."""
        done = self.run(sys.executable, "-c", COMMAND_LINES, stdin=json.dumps(commands))
        assert "Traceback" not in done.stderr
        return [(code, stdout, stderr) for code, stdout, stderr in json.loads(done.stdout)]

    def changes(self) -> dict[str, Any]:
        """`dvc status` but for `hardware`, which always runs: what has changed for each stage that `dvc repro` would run.

        A stage that will only have to follow one of these is not in it.
        """
        with chdir(self.root), Repo(config={"core": {"site_cache_dir": str(self._site)}}) as repo:
            status: dict[str, Any] = repo.status()
        return {name: change for name, change in status.items() if name != "hardware"}

    def results(self) -> dict[str, bytes]:
        """Every file of metrics/ and plots/, half-written ones too."""
        files = [
            path for name in ("metrics", "plots") for path in sorted((self.root / name).rglob("*")) if path.is_file()
        ]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files}

    def replace(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        path.write_text(text.replace(old, new), encoding="utf-8")

    def append(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(text)

    @contextmanager
    def undone(self, file: str) -> Iterator[None]:
        """The file is afterwards what it was before, or gone if it was not there."""
        path = self.root / file
        before = path.read_bytes() if path.exists() else None
        try:
            yield
        finally:
            path.unlink()
            if before is not None:
                path.write_bytes(before)

    def another(self, root: Path) -> PipelineCopy:
        """A copy of this copy, in `root`."""
        shutil.copytree(self.root, root, ignore=lambda folder, _: ["tmp"] if Path(folder).name == ".dvc" else [])
        return PipelineCopy(root)

    def forget(self) -> None:
        """Without DVC's own store nothing can be restored instead of measured."""
        shutil.rmtree(self.root / ".dvc" / "cache")


def stages_run(stdout: str) -> list[str]:
    """The stages that `dvc repro` ran by what it printed: not those that it skipped, nor those that it restored."""
    return re.findall(r"(?m)^Running stage '(.+)':", stdout)


def kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started, and without a chance to clean up."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def make(root: Path) -> PipelineCopy:
    """The repository's files with the tiny study; neither git nor results yet."""
    for part in PARTS:
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, root / part)
    (root / "params.yaml").write_text(PARAMS, encoding="utf-8")
    copy = PipelineCopy(root)
    words = _common_words(copy, 400)
    target = tiny_llama(vocab_size=len(words), max_position_embeddings=1024, eos_token_id=1)
    _save_model(root / "models" / "target", target, words)
    _save_model(root / "models" / "draft", nearby(target, 0.1), words)
    _save_model(root / "models" / "misfit", tiny_llama(vocab_size=len(words) + 1), [*words, "<more>"])
    return copy


def _common_words(copy: PipelineCopy, size: int) -> list[str]:
    splitter = Whitespace()
    turns = [prompt.turns[0] for prompt in load_prompts(copy.root / "pipeline" / "prompts.jsonl")]
    counts = Counter(word for turn in turns for word, _ in splitter.pre_tokenize_str(turn))
    return ["<unk>", "<end>", *sorted(sorted(counts), key=lambda word: -counts[word])[: size - 2]]


def _save_model(folder: Path, model: PreTrainedModel, words: list[str]) -> None:
    """A model folder whose tokenizer knows these words and has a chat template."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] + '<end>' }}{% endfor %}"
    fast.save_pretrained(folder)


def with_git(copy: PipelineCopy) -> PipelineCopy:
    copy.git("init", "-q")
    copy.commit()
    return copy


def with_make(copy: PipelineCopy) -> PipelineCopy:
    """The Makefile, with a virtual environment that is this one."""
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, copy.root)
    python = copy.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    (copy.root / ".venv" / "runtime").touch()  # newer than what it would be made from
    return copy


def use_hub(copy: PipelineCopy, hub: LocalHub) -> None:
    """Ask this hub for models, with a cache that is empty."""
    del copy.environment["HF_HUB_OFFLINE"]
    # The copy's own PATH stays: it has the interpreter of the tests first.
    direct = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    copy.environment = hub.environment(copy.root.parent / "home") | copy.environment | direct


def use_stand_ins(copy: PipelineCopy) -> None:
    """Replace every stage's script. dvc.yaml then declares the few modules that these import, which makes DVC faster."""
    file = copy.root / "dvc.yaml"
    text = file.read_text(encoding="utf-8")
    for script in re.findall(r"python (pipeline/\w+\.py)", text):
        (copy.root / script).write_text(STAND_IN, encoding="utf-8")
    file.write_text(synchronised(text, copy.root), encoding="utf-8")
