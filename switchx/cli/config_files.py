# SPDX-License-Identifier: Apache-2.0
"""Where the shipped gin files are: `configs/` of a checkout, or its installed copy."""

import pathlib


def configs_dir() -> pathlib.Path:
    """The folder that holds `models/`, `tasks/`, `meshes/`, `optimizers/` and `runs/`.

    It is called `configs` in both places, so `configs/runs/X.gin` is found from its parent.

    Raises:
        FileNotFoundError: the installation holds neither.
    """
    package = pathlib.Path(__file__).parents[1]
    # A wheel has it inside the package; next to site-packages' switchx anything may be
    # called configs, so that is looked at last.
    places = (package / "configs", package.parent / "configs")
    for place in places:
        if (place / "models").is_dir():
            return place
    raise FileNotFoundError(
        f"switchx was installed without its configurations: there is no {places[0]} and no "
        f"{places[1]}; install it from a wheel, or with `pip install --editable` in a checkout"
    )
