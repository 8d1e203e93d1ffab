# SPDX-License-Identifier: Apache-2.0
"""experiments/prepare_data.py and texts.py: sources in miniature, texts written by hand."""

import gzip
import hashlib
import json
import os
import pathlib
import re
import zipfile

import pytest

from experiments import prepare_data, texts

CHECKOUTS = os.environ.get("SWITCHX_EXPERIMENT_SOURCES")
PUBLISHED = json.loads(prepare_data.PUBLISHED.read_text())

PAGE = r"""---
title: "Cells &amp; Tissues"
layout: page
---


<div data-type="abstract" markdown="1">
By the end of this section, you will be able to:
* Name the parts of a cell
* Tell tissues apart

</div>

### The Cell

A **cell**{: data-type="term"} is the *smallest* unit of life, as [\[link\]](#fig-1) shows;
see the [atlas](http://example.org/atlas) and the [other one][1] of CO<sub>2</sub>
&lt;and water&gt;.

 ![A cell, drawn.](../resources/cell.jpg "A cell at 37&#xB0;."){: #fig-1}

<table summary="Parts"><tbody><tr><td>nucleus</td></tr></tbody></table>

| part | task |
|----------
| nucleus | memory |
{: summary="Parts again"}

1.  Cells divide.
2.  Cells die\.
{: type="a"}

<div data-type="note" markdown="1">
A note stays. With it this page has two hundred characters; one with fewer is left out.

</div>

### Review Questions

<div data-type="exercise">
<div data-type="problem" markdown="1">
What is a cell?

</div>
<div data-type="solution" markdown="1">
The smallest unit of life.

</div>
</div>

<div data-type="glossary" markdown="1">
### Glossary
{: data-type="glossary-title"}

cell
: *smallest* unit of life
^

action potential (AP)
: brief rise and fall
  of a neuron&#8217;s voltage
^

axon
: too short
^

a term of five words
: left out for its many words
^

membrane
: the membrane around a cell
^

energy
: mass in motion, {E} in formulas

</div>

[1]: http://example.org/other
"""
PROSE = [
    "Cells & Tissues",
    "By the end of this section, you will be able to: * Name the parts of a cell * Tell tissues"
    " apart",
    "The Cell",
    "A cell is the smallest unit of life, as the figure shows; see the atlas and the other one "
    "of CO2 <and water>.",
    "1. Cells divide.\n2. Cells die.",
    "A note stays. With it this page has two hundred characters; one with fewer is left out.",
]


def page(title: str, body: str) -> str:
    return f'---\ntitle: "{title}"\nlayout: page\n---\n\n{body}\n'


def glossary_of(**entries: str) -> str:
    body = "\n^\n\n".join(f"{term}\n: {definition}" for term, definition in entries.items())
    return page("Terms", f'<div data-type="glossary" markdown="1">\n{body}\n\n</div>')


def write(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_a_book_is_its_pages_prose_in_the_order_of_its_contents(tmp_path):
    long = "Water is wet. " * 20
    summary = (
        "1.  {: .preface} [Preface](contents/m1.md)\n2.  [Cells](contents/m9.md)\n"
        "    1.  [Water](contents/m3.md)\n    2.  [Table](contents/m2.md)\n"
    )
    files = {
        "SUMMARY.md": summary,
        "contents/m1.md": page("Preface", long),
        "contents/m9.md": PAGE,
        "contents/m3.md": page("Water", long),
        "contents/m2.md": page("Table", f"A short word on\n\n| {long}|"),
        "contents/m4.md": page("Of no contents", long),
    }
    assert list(texts.book(write(tmp_path, files))) == [*PROSE, "Water", long.strip()]


def test_glossaries_are_questions_without_repetition(tmp_path):
    again = {"Cell": "smallest unit of life", "nucleus": "where a cell keeps its DNA"}
    more = {"tissue": "cells that work together", "leaf": "where a plant makes its sugar"}
    summary = "1.  [Terms](contents/m1.md)\n"
    for name, text in {"cells": PAGE, "plants": glossary_of(**again, **more)}.items():
        write(tmp_path / name, {"SUMMARY.md": summary, "contents/m1.md": text})
    found = texts.glossary({name: tmp_path / name for name in ("cells", "plants")})
    # SHA-256 of the term, modulo 100: cell 4, leaf 11, nucleus 26, action potential 31, tissue
    # 82. Of definition and term it begins with 587d (action potential), 77fa (tissue), a4c9.
    assert found == {
        "train": [
            {
                "inputs": "brief rise and fall of a neuron’s voltage",
                "targets": "action potential",
                "book": "cells",
            },
            {"inputs": more["tissue"], "targets": "tissue", "book": "plants"},
            {"inputs": again["nucleus"], "targets": "nucleus", "book": "plants"},
        ],
        "validation": [{"inputs": more["leaf"], "targets": "leaf", "book": "plants"}],
        "test": [{"inputs": "smallest unit of life", "targets": "cell", "book": "cells"}],
    }


def test_reviews_are_lines_in_the_order_of_their_names(tmp_path):
    corpus = tmp_path / "movie_reviews.zip"
    with zipfile.ZipFile(corpus, "w") as archive:
        archive.writestr("movie_reviews/README", "two reviews")
        archive.writestr("movie_reviews/pos/cv000_2.txt", "a fine film . \n")
        archive.writestr("movie_reviews/neg/cv000_1.txt", "plot :  two teens \nget lost . \n")
    assert list(texts.movie_reviews(corpus)) == ["plot : two teens get lost .", "a fine film ."]


START = r"""
msgid ""
msgstr ""
"Project-Id-Version: Python in miniature\n"

#: ../Doc/tutorial/start.rst:1
msgid ""
"Use :func:`~sys.exit` or :ref:`this <target>` to *end* "
"a ``loop``, see `here <https://example.org>`_::"
msgstr ""
"Nutze :func:`~sys.exit` oder :ref:`dies <target>`, um eine ``Schleife`` zu *enden*, "
"siehe `dort <https://example.org>`_::"

#, fuzzy
msgid "A message that somebody should look at again"
msgstr "Eine Nachricht, die sich jemand ansehen sollte"

msgid "A message that stays as it is"
msgstr "A message that stays as it is"

msgid "A message without a translation"
msgstr ""

msgid "Too short"
msgstr "Zu kurz"

msgid "It said \"twenty letters\"\n"
msgstr "Es sagte\t\"zwanzig\"\n"
"""


def message(english: str, translation: str) -> str:
    return f'msgid "{english}"\nmsgstr "{translation}"\n'


def test_documentation_is_what_was_translated(tmp_path):
    names = ("es", "uk", "zh_cn", "ko", "fr", "id")
    for name in names:
        library = {f"library/{x}.po": message(f"On module {x}, at length", x) for x in "abcd"}
        # Spanish has page a, and Korean all four: every third of these is a, d.
        kept = {"es": 1, "ko": 4, "fr": 4, "id": 4}.get(name, 0)
        write(tmp_path / name, dict(list(library.items())[:kept]))
    write(tmp_path / "uk", {"tutorial/start.po": START})
    write(tmp_path / "zh_cn", {"tutorial/start.po": START, "whatsnew/1.po": START})
    found = texts.python_docs({name: tmp_path / name for name in names})
    start = ["Nutze sys.exit oder dies, um eine Schleife zu enden, siehe dort:"]
    start += ['Es sagte "zwanzig"']
    assert found == {
        "en": [
            "On module a, at length",
            "On module d, at length",
            "Use sys.exit or this to end a loop, see here:",
            'It said "twenty letters"',
        ],
        "es": ["a"],
        "uk": start,
        "zh_cn": start,
        "ko": ["a", "d"],
        "fr": ["a", "d"],
        "id": ["a", "b", "c", "d"],
    }


BOOK = {
    "content.opf": """<package xmlns="http://www.idpf.org/2007/opf"><manifest>
        <item href="text/1.xhtml" id="one"/><item href="text/10.xhtml" id="ten"/>
        <item href="text/notes.xhtml" id="notes"/></manifest><spine>
        <itemref idref="ten"/><itemref idref="one"/><itemref idref="notes"/></spine>
        </package>""",
    "text/1.xhtml": ("bodymatter fiction", "<p>The <i>end</i>.</p>"),
    "text/10.xhtml": (
        "bodymatter",
        '<h2>I</h2><p e:type="title">Loomings</p><section><p>Call me\n Ishmael.'
        '<a href="#n1" e:type="noteref">1</a> Some years ago\u2060\u2014never mind.</p>'
        "</section><blockquote><p><span>And I only am escaped</span>\n<br/>\n"
        "<span>alone</span></p></blockquote><p> </p>",
    ),
    "text/notes.xhtml": ("backmatter", "<p>A note.</p>"),
}


def test_an_ebook_is_its_paragraphs_in_order(tmp_path):
    page = (
        '<html xmlns="http://www.w3.org/1999/xhtml" xmlns:e="http://www.idpf.org/2007/ops">'
        '<head><title>-</title></head><body e:type="{}">{}</body></html>'
    )
    book = "standardebooks/herman-melville_moby-dick"
    files = {
        f"{book}/src/epub/{name}": text if isinstance(text, str) else page.format(*text)
        for name, text in BOOK.items()
    }
    made = prepare_data.contents(write(tmp_path, files))
    text = gzip.decompress(made["ebooks/herman-melville_moby-dick.txt.gz"]()).decode()
    assert text == (
        "Loomings\n\nCall me Ishmael. Some years ago\u2014never mind.\n\n"
        "And I only am escaped alone\n\nThe end.\n"
    )
    assert prepare_data.patterns(book) == ["/src/epub/content.opf", "/src/epub/text/"]


def test_files_of_repositories(tmp_path):
    few_shot, flickr = "tonyzhaozh/few-shot-learning/data", "multi30k/dataset/data/task1/raw"
    files = {
        "forest-snow/alps/data/SST-2/train.tsv": "sentence\tlabel\nfine \t1\n",
        "forest-snow/alps/data/SST-2/dev.tsv": "sentence\tlabel\nbland \t0\n",
        "louisbzk/pet/data/copa/train.jsonl": '{"idx": 0}\n',
        "louisbzk/pet/data/copa/unlabeled.jsonl": '{"idx": 1}\n',
        f"{few_shot}/trec/test.txt": "NUM:dist How far ?\n",
        f"{flickr}/val.de.gz": "bytes as they are\n",
        "karpathy/char-rnn/data/tinyshakespeare/input.txt": "First Citizen:\n",
    }
    made = prepare_data.contents(write(tmp_path, files))
    zipped = {
        "glue/SST-2/train.tsv.gz": "sentence\tlabel\nfine \t1\nbland \t0\n",
        "super_glue/COPA/train.jsonl.gz": '{"idx": 0}\n{"idx": 1}\n',
        "trec/test.txt.gz": "NUM:dist How far ?\n",
    }
    assert {name: gzip.decompress(made[name]()).decode() for name in zipped} == zipped
    assert made["multi30k/val.de.gz"]() == b"bytes as they are\n"
    assert made["text/tinyshakespeare.txt"]() == b"First Citizen:\n"


def test_every_published_file_is_made_of_a_known_commit(tmp_path):
    assert prepare_data.contents(tmp_path).keys() == PUBLISHED.keys()
    for folder in (*prepare_data.FOLDERS.values(), prepare_data.REVIEWS):
        assert "/".join(folder.split("/")[:2]) in prepare_data.SOURCES
    assert all(re.fullmatch("[0-9a-f]{40}", each) for each in prepare_data.SOURCES.values())


def test_commands_get_the_files_that_are_read(capsys):
    assert prepare_data.main(["--sources=my sources", "--commands"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(prepare_data.SOURCES)
    url, folder = "https://github.com/louisbzk/pet", "'my sources/louisbzk/pet'"
    found = lines.index(f"git clone --filter=blob:none --no-checkout {url} {folder}")
    patterns = "/data/copa/train.jsonl /data/copa/unlabeled.jsonl /data/copa/val.jsonl"
    assert lines[found + 1 : found + 3] == [
        f"git -C {folder} sparse-checkout set --no-cone {patterns}",
        f"git -C {folder} checkout {prepare_data.SOURCES['louisbzk/pet']}",
    ]


def test_missing_and_other_sources_are_named(tmp_path, capsys):
    trec = "tonyzhaozh/few-shot-learning/data/trec"
    sources = write(tmp_path / "sources", {f"{trec}/train.txt": "NUM:dist How far ?\n"})
    output = tmp_path / "data"
    assert prepare_data.main([f"--sources={sources}", f"--output={output}"]) == 1
    said = capsys.readouterr().out
    for repository in prepare_data.SOURCES.keys() - {"tonyzhaozh/few-shot-learning"}:
        assert f"There is no checkout {sources / repository}\n" in said
    assert "tonyzhaozh/few-shot-learning\n" not in said
    assert f"trec/test.txt.gz left out, as there is no {sources / trec}/test.txt\n" in said
    assert re.search(r"trec/train\.txt\.gz has another hash, [0-9a-f]{64}\n", said)
    assert [path.name for path in output.rglob("*") if path.is_file()] == ["train.txt.gz"]


def test_status_of_published_files_is_0(tmp_path, monkeypatch):
    hashes = {"text/a.txt": hashlib.sha256(b"text").hexdigest()}
    monkeypatch.setattr(prepare_data, "published", lambda: hashes)
    monkeypatch.setattr(
        prepare_data, "contents", lambda sources: {"text/a.txt": lambda: b"text"}
    )
    assert prepare_data.main([f"--sources={tmp_path}", f"--output={tmp_path}/data"]) == 0
    assert (tmp_path / "data/text/a.txt").read_bytes() == b"text"


@pytest.mark.skipif(not CHECKOUTS, reason="SWITCHX_EXPERIMENT_SOURCES names no checkouts")
def test_real_checkouts_make_the_published_files(tmp_path):
    assert prepare_data.prepare(pathlib.Path(CHECKOUTS), tmp_path) == {}
