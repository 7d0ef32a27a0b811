"""Wheels of our own, for pip to find in a folder."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path


def write_wheel(folder: Path, package: str, version: str, files: Mapping[str, bytes]) -> Path:
    """A wheel with these files, by their paths; anything else in it is what pip wants to see."""
    name = f"{package.replace('-', '_')}-{version}"
    path = folder / f"{name}-py3-none-any.whl"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    surroundings = {
        "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        "WHEEL": kind,
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        for file, text in surroundings.items():
            archive.writestr(f"{name}.dist-info/{file}", text)
    return path
