# SPDX-License-Identifier: Apache-2.0
"""Documents: text read line by line, cut where it parts, and shared out by hash."""

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path


def read_lines(path: Path) -> Iterator[str]:
    r"""Lines of a UTF-8 file, plain or `.gz`, with their ends; `\r\n` becomes `\n`.

    Raises:
        ValueError: not to be read, or not UTF-8: names the file and the byte offset (in the
            unpacked text).
    """
    open_file = gzip.open if path.suffix == ".gz" else open
    offset = 0
    try:
        with open_file(path, "rb") as file:
            for line in file:
                text = line.decode("utf-8-sig" if offset == 0 else "utf-8")
                offset += len(line)
                yield text[:-2] + "\n" if text.endswith("\r\n") else text
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {at}; "
            "convert it, as with `iconv -f LATIN1 -t UTF-8`"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; check that it is whole and that you may read it"
        ) from error


def cut_lines(lines: Iterable[str], max_characters: int) -> Iterator[str]:
    """Joins lines into documents of at most `max_characters`; nothing is lost but blank ones.

    A document that has to end ends, by preference, before an unindented line that follows a
    blank one (a paragraph, a top-level definition), before any line that follows a blank
    one, before any line. A single longer line stays whole.
    """
    document, size = [], 0
    weak_end, strong_end = 0, 0
    for line in lines:
        if document and line.strip() and not document[-1].strip():
            if line[0].isspace():
                weak_end = len(document)
            else:
                strong_end = len(document)
        while document and size + len(line) > max_characters:
            end = strong_end or weak_end or len(document)
            text = "".join(document[:end])
            if text.strip():
                yield text
            document, size = document[end:], size - len(text)
            weak_end, strong_end = max(0, weak_end - end), 0
        document.append(line)
        size += len(line)
    if any(line.strip() for line in document):
        yield "".join(document)


def require_cut(validation_fraction: float, max_characters: int) -> None:
    """Raises ValueError for a share of 0 or of all, or documents without characters."""
    if not 0 < validation_fraction < 1:
        raise ValueError(
            f"validation_fraction={validation_fraction}; use a share between 0 and 1, as 0.05"
        )
    if max_characters < 1:
        raise ValueError(f"max_characters={max_characters}; use at least 1, usually thousands")


def text_digest(*texts: str) -> bytes:
    """8 bytes that stand for the texts."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.digest()


def validation_digests(
    digests: Iterable[bytes], fraction: float, what: str
) -> frozenset[bytes]:
    """Which digests are held out: those in the lowest `fraction` of all possible ones.

    A document keeps its side when others come or go. Where that would leave a side empty,
    the lowest digest is held out, or the highest is not.

    Args:
        what: of the message, where the documents come from.

    Raises:
        ValueError: fewer than two distinct documents.
    """
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        raise ValueError(
            f"{what} holds {len(distinct)} distinct documents and a split into train and "
            "validation needs at least 2; add text, or cut it finer by a lower max_characters"
        )
    bound = int(fraction * 2**64)
    num_below = sum(int.from_bytes(digest, "big") < bound for digest in distinct)
    return frozenset(distinct[: min(max(num_below, 1), len(distinct) - 1)])
