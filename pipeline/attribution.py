"""Why a speed-up is not more: measured / Leviathan's ideal as a product of three factors, of every timed configuration."""

from __future__ import annotations

import pandas as pd

from pipeline.wording import Row, is_known, number, rows_of

FACTORS = ("iid_factor", "verify_cost_factor", "overhead_factor")  # measured = ideal × these


def configurations(benchmark: pd.DataFrame, quantized_benchmark: pd.DataFrame) -> list[Row]:
    """The rows of both tables of timed cells; `variant` is None for a pair's own draft."""
    return [{"variant": None, "kernels": None, **row} for row in rows_of(benchmark) + rows_of(quantized_benchmark)]


def is_attributed(row: Row) -> bool:
    """Whether its cell says what separates it from the ideal; a clock too coarse for one step leaves that open."""
    return all(is_known(row[key]) and row[key] > 0 for key in (*FACTORS, "ideal_speedup", "speedup"))


def setting(row: Row) -> str:
    """k and the kernels of a row."""
    return f"k = {row['k']}" + (f", {row['kernels']} kernels" if is_known(row["kernels"]) else "")


def name_of(row: Row) -> str:
    """A configuration in words."""
    variant = f" with {row['variant']}" if is_known(row["variant"]) else ""
    return f"`{row['pair']}`{variant}, {setting(row)}"


def product(row: Row) -> str:
    """Measured = ideal × the factors, in numbers."""
    factors = " × ".join(number(key, 3)(row) for key in FACTORS)
    return f"{number('speedup')(row)} = {number('ideal_speedup')(row)} × {factors}"
