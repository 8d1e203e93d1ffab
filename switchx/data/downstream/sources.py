# SPDX-License-Identifier: Apache-2.0
"""Rows of downstream data sets from TFDS or from files, and their examples as ArrayRecord.

A split is prepared when it is first opened. Its key covers everything that determines its
examples and is quick to get: names of files, sizes and times (or TFDS's name, version and
lengths), the text, and `TEXT_VERSION`.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from switchx.data.corpora import tables
from switchx.data.corpora.corpus import Account, CorpusSource, fingerprint_of, require_split
from switchx.data.corpora.found_files import FoundFiles
from switchx.data.corpora.packed_files import name_of
from switchx.data.corpora.prepared import Recipe, open_prepared
from switchx.data.corpora.raw_files import KINDS, RawFile, Row, counted, has_rows
from switchx.data.corpora.tfds_folder import TfdsFolder, find_folder
from switchx.data.data_dir import local_or_none
from switchx.data.downstream.texts import TextExample
from switchx.fields import require

# Version of the text functions; raise it whenever one of them writes different texts.
TEXT_VERSION = 2
FIELDS = ("inputs", "targets", "facts")
# By split: alternatives, each a sequence of files.
Files = Mapping[str, tuple[tuple[RawFile, ...], ...]]
ExampleFunction = Callable[[int, Row], Iterator[TextExample]]


@dataclasses.dataclass(frozen=True)
class SplitRows:
    """Rows of one split.

    Attributes:
        read: function that returns the rows in their order, and counts them.
        key: values that determine the rows and are quick to get.
        account: account of the rows' files.
    """

    read: Callable[[Counter], Iterable[Row]]
    key: tuple
    account: Account


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of all splits of a source.

    Attributes:
        splits: the splits that the source has, by name.
        place: path or name of the source, for messages.
        class_names: names of the classes, by field, of fields that TFDS or `datasets` knows as
            classes; `a/b` is a field within another, places in lists are left out.
    """

    splits: dict[str, SplitRows]
    place: str
    class_names: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


def rows_of_tfds(name: str, data_dir: str | None) -> Rows:
    """Rows of a prepared data set such as `glue/cola`.

    Raises:
        ValueError: the data set is missing (`find_folder`).
    """
    folder = find_folder(name, data_dir)
    names = dict(_classes_in(folder.builder.info.features))
    splits = {split: _tfds_rows(folder, split) for split in folder.splits}
    return Rows(splits, folder.folder, names)


def _classes_in(feature, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Fields within a TFDS feature that are classes, with the classes' names; a sequence has
    the classes of its feature."""
    if hasattr(feature, "items"):
        for name, inner in feature.items():
            yield from _classes_in(inner, f"{path}/{name}".removeprefix("/"))
    elif names := getattr(feature, "names", None):
        yield path, tuple(names)


def _tfds_rows(folder: TfdsFolder, split: str) -> SplitRows:
    key = (folder.folder, folder.fingerprint(split))

    def read(tally: Counter) -> Iterator[Row]:
        return counted(folder.examples(split), tally)

    return SplitRows(read, key, folder.account("", split))


def rows_of_files(name: str, files: Files, path: str, manual_dir: Path, split: str) -> Rows:
    """Rows of a data set's own files, in a folder or its subfolders.

    Args:
        files: alternative files of each split; the first alternative that is complete is read.
        path: path of the files in the authors' publication of the data set, such as
            `glue/CoLA`: they are searched for in `manual_dir`, `manual_dir/CoLA` and
            `manual_dir/glue/CoLA`.
        split: the split that must exist.

    Raises:
        ValueError: there is no file of any split.
    """
    parts = Path(path).parts
    folders = [manual_dir.joinpath(*parts[i:]) for i in range(len(parts), -1, -1)]
    found = [{each: _whole(folder, files[each]) for each in files} for folder in folders]
    found = [{each: paths for each, paths in splits.items() if paths} for splits in found]
    each = itertools.chain.from_iterable(itertools.chain(*files.values()))
    names = ", ".join(file.name for file in each)
    require(
        any(found),
        f"{name}: none of {names} (or these packed, as .gz) is in "
        f"{', '.join(map(str, folders))}; set MANUAL_DIR to the folder that has them",
    )
    # The folder with the split, or the first with any: the message names the splits it has.
    splits = next((each for each in found if split in each), next(filter(None, found)))
    return _rows_of(splits, str(manual_dir))


def _whole(folder: Path, alternatives) -> list[tuple[Path, RawFile]]:
    for files in alternatives:
        paths = [file.find(folder) for file in files]
        if all(paths):
            return list(zip(paths, files, strict=True))
    return []


def rows_of_folder(folder: Path) -> Rows:
    """Rows of a folder with a file for each split, `train.jsonl`, `test.csv.gz`, ..., or of
    what `datasets` saved there.

    Raises:
        ValueError: there is no folder, no such file, or several for one split.
    """
    require(folder.is_dir(), f"{folder} is no folder; name one, or tfds:NAME")
    if saved := tables.saved_splits(folder):
        found = {
            split: [(path, RawFile(path.name)) for path in tables.saved_tables(each)]
            for split, each in saved.items()
        }
        return _with_class_names(_rows_of(found, str(folder)), found)
    files, found = FoundFiles(wants=has_rows), {}
    files.add_entries(folder)
    files.keep()
    for path in files.files:
        found.setdefault(name_of(path.name).stem, []).append((path, RawFile(path.name)))
    require(found, f"{folder} has no file that ends in {', '.join(KINDS)}; put some there")
    several = [path.name for files in found.values() if len(files) > 1 for path, _ in files]
    require(
        not several,
        f"{folder} has {', '.join(several)}, expected one file a split; take the others away",
    )
    return _with_class_names(_rows_of(found, str(folder), files.left_out), found)


def _with_class_names(rows: Rows, found: dict[str, list[tuple[Path, RawFile]]]) -> Rows:
    """Rows with the classes that `datasets` noted in the first table, also in their keys."""
    every = (path for path, _ in itertools.chain(*found.values()))
    first = next((path for path in every if path.suffix.lower() in tables.KINDS), None)
    if first is None or not (names := tables.columns_of(first)[1]):
        return rows
    key = "classes", tuple((field, tuple(each)) for field, each in sorted(names.items()))
    splits = {
        split: dataclasses.replace(each, key=(*each.key, *key))
        for split, each in rows.splits.items()
    }
    return dataclasses.replace(rows, splits=splits, class_names=names)


def _rows_of(
    found: dict[str, list[tuple[Path, RawFile]]],
    place: str,
    left_out: Mapping[str, Sequence[str]] | None = None,
) -> Rows:
    splits = {split: _file_rows(files, left_out) for split, files in found.items()}
    return Rows(splits, place)


def _file_rows(files: list[tuple[Path, RawFile]], left_out) -> SplitRows:
    def read(tally: Counter) -> Iterator[Row]:
        return (row for path, file in files for row in file.rows(path, tally))

    account = Account.of("", {path: path.stat().st_size for path, _ in files}, left_out)
    return SplitRows(read, tuple(file.state(path) for path, file in files), account)


def open_rows(
    name: str,
    rows: Rows,
    examples: ExampleFunction,
    split: str,
    data_dir: str | None,
    key: tuple = (),
) -> CorpusSource:
    """Examples of one split, written first if they are not yet.

    Args:
        name: name of the corpus, a Python identifier.
        examples: function of a row's number and the row that returns its examples.
        key: further values that determine the examples of a row, besides `name` and
            `TEXT_VERSION`.

    Raises:
        ValueError: there is no such split, a row cannot be made an example, or none is.
    """
    require_split(f"{name} in {rows.place}", split, rows.splits)
    chosen, place = rows.splits[split], f"{name}, {split} of {rows.place}"

    def make_splits() -> dict[str, Iterator[dict[str, str]]]:
        records = _records(place, chosen.read(tally), examples, tally)
        first = next(records, None)
        # In WSC's test set, for one, no noun is known to be right.
        require(first is not None, f"{place} gives no example; use another split")
        return {split: itertools.chain([first], records)}

    hexadecimal = fingerprint_of("downstream 3", TEXT_VERSION, name, split, *chosen.key, *key)
    account, tally = dataclasses.replace(chosen.account, corpus=name), Counter()
    recipe = Recipe(name, hexadecimal, FIELDS, make_splits, account, tally, keeps_order=True)
    return open_prepared(recipe, split, local_or_none(data_dir))


def _records(
    place: str, rows: Iterable[Row], examples: ExampleFunction, tally: Counter
) -> Iterator[dict[str, str]]:
    for number, row in enumerate(rows):
        try:
            for example in examples(number, row):
                if not example.targets.strip():
                    tally["examples with no target text"] += 1
                yield example.record()
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            fault = f"there is no field {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{place}: row {number}: {fault}") from error
