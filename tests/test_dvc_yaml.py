"""dvc.yaml declares what the scripts use: every imported module, every key of params.yaml, the paths of cells.py.

Anything undeclared would leave stale results unnoticed. Scripts are read, not run. Whether the committed results are up to date
is checked by .ci/run, not here.
"""

import ast
import re
import shutil
from pathlib import Path

import pytest
from dvc.repo import Repo
from pydantic import BaseModel
from ruamel.yaml import YAML
from sync_deps import ROOT, closure, script_of, synchronised

from pipeline import captions, cells
from pipeline.run_study import study_cells
from pipeline.study import Params, load_params

STAGES = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]
ORDER = [
    "hardware",
    "toy_benchmark",
    "toy_sweep_k",
    "toy_sweep_temperature",
    "download",
    "sweep_k",
    "sweep_temperature",
    "sweep_block",
    "sweep_confidence",
    "hf_benchmark",
    "cost_curve",
    "comparison",
    "llama_cpp",
    "greedy_identity",
    "contexts",
    "quantized_alpha",
    "quantized_loop",
    "quantized_benchmark",
    "tables",
    "plot",
    "report",
]
SCRIPTS = sorted({script_of(stage["cmd"]) for stage in STAGES.values()})


def test_order():
    assert list(STAGES) == ORDER


@pytest.mark.parametrize("package", ["specdec", "pipeline"])
def test_packages_import_nothing(package):
    """Else importing any module would import others that no stage declares."""
    (docstring,) = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body
    assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)


# Modules


@pytest.mark.parametrize("stage", STAGES)
def test_a17_a_stage_declares_the_modules_that_its_script_imports(stage):
    declared = [dep for dep in STAGES[stage]["deps"] if dep.endswith((".py", ".cpp"))]
    assert len(set(declared)) == len(declared)
    assert set(declared) == closure(script_of(STAGES[stage]["cmd"])), "`make deps` mends this"


def test_make_deps_writes_the_closure_and_nothing_else(tmp_path):
    for name, source in {
        "pipeline/a.py": "import torch\nfrom specdec import x\nfrom pipeline.b import f\n",
        "pipeline/b.py": "def f():\n    import specdec.y\n    import pipeline.a\n",
        "specdec/x.py": "",
        "specdec/y.py": "import json.decoder\n",
        "specdec/y.cpp": "",
        "specdec/unused.py": "",
    }.items():
        cells.write_text(tmp_path / name, source)
    text = (
        "stages:\n  one:\n    cmd: python pipeline/a.py --out c.json\n    deps:\n      - pipeline/a.py\n      - specdec/gone.py\n"
        "      - data.csv\n    params:\n      - x.py\n  two:\n    cmd: python pipeline/b.py\n    deps:\n    outs:\n      - c\n"
    )
    want = (
        "stages:\n  one:\n    cmd: python pipeline/a.py --out c.json\n    deps:\n      - pipeline/a.py\n      - pipeline/b.py\n"
        "      - specdec/x.py\n      - specdec/y.cpp\n      - specdec/y.py\n      - data.csv\n    params:\n      - x.py\n"
        "  two:\n    cmd: python pipeline/b.py\n    deps:\n      - pipeline/b.py\n      - pipeline/a.py\n      - specdec/x.py\n"
        "      - specdec/y.cpp\n      - specdec/y.py\n    outs:\n      - c\n"
    )
    assert synchronised(text, tmp_path) == want
    assert synchronised(want, tmp_path) == want


# Keys of params.yaml


def declared_keys(stage):
    """The keys of params.yaml that a stage declares; `pairs.${item.pair}` counts as `pairs`, the axis `study` as its name."""
    axis = {"study.name"} if "study" in STAGES[stage].get("matrix", {}) else set()
    return axis | {key.split(".$")[0] for key in STAGES[stage].get("params", []) if isinstance(key, str)}


def keys_read(source):
    """Keys of params.yaml that a module reads: `params.<section>` or `params.<section>.<key>`, as far as it is spelt out."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    keys = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "pair_spec":
            keys.add("pairs")
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "params"):
            continue
        section, parent = node.attr, parents[node]
        kind = Params.model_fields[section].annotation if section in Params.model_fields else None
        if not isinstance(kind, type) or not issubclass(
            kind, BaseModel
        ):  # models, pairs, studies; or not our params at all
            keys |= {section} & Params.model_fields.keys()
        elif isinstance(parent, ast.Attribute) and parent.attr in kind.model_fields:
            keys.add(f"{section}.{parent.attr}")
        else:
            keys.add(section)
    return keys


def within(key, keys):
    """Whether a key, or one above it, is among the keys."""
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def undeclared_and_unread(read, declared):
    return (
        {key for key in read if not within(key, declared)},
        {key for key in declared if not within(key, read) and not any(within(other, [key]) for other in read)},
    )


def test_keys_read():
    source = "def f(params):\n    g(params.toy)\n    x = params.study.k[0] + params.decoding.seed\n    params.pairs['a'].draft\n"
    assert keys_read(source) == {"toy", "study.k", "decoding.seed", "pairs"}
    assert keys_read("pair_spec(params, 'a')\nparams.models.items()\nparams.study.model_dump()") == {
        "pairs",
        "models",
        "study",
    }
    assert undeclared_and_unread({"a.b", "c"}, {"a", "d.e"}) == ({"c"}, {"d.e"})
    assert undeclared_and_unread({"a"}, {"a.b"}) == ({"a"}, set())


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - {"pipeline/hardware.py"}))
def test_stages_declare_the_keys_that_their_script_reads(script):
    """`hardware` is left out because it checks the whole file and runs every time."""
    modules = {path for path in closure(script) if path.endswith(".py")} - {"pipeline/study.py"}
    read = set().union(*(keys_read((ROOT / module).read_text(encoding="utf-8")) for module in modules))
    stages = [name for name, stage in STAGES.items() if script_of(stage["cmd"]) == script]
    if any(dep.startswith("metrics/models/") for name in stages for dep in STAGES[name]["deps"]):
        read.discard("models")  # only to find the weights: the manifest holds what they are (see dvc.yaml)
    undeclared, unread = undeclared_and_unread(read, set().union(*map(declared_keys, stages)))
    assert not undeclared, f"read by {script}, but not in the params of {stages}"
    assert not unread, f"in the params of {stages}, but not read by {script}"


def test_stages_of_one_script_declare_the_same_keys_but_for_what_they_vary():
    sweep_k, sweep_temperature = declared_keys("sweep_k"), declared_keys("sweep_temperature")
    assert sweep_k ^ sweep_temperature == {"decoding.k", "decoding.temperature"}
    assert "decoding.temperature" in sweep_k and "decoding.k" in sweep_temperature
    assert sweep_temperature - declared_keys("sweep_block") == {"decoding.verifier"}
    assert declared_keys("sweep_confidence") - sweep_k == {"study.confidence_k"} and sweep_k <= declared_keys(
        "sweep_confidence"
    )
    assert declared_keys("hf_benchmark") - sweep_k == {"timing"} and sweep_k <= declared_keys("hf_benchmark")
    assert "timing.kernels" not in declared_keys("toy_benchmark") | declared_keys("cost_curve") | declared_keys(
        "comparison"
    ), "they have their own"
    assert declared_keys("toy_sweep_temperature") - declared_keys("toy_sweep_k") == {"toy.k_for_temperature"}
    assert declared_keys("toy_sweep_k") <= declared_keys("toy_sweep_temperature")


@pytest.mark.parametrize("module", sorted(path.name for path in (ROOT / "pipeline").glob("*.py")))
def test_what_load_params_gives_is_called_params(module):
    """The check above goes by that name."""
    for node in ast.walk(ast.parse((ROOT / "pipeline" / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) == "Params":
            assert node.arg == "params", f"line {node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "load_params":
            line = (ROOT / "pipeline" / module).read_text(encoding="utf-8").splitlines()[node.lineno - 1]
            assert re.match(r" *params = load_params\(", line), f"line {node.lineno}: {line}"


# Paths and stages, as DVC itself resolves them


@pytest.fixture(scope="module", params=["embedded", "quick", "gpt2", "smollm2", "quantized", "llama_cpp"])
def resolved(request, tmp_path_factory):
    """The parameters of a study and DVC's own stages for it, by full name."""
    folder = tmp_path_factory.mktemp(request.param)
    shutil.copy(ROOT / "dvc.yaml", folder)
    text, count = re.subn(
        r"(?m)^study: .*", f"study: *{request.param}", (ROOT / "params.yaml").read_text(encoding="utf-8")
    )
    assert count == 1
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    with Repo.init(str(folder), no_scm=True) as repo:
        return load_params(folder / "params.yaml"), {stage.name: stage for stage in repo.index.stages}


def test_cells_lie_where_cells_py_says(resolved):
    params, stages = resolved
    want = study_cells(params)
    want |= {f"download@{pair}": cells.manifest(pair) for pair in params.study.pairs} | {"hardware": cells.HARDWARE}
    name = params.study.contexts
    want |= {f"contexts@{name}-{pair}": cells.contexts(name, pair) for pair in params.study.quantized_pairs}
    want = {name: str(path) for name, path in want.items()}
    last = {"tables", "plot", "report"}
    assert {name: str(out) for name, stage in stages.items() if name not in last for out in stage.outs} == want
    assert set(stages) == set(want) | last
    for name, path in want.items():
        (option,) = re.findall(r"--(?:out|json) (\S+)", stages[name].cmd) or [path]  # hardware.py has no such option
        assert option == path
    for name in last:
        assert all(str(out).startswith(f"plots/{params.study.name}/") for out in stages[name].outs)


def test_git_keeps_every_result_and_dvc_may_reuse_every_measurement(resolved):
    """A plain out that DVC does not cache switches its run-cache off for the stage; a metric does not."""
    params, stages = resolved
    measured = study_cells(params)
    for name, stage in stages.items():
        assert all(not out.use_cache for out in stage.outs), name
        assert all(bool(out.metric) == (name in measured) for out in stage.outs), name
    assert [name for name, stage in stages.items() if stage.always_changed] == ["hardware"]
    assert all(out.persist for out in stages["hardware"].outs)


def test_only_timed_cells_depend_on_the_machine(resolved):
    params, stages = resolved
    machine = {
        name.split("@")[0] for name, stage in stages.items() if any("hardware.json" in str(dep) for dep in stage.deps)
    }
    timed = {"toy_benchmark", "hf_benchmark", "quantized_benchmark", "cost_curve", "comparison"}
    assert machine == timed | ({"llama_cpp"} if params.study.llama_cpp_pairs else set())
    for stage in stages.values():
        for dep in stage.deps:
            if "hardware.json" in str(dep):
                assert dep.params == ["fingerprint"]


def test_every_table_is_drawn_from_what_tables_writes():
    """`plot` and `report` declare the tables that they read, and the plots of `dvc plots show` name files that a stage writes."""
    tables = {next(iter(out)) for out in STAGES["tables"]["outs"]}
    declared = {name: {dep for dep in STAGES[name]["deps"] if not dep.endswith(".py")} for name in ("plot", "report")}
    drawn = {next(iter(out)) for out in STAGES["plot"]["outs"]}
    assert drawn == {f"plots/${{study.name}}/{figure}.svg" for figure in captions.FIGURES}
    assert drawn <= declared["report"], "its page holds the figures"
    declared["report"] -= drawn
    for name, deps in declared.items():
        read = re.findall(r'read_table\(\w+, "(\w+)"\)', (ROOT / "pipeline" / f"{name}.py").read_text())
        assert deps == {f"plots/${{study.name}}/{table}.csv" for table in read}
    assert set().union(*declared.values()) == tables
    written = {next(iter(out)) for name in ("tables", "plot") for out in STAGES[name]["outs"]}
    for plot in YAML(typ="safe").load(ROOT / "dvc.yaml")["plots"]:
        files = [plot] if isinstance(plot, str) else [file for drawing in plot.values() for file in drawing["y"]]
        assert set(files) <= written
        for drawing in [] if isinstance(plot, str) else plot.values():
            assert (ROOT / ".dvc" / "plots" / f"{drawing['template']}.json").is_file()


def test_script_of():
    assert script_of("python pipeline/a.py --out x.json") == "pipeline/a.py"
    assert all(Path(ROOT / script).is_file() for script in SCRIPTS)
