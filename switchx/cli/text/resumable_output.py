# SPDX-License-Identifier: Apache-2.0
"""A file of one output line per input line, which goes on where a killed command left it.

Whole shards are appended and flushed to the disk; then `FILE.progress.json` beside it records
how many lines there are, for which inputs and settings, and their checksums. Whatever the
output holds beyond that belongs to an interrupted shard, and is written again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

from switchx.files import write_atomically


class StandardOutput(contextlib.nullcontext):
    """Lines printed to standard output, which cannot be resumed."""

    def __init__(self):
        super().__init__(self)
        self.num_lines = 0
        self._lines = []

    def append(self, lines: Sequence[str]) -> None:
        print(*lines, sep="\n", flush=True)
        self._lines += lines
        self.num_lines += len(lines)

    def lines(self) -> Iterator[str]:
        return iter(self._lines)


class ResumableOutput:
    """`with ResumableOutput(...) as output:`, then `append` from line `output.num_lines` on.

    Attributes:
        num_lines: lines that are there already.
    """

    def __init__(
        self, path: str | os.PathLike, inputs: Sequence[str], settings: dict[str, Any]
    ):
        """Opens nothing.

        Args:
            inputs: all input lines, one for each line of output.
            settings: JSON of everything else that determines what is written.
        """
        self.path = pathlib.Path(path).expanduser()
        self.progress = self.path.with_name(f"{self.path.name}.progress.json")
        self._inputs = inputs
        self._settings = json.loads(json.dumps(settings))
        self._read, self._written = hashlib.sha256(), hashlib.sha256()
        self.num_lines = self._num_bytes = 0

    def __enter__(self) -> Self:
        """Opens the file and checks that it is the beginning of what is to be written.

        Raises:
            ValueError: the file is not such an output, has other inputs or settings, was
                changed, is being written by another process, or cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be written ({error.strerror}); give another --output"
            ) from error
        try:
            self._begin()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def append(self, lines: Sequence[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._add(len(lines), data)
        self._save()

    def lines(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            for line in file:
                yield line.decode().removesuffix("\n")

    def _begin(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path} is being written by another process; wait for it, or give "
                "another --output"
            ) from None
        size = self._file.seek(0, os.SEEK_END)
        if self.progress.exists():
            self._go_on(size)
        elif size:
            raise ValueError(
                f"{self.path} is there, and no {self.progress.name} says how it was begun; "
                "give another --output, or remove it"
            )
        self._save()

    def _go_on(self, size: int) -> None:
        again = f"give another --output, or remove {self.path} and {self.progress.name}"
        try:
            saved = json.loads(self.progress.read_bytes())
            settings = dict(saved["settings"])
            num_lines = int(saved["num_lines"])
            num_bytes = int(saved["num_bytes"])
            read, written = saved["input_sha256"], saved["output_sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.progress} is damaged ({error!r}); {again}") from error
        different = [
            f"{name}: {settings.get(name)!r} then, {self._settings.get(name)!r} now"
            for name in sorted(settings.keys() | self._settings.keys())
            if settings.get(name) != self._settings.get(name)
        ]
        if different:
            raise ValueError(
                f"{self.path} was begun with other settings ({'; '.join(different)}); {again}"
            )
        if size < num_bytes:
            raise ValueError(f"{self.path} was cut since it was written; {again}")
        self._file.seek(0)
        self._add(num_lines, self._file.read(num_bytes))
        if self._written.hexdigest() != written:
            raise ValueError(f"{self.path} has changed since it was written; {again}")
        if num_lines > len(self._inputs) or self._read.hexdigest() != read:
            raise ValueError(
                f"the {num_lines} lines of {self.path} belong to other inputs than the first "
                f"{num_lines} of these; {again}"
            )
        self._file.truncate(num_bytes)

    def _add(self, num_lines: int, data: bytes) -> None:
        for text in self._inputs[self.num_lines : self.num_lines + num_lines]:
            self._read.update(f"{text}\n".encode())
        self._written.update(data)
        self.num_lines += num_lines
        self._num_bytes += len(data)

    def _save(self) -> None:
        content = {
            "settings": self._settings,
            "num_lines": self.num_lines,
            "num_bytes": self._num_bytes,
            "input_sha256": self._read.hexdigest(),
            "output_sha256": self._written.hexdigest(),
        }
        write_atomically(self.progress, (json.dumps(content, indent=1) + "\n").encode())
