# SPDX-License-Identifier: Apache-2.0
"""Where gin files are: as named, in folders to search, and the shipped `configs/`."""

import pathlib
from collections.abc import Iterable

from switchx.cli.close_match import close_match


def configs_dir() -> pathlib.Path:
    """The folder that holds `models/`, `tasks/`, `meshes/`, `optimizers/` and `runs/`.

    It is called `configs` in a checkout and installed, so `configs/runs/X.gin` is found from
    its parent.

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


def config_roots(search_paths: Iterable[str] = ()) -> list[pathlib.Path]:
    """Folders in which a gin file's name is looked up, in this order.

    The last two are ours: both `runs/x.gin` and `configs/runs/x.gin` are names.

    Raises:
        ValueError: a folder of `search_paths` does not exist.
    """
    folders = list(map(pathlib.Path, search_paths))
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(
                f"--gin_search_paths: there is no folder {str(folder)!r}; name folders that "
                "exist, separated by commas"
            )
    return [pathlib.Path("."), *folders, configs_dir(), configs_dir().parent]


def missing_file(name: str, roots: Iterable[pathlib.Path]) -> str:
    """What to say of a gin file that is in none of `roots`: where it was looked for, and
    which one may be meant."""
    roots = list(roots)
    hint = close_file(name, roots)
    if "," in name:
        hint = "repeat --gin_file for each file"
    elif any((root / name).is_dir() for root in roots):
        hint = "that is a folder; name a file in it"
    places = ", ".join(str(root) for root in roots)
    return f"no gin file {name!r} in {places}; {hint} (--gin_search_paths adds folders)"


def close_file(name: str, roots: Iterable[pathlib.Path]) -> str:
    """`did you mean ...?`: files beside where `name` would be, and the shipped ones."""
    known, ours = {}, configs_dir().parent
    for root in roots:
        if root.is_relative_to(ours) and root.is_absolute():
            continue
        for path in sorted((root / name).parent.glob("*.gin")):
            known.setdefault(path.stem, str(path))
    for path in sorted(configs_dir().rglob("*.gin")):
        known.setdefault(path.stem, path.relative_to(ours).as_posix())
    close = close_match(pathlib.Path(name).stem, known)
    return f"did you mean {known[close]}?" if close else "runs to start from: configs/runs"
