"""Where a study's tables, figures and report lie, and how a table is written and read."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from pipeline import cells
from specdec.errors import InputError

TEXT_COLUMNS = (
    *("study", "pair", "target", "draft", "backend", "cpu", "os", "device", "device_name", "dtype", "draft_dtype"),
    *("torch", "transformers", "verifier", "fastest_baseline", "identical"),
    *("variant", "grid", "method", "head", "contexts", "contexts_sha256", "calibration_sha256"),
    *("question", "other", "llama_cpp_python", "llama_cpp_gguf_sha256"),
    *("role", "model", "kernels", "refusal"),
    *("name", "fastest_plain", "fastest_speculative", "best_over_same_kernels", "category", "stage"),
)


def study_folder(study: str) -> Path:
    return Path("plots") / study


def write_table(folder: Path, name: str, table: pd.DataFrame) -> None:
    """Six digits of each float: more would change with the last bit of a machine's arithmetic."""
    cells.write_text(folder / f"{name}.csv", table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))


def read_table(folder: Path, name: str) -> pd.DataFrame:
    """An empty field is NaN.

    Raises:
        InputError: the table is not there, or is none.
    """
    path, remedy = folder / f"{name}.csv", "`dvc repro tables` writes it"
    try:
        # A pair may be called 123 or null: names stay as they are written.
        table = pd.read_csv(path, dtype=dict.fromkeys(TEXT_COLUMNS, str), keep_default_na=False, na_values=[""])
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); {remedy}.") from None
    except ValueError:  # pandas' own errors on an empty file, on lines of other lengths, and on what is not UTF-8
        raise InputError(f"{path} is not a table; {remedy} anew.") from None
    if "pair" not in table:
        raise InputError(f"{path} has no column pair, which every table has; {remedy} anew.")
    return table
