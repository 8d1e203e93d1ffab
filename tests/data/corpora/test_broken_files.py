# SPDX-License-Identifier: Apache-2.0
"""Whatever is done to files, their rows are exactly those that were written, or are refused.

A fault that leaves a valid file of other content, such as a letter that became another one, is
no reader's to find; what it must not do is lose rows. Where a cut lies between two lines, or a
flipped bit is in a text, the number of rows says so.
"""

import csv
import gzip
import io
import itertools
import json
import os
from collections import Counter

import pyarrow
import pyarrow.parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from switchx.data.corpora.raw_files import RawFile, read_rows
from switchx.data.corpora.text_files import Texts, find_texts

# What is hard to read: marks of tables, ends of lines, quotes, other scripts.
CELLS = st.text(st.sampled_from("ab ,\"'\t\r\n\\é\ufeff\u2028漢#"), max_size=6)
TABLES = st.lists(st.tuples(CELLS, CELLS).filter(lambda row: row[0].strip()), max_size=5)

# What may lie in a folder.
KINDS = ("text", "gz", "twice", "folder", "link", "file_link", "hidden", "other")


def written(suffix: str, rows: list[tuple[str, str]]) -> bytes:
    file = io.StringIO(newline="")
    if suffix == ".csv":
        # Python 3.11 writes \r without quotes, where it is a line's end.
        has_cr = any("\r" in cell for row in rows for cell in row)
        quotes = csv.QUOTE_ALL if has_cr else csv.QUOTE_MINIMAL
        csv.writer(file, lineterminator="\n", quoting=quotes).writerows([("q", "a"), *rows])
    elif suffix == ".tsv":
        file.write("".join("\t".join(row) + "\n" for row in [("q", "a"), *rows]))
    elif suffix.startswith(".jsonl"):
        file.write("".join(json.dumps(dict(q=q, a=a)) + "\n" for q, a in rows))
    else:
        packed = io.BytesIO()
        table = pyarrow.table({"q": [q for q, _ in rows], "a": [a for _, a in rows]})
        if suffix == ".parquet":
            pyarrow.parquet.write_table(table, packed, write_page_checksum=True)
        else:
            with pyarrow.ipc.new_stream(packed, table.schema) as writer:
                writer.write_table(table, max_chunksize=1)
        return packed.getvalue()
    content = file.getvalue().encode()
    return gzip.compress(content, mtime=0) if suffix.endswith(".gz") else content


def read(path, content) -> list[tuple[str, str]] | None:
    """Rows, or None where the file is refused by its name."""
    path.write_bytes(content)
    tally = Counter()
    try:
        rows = [(row["q"], row["a"]) for row in read_rows(path, RawFile(path.name), tally)]
    except ValueError as error:
        assert str(error).startswith(str(path))
        return None
    except KeyError:
        return None  # the header is another one, which a template refuses by name
    assert tally["rows"] == len(rows)
    return rows


def test_any_byte_of_a_parquet_file(tmp_path):
    """Also of what describes it, which has no checksum."""
    rows, path = [("a", "xé"), ("b", ""), ("cc", "y")], tmp_path / "broken.parquet"
    content = written(".parquet", rows)
    for at, bit in itertools.product(range(len(content)), (2, 7)):
        broken = bytearray(content)
        broken[at] ^= 1 << bit
        assert read(path, bytes(broken)) in (None, rows), (at, bit)


# The same examples in every run; more of them, at random, by hand.
@settings(max_examples=60, derandomize=True)
@given(TABLES, st.data())
def test_rows_are_exact_or_refused(tmp_path_factory, rows, data):
    folder = tmp_path_factory.getbasetemp()
    suffix = data.draw(
        st.sampled_from([".csv", ".tsv", ".jsonl", ".jsonl.gz", ".parquet", ".arrow"])
    )
    if suffix == ".tsv":  # has no way to write these
        rows = [
            tuple(c.translate(dict.fromkeys(map(ord, "\t\r\n"), "")) for c in r) for r in rows
        ]
        rows = [row for row in rows if row[0].strip()]
    path, content = folder / f"broken{suffix.upper()}", written(suffix, rows)
    if suffix == ".csv":  # \r\n within a cell is a line's end, as everywhere
        rows = [tuple(cell.replace("\r\n", "\n") for cell in row) for row in rows]
    assert read(path, content) == rows
    # Cut: at the end of a row of text the file is a shorter one, elsewhere it is refused.
    cut = data.draw(st.integers(0, len(content) - 1)) if content else 0
    found = read(path, content[:cut])
    is_text = suffix in (".csv", ".tsv", ".jsonl")
    assert found is None or (is_text and len(found) <= len(rows)) or found == rows
    if not content:
        return
    # A bit flipped: packed files and Parquet have checksums, and find it.
    broken = bytearray(content)
    broken[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    found = read(path, bytes(broken))
    if suffix in (".jsonl.gz", ".parquet"):
        assert found in (None, rows)
    # A cell too many, and a quote too many, in any row.
    if suffix == ".csv" and rows:
        lines = ["q,a\n"]
        lines += [written(".csv", [row]).decode().partition("\n")[2] for row in rows]
        number = data.draw(st.integers(1, len(rows)))
        extra = lines[:number] + [f"x,{lines[number]}"] + lines[number + 1 :]
        assert read(path, "".join(extra).encode()) is None
        extra = lines[:number] + [f'"{lines[number]}'] + lines[number + 1 :]
        assert read(path, "".join(extra).encode()) is None


@settings(max_examples=25, derandomize=True)
@given(st.data())
def test_each_text_of_a_folder_is_read_once(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("folder")
    folders, want, left_out = [root], set(), 0
    for number in range(data.draw(st.integers(1, 8))):
        folder = data.draw(st.sampled_from(folders))
        kind = data.draw(st.sampled_from(KINDS))
        path, text = folder / f"{number}.txt", f"text {number}\n"
        if kind == "folder":
            (folder / f"{number}").mkdir()
            folders.append(folder / f"{number}")
        elif kind == "link":
            path.with_suffix("").symlink_to(data.draw(st.sampled_from(folders)))
            left_out += 1
        elif kind == "file_link":
            there = [each for each in sorted(root.rglob("[0-9]*")) if each.suffix != ".md"]
            os.symlink(data.draw(st.sampled_from(there or [root])), path)
            left_out += 1
        elif kind in ("hidden", "other"):
            (folder / (f".{path.name}" if kind == "hidden" else f"{number}.md")).write_text(
                text
            )
            left_out += 1
        else:
            want.add(text)
            if kind != "gz":
                path.write_text(text)
            if kind != "text":
                (folder / f"{number}.TXT.gz").write_bytes(gzip.compress(text.encode()))
                left_out += kind == "twice"
    if not want:
        return
    found = find_texts(str(root))
    texts = [each["text"] for each in Texts.of(list(found.files)).examples(100, Counter())]
    assert sorted(texts) == sorted(want)
    assert sum(map(len, found.left_out.values())) == left_out
