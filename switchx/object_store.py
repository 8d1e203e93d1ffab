# SPDX-License-Identifier: Apache-2.0
"""Object stores: what `gs://bucket/run` and `s3://bucket/run` need that a folder does not.

A store has objects under keys, but no folders, renames, locks or appending. An object exists
whole or not at all, and all readers see it at once. So the file that is written last (a
checkpoint's manifest) shows that the rest is there, the owner of a run records its ownership
in a token, and files that grow, such as logs, are written on the machine (`Mirror`) and
uploaded as they are.

Small files go through epath and fsspec (gcsfs, s3fs), arrays through TensorStore, whose drivers
Orbax names. Orbax knows only gs://; `_teach_orbax_s3` teaches it the other.
"""

import contextlib
import functools
import importlib.util
import json
import logging
import os
import pathlib
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # few commands need this, so it is imported where it is used
    from etils import epath

logger = logging.getLogger(__name__)

# By scheme: TensorStore's driver, fsspec's names for it, the package that it needs.
_STORES = {"gs": ("gcs", ("gcs", "gs"), "gcsfs"), "s3": ("s3", ("s3",), "s3fs")}

# The second type has the methods of the first.
Folder: TypeAlias = "pathlib.Path | epath.Path"


def is_address(path: str | os.PathLike) -> bool:
    """Whether a path names something in a store, as `s3://bucket/run` does."""
    return "://" in str(path)


def as_folder(path: str | os.PathLike, name: str = "path") -> Folder:
    """An absolute path, or one in a store.

    Args:
        name: name of the setting that gave it, for messages.

    Raises:
        ValueError: the store is not a known one, or its package is not installed.
    """
    if isinstance(path, pathlib.PurePath) and re.match("(gs|s3):/[^/]", str(path)):
        raise ValueError(
            f"{name}={str(path)!r} has lost a slash of its address, as a pathlib.Path does; "
            "give a text"
        )
    if not is_address(path):
        return absolute(path)
    scheme, _, rest = str(path).partition("://")
    if scheme not in _STORES or not rest.strip("/"):
        raise ValueError(
            f"{name}={str(path)!r} is no address of a store; give gs://BUCKET/..., "
            "s3://BUCKET/..., or a folder"
        )
    _prepare(scheme, name)
    from etils import epath

    return epath.Path(str(path).rstrip("/"))


def absolute(path: str | os.PathLike) -> pathlib.Path:
    """An absolute local path that TensorStore accepts: it refuses paths with `..` in them."""
    full = pathlib.Path(path).expanduser().absolute()
    return full.resolve() if ".." in full.parts else full


@functools.cache
def _prepare(scheme: str, name: str) -> None:
    _, protocols, package = _STORES[scheme]
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"{name} is in a store {scheme}://, for which the package {package} is needed; "
            f"install it (pip install {package}), or give a folder"
        )
    import fsspec

    for protocol in protocols:  # epath's own instances take it from here
        fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
    if scheme == "s3":
        _teach_orbax_s3()


@functools.cache
def _teach_orbax_s3() -> None:
    """Makes Orbax give TensorStore the S3 driver for `s3://`.

    Orbax knows `gs://` addresses. Its specification for one is the same for S3, except for the
    driver.

    Raises:
        ValueError: this version of Orbax makes the specification elsewhere.
    """
    import orbax.checkpoint

    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils

        build = tensorstore_utils.build_kvstore_tspec
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"s3:// with orbax-checkpoint {orbax.checkpoint.__version__}: {error}; use 0.12, a "
            "folder, or gs://"
        ) from error

    def with_s3(directory: str, *arguments, **named) -> dict[str, Any]:
        if not str(directory).startswith("s3://"):
            return build(directory, *arguments, **named)
        spec = build(str(directory).replace("s3://", "gs://", 1), *arguments, **named)
        return _as_s3(spec)

    tensorstore_utils.build_kvstore_tspec = with_s3


def _as_s3(spec: Any) -> Any:
    if not isinstance(spec, dict):
        return spec
    if spec.get("driver") == "gcs":
        return spec | {"driver": "s3"} | _s3_settings()
    return {key: _as_s3(value) for key, value in spec.items()}


def _s3_settings() -> dict[str, str]:
    """Endpoint and region, from the environment variables that all AWS programs read."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
    region = os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION"))
    settings = {"endpoint": endpoint, "aws_region": region}
    return {key: value for key, value in settings.items() if value}


def kvstore(folder: Folder) -> dict[str, Any]:
    """TensorStore's specification of a key-value store whose keys are names in a folder."""
    if not is_address(folder):
        return {"driver": "file", "path": f"{folder}/"}
    scheme, _, rest = str(folder).partition("://")
    bucket, _, path = rest.partition("/")
    spec = {"driver": _STORES[scheme][0], "bucket": bucket, "path": f"{path}/"}
    return spec | (_s3_settings() if scheme == "s3" else {})


def files_in(folder: Folder) -> dict[str, int]:
    """Bytes of all files below a folder, by their names in it; empty if it does not exist."""
    if not is_address(folder):
        paths = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    store, root = _store_of(folder)
    found = store.find(root, detail=True).items()
    return {key.removeprefix(f"{root}/"): each["size"] for key, each in found}


def state_of(file: Folder) -> tuple[Any, ...]:
    """Values that differ if a file has changed; the file is not read."""
    if is_address(file):
        store, path = _store_of(file)
        return (store.checksum(path),)  # of the store's information on it, including its hash
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def remove(folder: Folder, first: str) -> None:
    """Deletes a folder of a store.

    Args:
        first: name of the file that shows that the rest is there; it is deleted first.
    """
    (folder / first).unlink(missing_ok=True)
    if files_in(folder):
        store, root = _store_of(folder)
        store.rm(root, recursive=True)


def _store_of(folder: Folder) -> tuple[Any, str]:
    """fsspec's file system for a folder, and the folder's path in it."""
    import fsspec

    return fsspec.core.url_to_fs(str(folder))


def free_bytes(folder: Folder) -> float:
    """Free bytes on the folder's disk; infinite in a store."""
    return float("inf") if is_address(folder) else shutil.disk_usage(folder).free


class Mirror:
    """The small files of a store's folder, read and written on this machine, then uploaded.

    Attributes:
        folder: folder with this process' own copy of the files, deleted when it ends.
    """

    # Large files, read where they are; and files for this machine only.
    _NOT_FETCHED = ("checkpoints/", "tensorboard/", "profile/")
    _NOT_PUT = ("compiled/", "storage/", "trainer.json")

    def __init__(self, address: str):
        """Fetches the files."""
        self._address = address
        self._temporary = tempfile.TemporaryDirectory(prefix="switchx_")
        self.folder = pathlib.Path(self._temporary.name)
        self._put: dict[str, tuple] = {}
        self._token: str | None = None  # this process' token, while it trains there
        self.fetch()

    def fetch(self) -> None:
        """Replaces the copy by the store's files; files that were not uploaded are lost."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._put = {}
        address = as_folder(self._address)
        for name in files_in(address):
            if not name.startswith(self._NOT_FETCHED):
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes((address / name).read_bytes())
                self._put[name] = state_of(path)

    def put(self) -> None:
        """Uploads the files that have been written since the last upload."""
        address = as_folder(self._address)
        for name in files_in(self.folder):
            path = self.folder / name
            state = state_of(path)
            is_own = name.startswith(self._NOT_PUT) or path.name.startswith(".")
            if not is_own and self._put.get(name) != state:
                (address / name).write_bytes(path.read_bytes())
                self._put[name] = state

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Owns the folder by a token, until another trainer writes its own there.

        The previous trainer finds out at its next save, and ends (`require_owned`). A token
        left by a trainer that was killed blocks nobody. At the end, files are uploaded.
        """
        if holder := self._read_owner():
            logger.warning(
                "%s was held by process %s on %s since %s; if it still runs, it ends at its "
                "next save",
                *(self._address, holder.get("pid"), holder.get("host"), holder.get("since")),
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        self._token = secrets.token_hex(16)
        self._owner.write_text(json.dumps(owner | {"token": self._token}))
        try:
            yield
        finally:
            if self._read_owner().get("token") == self._token:
                self.put()
                self._owner.unlink()
            self._token = None

    def require_owned(self) -> None:
        """Checks that the token is still this process' own, if it has written one.

        Raises:
            ValueError: another trainer has taken over; the message says which.
        """
        owner = self._read_owner()
        if self._token not in (None, owner.get("token")):
            raise ValueError(
                f"model_dir={self._address!r} was taken over by process "
                f"{owner.get('pid', 'unknown')} on {owner.get('host', 'another machine')}, "
                f"whose token is in {self._owner}; this process ends. What it saved before is "
                "intact. Train in a folder with one trainer"
            )

    @property
    def _owner(self) -> Folder:
        return as_folder(self._address) / "trainer.json"

    def _read_owner(self) -> dict[str, Any]:
        try:
            return json.loads(self._owner.read_text())
        except FileNotFoundError:
            return {}


@functools.cache
def mirror(address: str) -> Mirror:
    """The mirror of a folder in a store; each process has only one."""
    return Mirror(address)


def small_files(path: str | os.PathLike) -> pathlib.Path:
    """The folder that has the small files of a folder: itself, or the mirror of an address.

    Raises:
        ValueError: see `as_folder`.
    """
    folder = as_folder(path)
    return mirror(str(folder)).folder if is_address(folder) else folder


# Limits of nesting and size. json's own nesting limit depends on its caller's stack.
MAX_JSON_DEPTH, MAX_JSON_BYTES = 64, 1 << 28


def is_nested_deeper(value, most: int) -> bool:
    """Whether lists and dictionaries are nested more than `most` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return bool(level)


_LFS_POINTER = b"version https://git-lfs"
IS_LFS_POINTER = (
    "is a pointer of Git LFS and not the file itself: run `git lfs pull` in the clone"
)


def is_lfs_pointer(file: Folder) -> bool:
    """Whether a file is the text that a clone without Git LFS has in its place.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER


def require_no_lfs_pointer(file: Folder) -> None:
    """Raises ValueError, which names `git lfs pull`, for a pointer."""
    if is_lfs_pointer(file):
        raise ValueError(f"{file} {IS_LFS_POINTER}")


def way_out(folder: pathlib.Path, otherwise: str) -> str:
    """What to do if a folder is not a run, depending on what it is instead, if known."""
    with contextlib.suppress(OSError, ValueError):
        if "model_type" in read_json_object(folder / "config.json"):
            return (
                "it is a model of transformers: `switchx convert --from=huggingface "
                f"{folder} DST` makes a folder of it that can be given"
            )
    if (folder / "artifact.json").is_file():
        return (
            "it is a packed model, as quantize and deploy make it, which is loaded, served and "
            "evaluated as it is; else give the run that it was made of"
        )
    return otherwise


def read_json_object(file: Folder, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Reads the JSON object in a file, which may come from anybody.

    Raises:
        ValueError: the file is too large, nested too deeply, not UTF-8, not JSON or not an
            object; the message is a clause.
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        data = opened.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes; expected that at most")
    if data.startswith(_LFS_POINTER):
        raise ValueError(f"it {IS_LFS_POINTER}")
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} times") from None
    if is_nested_deeper(content, MAX_JSON_DEPTH):
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} times")
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got a {type(content).__name__}")
    return content
