"""Which project modules each stage's script imports, and `make deps`: write them into dvc.yaml.

A stage must depend on every module that its script imports, directly or through another one. Both packages keep an empty
__init__.py, so that importing one module imports no other.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("specdec", "pipeline")


def imported_names(source: Path) -> set[str]:
    """Dotted names of all imports of a file, wherever they stand; of `from a import b` both `a` and `a.b`.

    What is imported for type checkers alone (`if TYPE_CHECKING:`) cannot change a result and is left out.
    """
    names = set()
    waiting: list[ast.AST] = [ast.parse(source.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative imports are not used in this project"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def closure(script: str, root: Path = ROOT) -> set[str]:
    """The script and every project module it imports, as paths from the root; with a module the .cpp of its name."""
    found: set[str] = set()
    waiting = [script]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        if (native := Path(path).with_suffix(".cpp").as_posix()) and (root / native).is_file():
            found.add(native)
        modules = (name.replace(".", "/") for name in imported_names(root / path) if name.split(".")[0] in PACKAGES)
        waiting += [f"{module}.py" for module in modules if (root / f"{module}.py").is_file()]
    return found


def script_of(command: str) -> str:
    return next(word for word in shlex.split(command) if word.endswith(".py"))


def synchronised(text: str, root: Path = ROOT) -> str:
    """dvc.yaml's text with the .py and .cpp entries of each stage's `deps` as they should be: the script first, then by name."""
    lines: list[str] = []
    script = ""
    in_deps = False
    for line in text.splitlines():
        if match := re.fullmatch(r"    cmd: (.+)", line):
            script = script_of(match[1])
        if re.match(r" {0,4}\S", line):
            in_deps = line == "    deps:"
        if in_deps and re.fullmatch(r"      - \S+\.(py|cpp)", line):
            continue
        lines.append(line)
        if in_deps and line == "    deps:":
            lines += [f"      - {path}" for path in [script, *sorted(closure(script, root) - {script})]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    file = ROOT / "dvc.yaml"
    file.write_text(synchronised(file.read_text(encoding="utf-8")), encoding="utf-8")
