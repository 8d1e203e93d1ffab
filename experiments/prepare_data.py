# SPDX-License-Identifier: Apache-2.0
"""Makes the data of all experiments, every file that `data.json` names, from public sources.

    python3 -m experiments.prepare_data --sources=FOLDER --commands | sh
    python3 -m experiments.prepare_data --sources=FOLDER --output=DATA

The first gets the repositories of `SOURCES` into FOLDER, each at its commit (git 2.35 or newer;
150 MB to load, 480 MB on disk); without `| sh` it only prints how. The second writes DATA, in a
minute or two, and checks the hashes. Files are those of the repositories, gzipped, but for
`openstax/`, `movie_reviews/` and `python_docs/`: `experiments/texts.py` has their rules.

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
from collections.abc import Callable, Iterable

from experiments import texts

PUBLISHED = pathlib.Path(__file__).parent / "data.json"

# Owner and name on GitHub -> commit.
SOURCES = {
    "philschatz/anatomy-book": "eadaa6b2992f4e4010f45d58ad4db065e398093e",
    "philschatz/astronomy-book": "ff8ede5abbee727f092ae62b108d227a25573c4b",
    "philschatz/biology-book": "cf3dc8c0d87f9dc4d0556464a4ac33b58dd9d726",
    "philschatz/chemistry-book": "a6ac3918e61cbedf0589c5b43e748dc8a7edf5e2",
    "philschatz/economics-book": "d3f319e7a162fecf1c15c07cd9bf31e6a48e1877",
    "philschatz/physics-book": "a7efaa7e221fab1694022d8bb98b83a73ee31d3d",
    "philschatz/psychology-book": "aa152d641e2ad5d7f1eccb74a1e9a9b7bf915b9f",
    "philschatz/sociology-book": "8f29e07cc2aac36da685b3e805dc3da0e15beb41",
    "philschatz/statistics-book": "c7137efc90e4797d040facd6d0825c83aff27583",
    "philschatz/us-history-book": "635ed5914eb2ea3768169b88e1119587cb037e82",
    "nltk/nltk_data": "5db857e6f7df11eabb5e5665836db9ec8df07e28",
    "python/python-docs-es": "91f4ccc0baa8c7cbeb739e696c641388264caa30",  # branch 3.12
    "python/python-docs-fr": "b279d876e2a3381605d38ea62b863f60abadc92c",  # branch 3.13
    "python/python-docs-id": "a52a237ef572870d142c75f0c221b1a6f9502670",  # branch 3.14
    "python/python-docs-it": "0134548060d1f67a24ef6f955ab6acf397dd5186",  # branch 3.13
    "python/python-docs-ja": "7eb90aaa6d3395bcfe01801ceb5e620eedf2356a",  # branch 3.11
    "python/python-docs-ko": "d0c58403de225366b23d0cafd8b86508186c8c8a",  # branch 3.13
    "python/python-docs-pl": "c306d49f3e13afb753e9ce9989fb805f435c3abd",  # branch 3.13
    "python/python-docs-pt-br": "a30c8afdb1c680f97abe22485d4e599c6bf68480",  # branch 3.13
    "python/python-docs-ro": "b330002cb5ce6db3143101de70b4655ab2f69e52",  # branch 3.13
    "python/python-docs-tr": "be1c5a492f430197f4f23bd679d5f65dab68866a",  # branch 3.12
    "python/python-docs-uk": "d7eb701450aab0efb7bbd4ea7096dc93a54fe83e",  # branch 3.13
    "python/python-docs-zh-cn": "693cf6be2bc17f3d50ee21fe207c6964f3fab130",  # branch 3.13
    "josix/python-docs-zh-tw": "ea358cfe48e1c8e85e4b678b77f655761a28474b",  # branch 3.11
    "multi30k/dataset": "a3d2e0d26b56f3846f66a952536ffed4e401d05a",
    "karpathy/char-rnn": "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e",
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "nyu-mll/CoLA-baselines": "dd095d3646ed05a315280aaa8ed4ec84ba435b3e",
    "forest-snow/alps": "3c7ef2c98249fc975a897b27f275695f97d5b7a9",
    "tonyzhaozh/few-shot-learning": "e04d8643be91c2cce63f33e07760ff75d5aa3ad0",
    "louisbzk/pet": "e29a6f0ef752b3d1f37b1d735585eeaef7a0477d",
    "Youssef-Malek2004/CoT-Unfaithfulness-Induction-Via-SDF": (
        "3ebea6a1e718fa77dded92f29310786e4ff8bf18"
    ),
    "genggui001/opencompass": "5649a0f7e3d246ed58ffaef865f8b818cd8e0044",
    "zhang-edward/WinoGrande": "ea61adace986f13f152757273a9b0840887efe65",
    "brmson/dataset-factoid-webquestions": "668890853388010fe6ae9a5eb035a7917b88933b",
    "allenai/scitldr": "5ccad9c00a60ad75c9e04abf7f27d0f53f983b20",
    "PolyAI-LDN/task-specific-datasets": "57ec275d8078af65b7731c2a98be812d844a6d6b",
}

# How names in `data.json` begin -> the folder of a repository that has these files.
FOLDERS = {
    "arc_easy/": "Youssef-Malek2004/CoT-Unfaithfulness-Induction-Via-SDF/data/arc_easy",
    "banking77/": "PolyAI-LDN/task-specific-datasets/banking_data",
    "glue/CoLA/": "nyu-mll/CoLA-baselines/acceptability_corpus/cola_public/raw",
    "glue/SST-2/": "forest-snow/alps/data/SST-2",
    "multi30k/": "multi30k/dataset/data/task1/raw",
    "openbookqa/": "genggui001/opencompass/data/openbookqa/Main",
    "restaurant8k/": "PolyAI-LDN/task-specific-datasets/span_extraction/restaurant8k",
    "scitldr/": "allenai/scitldr/SciTLDR-Data/SciTLDR-A",
    "super_glue/CB/": "tonyzhaozh/few-shot-learning/data/cb",
    "super_glue/COPA/": "louisbzk/pet/data/copa",
    "super_glue/RTE/": "tonyzhaozh/few-shot-learning/data/rte",
    "text/tinyshakespeare": "karpathy/char-rnn/data/tinyshakespeare",
    "text/wikitext-2": "pytorch/examples/word_language_model/data/wikitext-2",
    "trec/": "tonyzhaozh/few-shot-learning/data/trec",
    "web_questions/": "brmson/dataset-factoid-webquestions/main",
    "winogrande/": "zhang-edward/WinoGrande/data",
}
# Of those that have another name there, or are several files: which, one after the other.
PARTS = {
    "glue/CoLA/dev.tsv.gz": ["in_domain_dev.tsv", "out_of_domain_dev.tsv"],
    "glue/CoLA/train.tsv.gz": ["in_domain_train.tsv"],
    "glue/SST-2/dev.tsv.gz": ["test.tsv"],
    "glue/SST-2/train.tsv.gz": ["train.tsv", "dev.tsv"],
    "super_glue/COPA/train.jsonl.gz": ["train.jsonl", "unlabeled.jsonl"],
    "text/tinyshakespeare.txt": ["input.txt"],
    "text/wikitext-2.valid.txt": ["valid.txt"],
}
REVIEWS = "nltk/nltk_data/packages/corpora/movie_reviews.zip"


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
