"""What README.md shows is what was measured, and what it names exists."""

import re
from pathlib import Path

from pipeline.report import readme_part
from pipeline.run_study import BEGIN, END

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_results_are_those_of_the_committed_report():
    report = (ROOT / "plots" / "embedded" / "report.md").read_text(encoding="utf-8")
    assert README.split(BEGIN)[1].split(END)[0].strip() == readme_part(report)


def test_every_figure_and_link_exists():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    assert len(targets) >= 6
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_script_and_module_exists():
    named = set(re.findall(r"(?:specdec|pipeline)/\w+\.py", README))
    assert len(named) >= 6
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_library_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert len(names["result"].new_tokens) == 32
