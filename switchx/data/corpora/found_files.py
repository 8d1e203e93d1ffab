# SPDX-License-Identifier: Apache-2.0
"""The files of a corpus: found in folders, each once, and all others by why they are left out.

Links are followed, also to folders. Hidden files and folders (`._a.txt`, `.ipynb_checkpoints`)
belong to an editor, a notebook or the system, not to what a user wrote: they are left out.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

from switchx.data.corpora.packed_files import Name, name_of, only
from switchx.object_store import Folder, as_folder, files_in, is_address

AGAIN = "read already"


@dataclasses.dataclass
class FoundFiles:
    """The files in some folders.

    Attributes:
        files: size of each file in bytes, by path; sorted within each folder that was named.
        left_out: names of files, folders and links, by reason.
        seen: real paths that were read or searched, so that nothing is read twice through links
            or because it is named twice.
        wants: whether files of a name are read. Links by such a name to other files are, too.
    """

    files: dict[Folder, int] = dataclasses.field(default_factory=dict)
    left_out: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    seen: set[str] = dataclasses.field(default_factory=set)
    wants: Callable[[Name], bool] = lambda name: True

    def add(self, name: str | Path, ignored: re.Pattern | None = None) -> list[Folder]:
        """Finds a file, or all in a folder, here or in a store; returns what is new.

        Args:
            ignored: pattern of names of files and folders to skip without counting them.

        Raises:
            ValueError: the path does not exist, or a folder in it cannot be read.
        """
        root, known = as_folder(name), set(self.files)
        if not root.exists():
            raise ValueError(f"{root} does not exist; name a file or a folder of files")
        if not root.is_dir():
            real = str(root) if is_address(root) else os.path.realpath(root)
            if real not in self.seen:
                self.seen.add(real)
                self.files[root] = _size(root)
        elif is_address(root):
            _find_in_store(root, self)
        else:
            _find_here(root.resolve(), self, ignored)
        return [path for path in self.files if path not in known]

    def add_entries(self, folder: Path) -> None:
        """Finds the files directly in a folder on this machine, not in its subfolders.

        Raises:
            ValueError: the folder cannot be read.
        """
        for entry in _entries(folder):
            path = folder / entry.name
            if entry.name.startswith("."):
                self.left_out["hidden"].append(entry.name)
            elif path.is_file():
                self.files[path] = _size(path)
            else:
                reason = "folder" if path.is_dir() else "link that leads to no file"
                self.left_out[reason].append(entry.name)

    def leave_out(self, path: Folder, reason: str) -> None:
        """Moves a file from those to be read to those left out."""
        del self.files[path]
        self.left_out[reason].append(path.name)

    def keep(self) -> None:
        """Leaves out files of other suffixes, and the second of one text in two packings.

        Raises:
            ValueError: `a.txt` and `a.txt.gz` hold different texts; names them.
        """
        by_name = collections.defaultdict(list)
        for path in list(self.files):
            name = name_of(path.name)
            if self.wants(name):
                kind = ".jsonl" if name.kind == ".json" else name.kind  # C4's names
                by_name[path.parent, name.stem, kind].append(path)
            else:
                self.leave_out(path, f"suffix {name.kind + name.packing or 'none'}")
        for paths in by_name.values():
            if len({name_of(path.name)[1:] for path in paths}) > 1:
                kept = only(paths)
                for other in paths:
                    if other != kept:
                        self.leave_out(other, "same text as another, packed otherwise")


def _size(file: Folder) -> int:
    return file.stat().length if is_address(file) else file.stat().st_size


def _find_in_store(root: Folder, found: FoundFiles) -> None:
    for name, size in sorted(files_in(root).items()):
        if any(part.startswith(".") for part in name.split("/")):
            found.left_out["hidden"].append(name)
        else:
            found.files[root / name] = size


def _find_here(root: Path, found: FoundFiles, ignored: re.Pattern | None) -> None:
    """Goes through folders first, then through links, so that a file below the root keeps its
    own name, whatever links lead to it."""
    files, folders, links, seen = {}, [root], [], found.seen
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(folder)
        if real in seen or not folder.is_dir():
            if real not in seen and folder.is_file():
                if found.wants(name_of(folder.name)):
                    seen.add(real)
                files[folder] = _size(folder)
                continue
            name = str(folder.relative_to(root))
            name += f" -> {os.readlink(folder)}" if folder.is_symlink() else "/"
            reason = AGAIN if real in seen else "link that leads to no file"
            found.left_out[reason].append(name)
            continue
        seen.add(real)
        for entry in _entries(folder):
            path, of_file = folder / entry.name, os.path.join(real, entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            if ignored is not None and ignored.fullmatch(entry.name):
                continue
            if entry.name.startswith("."):
                name = f"{path.relative_to(root)}{'/' * is_folder}"
                found.left_out["hidden"].append(name)
            elif entry.is_symlink():
                links.append(path)
            elif is_folder:
                folders.append(path)
            elif not entry.is_file():
                found.left_out["neither file nor folder"].append(str(path.relative_to(root)))
            elif of_file in seen:
                found.left_out[AGAIN].append(str(path.relative_to(root)))
            else:
                if found.wants(name_of(entry.name)):
                    seen.add(of_file)
                files[path] = entry.stat().st_size
    found.files |= {path: files[path] for path in sorted(files)}


def _entries(folder: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be read: {error}; give this user the right to, or name other "
            "folders"
        ) from error
