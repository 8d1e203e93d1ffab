# SPDX-License-Identifier: Apache-2.0
"""Makes the data of all experiments, every file that `data.json` names, from public sources.

    python3 -m experiments.prepare_data --sources=FOLDER --commands | sh
    python3 -m experiments.prepare_data --sources=FOLDER --output=DATA

The first gets the repositories of `sources.toml` into FOLDER, each at its commit (git 2.35 or
newer; 200 MB to load, 700 MB on disk); without `| sh` it only prints how. The second writes
DATA, in a minute or two, and checks the hashes. Files are those of the repositories, gzipped,
but for `openstax/`, `movie_reviews/`, `python_docs/` and `ebooks/`, whose rules are in
`experiments/texts.py`.

A missing checkout, or a file missing in one, is named, and what needs it left out. The exit
status is 0 if all files have the hashes of `data.json`, else 1. With an unusual zlib, equal
contents can have other bytes.
"""

import argparse
import functools
import gzip
import hashlib
import io
import itertools
import json
import pathlib
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable

from experiments import texts

PUBLISHED = pathlib.Path(__file__).parent / "data.json"

_TABLES = tomllib.loads(PUBLISHED.with_name("sources.toml").read_text(encoding="utf-8"))
# Commits by repository; folders by how names in `data.json` begin; names there that differ.
SOURCES, FOLDERS, PARTS = (_TABLES[name] for name in ("commits", "folders", "parts"))
REVIEWS = "nltk/nltk_data/packages/corpora/movie_reviews.zip"
EBOOKS = "standardebooks/"


def prepare(sources: pathlib.Path, output: pathlib.Path) -> dict[str, str]:
    """Writes all files whose sources are there.

    Returns:
        Of the files that are left out or have other hashes than `data.json` says: why.
    """
    for repository in SOURCES:
        if not (sources / repository).is_dir():
            print("There is no checkout", sources / repository)
    wrong = {}
    for name, content in contents(sources).items():
        try:
            made = content()
        except FileNotFoundError as error:
            wrong[name] = f"left out, as there is no {error.filename}"
        else:
            path = output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(made)
            digest = hashlib.sha256(made).hexdigest()
            if digest != published().get(name):
                wrong[name] = f"has another hash, {digest}"
        print(name, wrong.get(name, "is as published"), flush=True)
    return wrong


@functools.cache
def published() -> dict[str, str]:
    """Hash by name."""
    return json.loads(PUBLISHED.read_text())


def contents(sources: pathlib.Path) -> dict[str, Callable[[], bytes]]:
    """What makes the bytes of each file; FileNotFoundError where a source is missing."""
    books, languages = {}, {}
    for repository in SOURCES:
        name = repository.split("/")[1]
        if name.endswith("-book"):
            books[name.removesuffix("-book")] = sources / repository
        elif name.startswith("python-docs-"):
            language = name.removeprefix("python-docs-").replace("-", "_")
            languages[language] = sources / repository
    glossary = functools.cache(lambda: texts.glossary(books))
    python_docs = functools.cache(lambda: texts.python_docs(languages))

    found = {}
    for name in published():
        if name.startswith(tuple(FOLDERS)):
            found[name] = functools.partial(of_repository, sources, name)
    for repository in SOURCES:
        if repository.startswith(EBOOKS):
            name = f"ebooks/{repository.removeprefix(EBOOKS)}.txt.gz"
            found[name] = lambda path=sources / repository: paragraphs(texts.ebook(path))
    for book, folder in books.items():
        name = f"openstax/{book.replace('-', '_')}.txt.gz"
        found[name] = lambda folder=folder: paragraphs(texts.book(folder))
    for split in texts.SPLITS:
        name = f"openstax/glossary.{split}.jsonl.gz"
        found[name] = lambda split=split: json_lines(glossary()[split])
    reviews = "movie_reviews/reviews.txt.gz"
    found[reviews] = lambda: paragraphs(texts.movie_reviews(sources / REVIEWS))
    for language in ("en", *languages):
        name = f"python_docs/{language}.txt.gz"
        found[name] = lambda language=language: paragraphs(python_docs()[language])
    return found


def of_repository(sources: pathlib.Path, name: str) -> bytes:
    """A file of `FOLDERS`. Where it has several parts, a header that all have stands once."""
    paths = [sources / part for part in parts(name)]
    first, *others = (path.read_bytes() for path in paths)
    header = first.partition(b"\n")[0] + b"\n"
    content = first + b"".join(other.removeprefix(header) for other in others)
    return gzipped(content) if name.endswith(".gz") and paths[0].suffix != ".gz" else content


def parts(name: str) -> list[str]:
    """Where a file of `FOLDERS` comes from, below the folder of the sources."""
    folder = next(FOLDERS[start] for start in FOLDERS if name.startswith(start))
    own_name = name.split("/")[-1]
    if not name.startswith("multi30k/"):  # gzipped there
        own_name = own_name.removesuffix(".gz")
    return [f"{folder}/{part}" for part in PARTS.get(name, [own_name])]


def paragraphs(these: Iterable[str]) -> bytes:
    return gzipped(("\n\n".join(these) + "\n").encode())


def json_lines(these: Iterable[dict[str, str]]) -> bytes:
    return gzipped("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in these).encode())


def gzipped(content: bytes) -> bytes:
    """Without a name or a time, so that equal contents are equal bytes."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, buffer, mtime=0) as file:
        file.write(content)
    return buffer.getvalue()


def commands(sources: pathlib.Path) -> list[str]:
    """What gets the sources; of each repository, only the files that are read."""
    lines = []
    for repository, commit in SOURCES.items():
        folder = shlex.quote(str(sources / repository))
        url = f"https://github.com/{repository}"
        lines += [
            f"git clone --filter=blob:none --no-checkout {url} {folder}",
            f"git -C {folder} sparse-checkout set --no-cone {shlex.join(patterns(repository))}",
            f"git -C {folder} checkout {commit}",
        ]
    return lines


def patterns(repository: str) -> list[str]:
    """Of the files that are read, as git takes them."""
    if repository.endswith("-book"):
        return ["/SUMMARY.md", "/contents/"]
    if repository.startswith(EBOOKS):
        return ["/src/epub/content.opf", "/src/epub/text/"]
    names = [name for name in published() if name.startswith(tuple(FOLDERS))]
    read = [REVIEWS, *itertools.chain.from_iterable(map(parts, names))]
    here = [path.removeprefix(repository) for path in read if path.startswith(f"{repository}/")]
    return here or ["*.po"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, help="needed without --commands")
    parser.add_argument("--commands", action="store_true", help="print how to get the sources")
    flags = parser.parse_args(arguments)
    if flags.commands:
        print(*commands(flags.sources), sep="\n")
        return 0
    if not flags.output:
        parser.error("--output is needed")
    wrong = prepare(flags.sources, flags.output)
    if wrong:
        print("Not as published:", ", ".join(wrong))
        print("Sources are fetched by the same command with --commands | sh, without --output.")
    else:
        print("All files have the hashes of data.json.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
