# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of what results depend on: hashes of the data, and an experiment's code."""

import hashlib
import pathlib

from experiments.pages import ROOT

_CODE = ("switchx", "pallas_kernels", "configs")
# Results depend on the data through its hashes, not on the code that made it.
_MAKES_DATA = ("prepare_data.py", "texts.py")


def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_fingerprint(name: str) -> str:
    """Fingerprint of all Python and gin files of this checkout that an experiment depends on,
    including every run.py: several train or sweep by another's."""
    digest = hashlib.sha256()
    paths = [path for top in _CODE for path in sorted((ROOT / top).rglob("*"))]
    shared = sorted((ROOT / "experiments").glob("*.py"))
    shared += sorted((ROOT / "experiments").glob("*/run.py"))
    paths += [path for path in shared if path.name not in _MAKES_DATA]
    paths += sorted((ROOT / "experiments" / name).rglob("*"))
    for path in paths:
        if path.suffix in (".py", ".gin"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
