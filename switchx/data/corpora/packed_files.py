# SPDX-License-Identifier: Apache-2.0
"""Files of text by their suffix, plain or packed: their names, their bytes, their lines.

A packed file (`.gz`, `.bz2`, `.xz`, `.zst`) holds one stream after another, as from `cat a.gz
b.gz`, and is either read completely or refused. Python's own readers do less: bz2's and xz's
end silently where something else follows a stream, and gzip's accepts an empty file.
"""

import bz2
import contextlib
import io
import itertools
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from switchx.object_store import Folder

_SIZE = 1 << 18
_BOM = b"\xef\xbb\xbf"


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        try:
            from backports import zstd  # the same module, for Python before 3.14
        except ImportError as error:
            raise OSError(
                "it is packed by Zstandard, for which the package backports.zstd is needed "
                "(pip install backports.zstd)"
            ) from error
    return zstd.ZstdDecompressor, zstd.ZstdError


# Suffix -> function that makes the unpacker of one stream, and its error.
_UNPACKERS = {
    ".gz": lambda: (lambda: zlib.decompressobj(wbits=31), zlib.error),
    ".bz2": lambda: (bz2.BZ2Decompressor, OSError),
    ".xz": lambda: (lzma.LZMADecompressor, lzma.LZMAError),
    ".zst": _zstd,
}
PACKINGS = tuple(_UNPACKERS)


class Name(NamedTuple):
    """`Notes.TXT.gz` is `Notes`, `.txt` and `.gz`: suffixes in lower case, `` for none."""

    stem: str
    kind: str
    packing: str


def name_of(file: str) -> Name:
    """The parts of a file's name."""
    suffix = Path(file).suffix
    packing = suffix.lower() if suffix.lower() in PACKINGS else ""
    own = Path(file.removesuffix(suffix) if packing else file)
    return Name(own.stem, own.suffix.lower(), packing)


def named(folder: Path, name: str) -> Path | None:
    """The file of a name in a folder, plain or packed, suffixes in any case; None if none.

    Raises:
        ValueError: two of them hold different texts, or the folder cannot be read.
    """
    try:
        paths = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error}; name another folder") from error
    wanted = name_of(name)[:2]
    return only([path for path in paths if name_of(path.name)[:2] == wanted and path.is_file()])


def only(paths: Sequence[Folder]) -> "Folder | None":
    """The file with the shortest name among plain and packed files of one text, or None.

    Taking both would give each document twice, and taking one of two different texts might
    take the wrong one.

    Raises:
        ValueError: the texts differ; the message names two of the files.
    """
    first, *others = sorted(paths, key=lambda path: (len(path.name), path.name)) or [None]
    for other in others:
        lines = itertools.zip_longest(read_lines(first), read_lines(other))
        if any(a != b for a, b in lines):
            raise ValueError(
                f"{first} and {other.name} beside it hold different texts under one name; take "
                "one of them away, or rename it"
            )
    return first


@contextlib.contextmanager
def opened(path: Folder) -> Iterator[BinaryIO]:
    """A file's bytes, unpacked; a packed one's without byte order marks.

    Raises:
        ValueError: the file is unreadable or incomplete, also when read within the context.
    """
    packing = name_of(path.name).packing
    try:
        with path.open("rb") as file:
            yield (
                io.BufferedReader(_Chunks(_unpacked(file, packing)), _SIZE) if packing else file
            )
    except (OSError, EOFError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; check that it is whole and that you may read it"
        ) from error


def read_lines(path: Folder) -> Iterator[str]:
    r"""Lines of a UTF-8 file, plain or packed, with their ends.

    `\r\n` becomes `\n`, and in a file without any `\n` so does `\r`.

    Raises:
        ValueError: the file is unreadable or not UTF-8; names it and the byte offset (for a
            packed file, in the unpacked text without byte order marks).
    """
    offset = 0
    try:
        with opened(path) as file:
            for line in raw_lines(file):
                text = line.decode("utf-8-sig" if offset == 0 else "utf-8")
                offset += len(line)
                yield text[:-2] + "\n" if text.endswith("\r\n") else text
    except UnicodeDecodeError as error:
        at = offset + error.start
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {at}; "
            "convert it, as with `iconv -f LATIN1 -t UTF-8`"
        ) from error


def raw_lines(file: BinaryIO) -> Iterator[bytes]:
    r"""Lines with their ends: after each `\n`, or in a file without one, each `\r`."""
    first = file.readline()
    has_line_feed = first.endswith(b"\n")
    yield from [first] if has_line_feed else first.replace(b"\r", b"\n").splitlines(True)
    yield from file


def _unpacked(file: BinaryIO, packing: str) -> Iterator[bytes]:
    """Parts of the streams of a packed file, each stream without its byte order mark."""
    make, fault = _UNPACKERS[packing]()
    left = file.read(_SIZE)
    while True:
        stream, begin, is_begin = make(), b"", True
        while not stream.eof:
            if not left:
                raise EOFError("it ends before its end marker")
            try:
                data = begin + stream.decompress(left)
            except fault as error:
                raise OSError(str(error)) from error
            left = stream.unused_data if stream.eof else file.read(_SIZE)
            if is_begin and len(data) < len(_BOM) and not stream.eof:
                begin = data
                continue
            yield data.removeprefix(_BOM) if is_begin else data
            begin, is_begin = b"", False
        while not (left := left.lstrip(b"\0")):  # streams may be padded
            if not (left := file.read(_SIZE)):
                return


class _Chunks(io.RawIOBase):
    """A file of bytes that come in parts."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._left = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._left:
            if (chunk := next(self._chunks, None)) is None:
                return 0
            self._left = memoryview(chunk)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size
