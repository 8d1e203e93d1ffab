# SPDX-License-Identifier: Apache-2.0
"""The model that ships: something to look at before anything is trained.

`switchx.load("tiny")` opens it, and every command that loads a model takes the name. It is
`configs/runs/pretrain_shipped.gin`, a Switch T5 of 8 experts in each of 4 layers, with int4
experts; `make tiny` makes it anew.
"""

import os
import pathlib

NAMES = ("tiny",)
# Texts of four labels, a file each, for atlases of it: LICENSES.md.
TEXTS = pathlib.Path(__file__).parent / "texts"


def folder_of(model: str | os.PathLike) -> str | os.PathLike:
    """The folder of a model that ships, by its name; any other name or path as it is.

    A folder of that name in the working directory goes first.
    """
    if model in NAMES and not pathlib.Path(model).exists():
        return pathlib.Path(__file__).parent / model
    return model
