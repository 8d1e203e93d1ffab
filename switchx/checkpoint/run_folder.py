# SPDX-License-Identifier: Apache-2.0
"""A run folder (`--model_dir`): what one training run writes, and where.

A model from elsewhere also gets a run folder (`write_converted`): checkpoint 0, with only
parameters. Whatever reads a run's parameters can read it: `INIT_FROM`, `switchx eval`,
`switchx.load`.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from switchx.checkpoint.items import require_same_leaves
from switchx.checkpoint.manifest import Manifest, write_manifest
from switchx.checkpoint.parts import ChecksummedArrays, OneByOne, SaveArrays
from switchx.data.vocabularies import save_vocabulary
from switchx.fields import describe, require
from switchx.files import write_atomically
from switchx.models.config import ModelConfig, model_from_description
from switchx.models.params import abstract_params
from switchx.object_store import (
    Folder,
    as_folder,
    files_in,
    is_address,
    mirror,
    read_json_object,
    small_files,
    way_out,
)
from switchx.tree import named_leaves

# More bytes than any description of a run needs.
_MOST_CONFIG_BYTES = 1 << 24


def _inside(name: str) -> property:
    return property(lambda self: self.root / name)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The paths of one run.

    For an address such as `gs://bucket/run`, checkpoints are in the store. The small files are
    in a mirror on this machine (object_store.py), fetched at first use; a trainer uploads them.

    Raises:
        ValueError: the address is not one of a store that can be used.
    """

    path: str | os.PathLike

    def __post_init__(self):
        as_folder(self.path, "model_dir")

    config = _inside("config.json")  # the configuration that a resumed run is compared with
    operative_config = _inside("operative_config.gin")  # every gin binding that was used
    model_gin = _inside("model.gin")  # only the model, as a gin file
    git_commit = _inside("git_commit.txt")  # the code that ran
    initialization = _inside("initialization.json")  # what INIT_FROM took from where
    taught_by = _inside("taught_by.json")  # the one teacher of a student (TaughtProgram)
    adapter = _inside("adapter.json")  # the base of an adapter run, adapter_run.py
    corpora = _inside("corpora.json")  # what was read of the data's files, and left out
    # The vocabulary's copy is in vocabulary.*, see data/vocabularies.py.
    metrics = _inside("metrics.jsonl")  # one line per logged step
    alarms = _inside("alarms.jsonl")  # telemetry/routing_alarms.py
    validation = _inside(
        "validation.jsonl"
    )  # one line per evaluation, including metrics of texts
    evaluations = _inside("evaluations.jsonl")  # by `switchx eval --step=all`, a line per step
    routing = _inside("routing")  # where an evaluation's tokens went, training/evaluate.py
    predictions = _inside("predictions")  # samples of what the model wrote, by evaluation
    peaks = _inside("peaks.json")  # the best of each task's metrics, and when
    tensorboard = _inside("tensorboard")  # the same numbers as TensorBoard events
    wandb_run = _inside("wandb_run.txt")  # the Weights & Biases run to continue
    last_save = _inside("last_save.json")  # cost of the last save, retention.py
    identity = _inside("run_id.txt")  # whose local copies are this run's, local_copies.py
    storage = _inside("storage")  # experts on a disk: records, requests; docs/storage.md
    skipped_batches = _inside("skipped_batches")  # batches whose step was not taken
    goodput = _inside("goodput.json")  # seconds by cause, training/telemetry/goodput.py
    profile = _inside("profile")  # traces of `--profile`, training/telemetry/profiling.py
    compiled = _inside("compiled")  # programs of several processes, compilation_cache.py
    lock_file = _inside("trainer.lock")  # held by the one trainer that may write here

    @property
    def where(self) -> Folder:
        """`path` made absolute, as Orbax requires."""
        return as_folder(self.path)

    @property
    def root(self) -> pathlib.Path:
        """The folder of the small files: `where`, or the mirror of an address."""
        return small_files(self.path)

    @property
    def is_in_store(self) -> bool:
        """Whether the run is in an object store."""
        return is_address(self.path)

    @property
    def checkpoints(self) -> Folder:
        """See checkpointer.py and docs/checkpoints.md."""
        return self.where / "checkpoints"

    def put(self) -> None:
        """Uploads small files written since the last call to a store; a no-op for a folder."""
        if self.is_in_store:
            mirror(str(self.where)).put()

    def create(self) -> Self:
        """Makes the folder unless it exists, and proves that it can be written.

        Raises:
            ValueError: the folder cannot be made or written; the message has the reason.
        """
        # Processes on several machines may have the same number, as in containers.
        probe = self.where / f".write_probe_{secrets.token_hex(4)}"
        try:
            if not self.is_in_store:  # a bucket is not made implicitly
                self.where.mkdir(parents=True, exist_ok=True)
            probe.write_text("written")
            probe.unlink()
            if self.is_in_store:  # another machine may have written since the mirror was made
                mirror(str(self.where)).fetch()
        except OSError as error:
            raise ValueError(
                f"model_dir={str(self.path)!r} cannot be written ({error.strerror or error}: "
                f"{error.filename}); give a folder that this user may write, on a disk that "
                "has space, or in a bucket that is there"
            ) from error
        return self

    @contextlib.contextmanager
    def locked(self, is_new: bool = False) -> Iterator[None]:
        """Holds the folder for one trainer; the system frees it when the process ends.

        A trainer that fails before it writes anything leaves nothing behind.

        Args:
            is_new: whether the folder was made for this trainer.

        It is advisory (flock): it keeps out other trainers, not readers such as `switchx eval`.
        In a store, which has no locks, the previous trainer is kept out (`Mirror.owned`).

        Raises:
            ValueError: another process holds it; the message says which.
        """
        if self.is_in_store:
            with mirror(str(self.where)).owned():
                yield
            return
        with self.lock_file.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file.fileno()), self.lock_file.stat()):
                    raise BlockingIOError  # it was removed, as below, after it was opened
            except (BlockingIOError, FileNotFoundError):
                file.seek(0)
                holder = json.loads(file.read() or "{}")
                raise ValueError(
                    f"model_dir={str(self.path)!r} is being trained by process "
                    f"{holder.get('pid', 'unknown')} on {holder.get('host', 'this machine')}; "
                    "wait for it, end it, or give another model_dir"
                ) from None
            file.truncate(0)
            json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
            file.flush()
            try:
                yield
            finally:
                self._remove_unused(is_new)

    def _remove_unused(self, is_new: bool) -> None:
        """Removes the lock and the folder of checkpoints if nothing else was written, and the
        run folder itself if it is new."""
        names = {each.name for each in self.root.glob("*")}
        if names <= {"checkpoints", self.lock_file.name}:
            with contextlib.suppress(OSError):  # there is a checkpoint
                if "checkpoints" in names:
                    self.checkpoints.rmdir()
                self.lock_file.unlink()
                if is_new:
                    self.root.rmdir()

    def require_owned(self) -> None:
        """Checks that no other trainer has taken over a folder in a store.

        Raises:
            ValueError: another trainer has taken it over; the message names it.
        """
        if self.is_in_store:
            mirror(str(self.where)).require_owned()

    @property
    def is_begun(self) -> bool:
        """Whether there is a checkpoint; an attempt that ended earlier may still be corrected.

        Raises:
            ValueError: there are checkpoints but no config.json.
        """
        if not (self.checkpoints.is_dir() and any(self.checkpoints.iterdir())):
            return False
        if not self.config.exists():
            raise ValueError(
                f"model_dir={str(self.path)!r} has checkpoints but no config.json; restore it, "
                "or give another model_dir"
            )
        return True

    def found(self) -> str:
        """A description of the contents of `path`, for errors where more was expected."""
        if self.is_in_store:
            names = sorted({name.partition("/")[0] for name in files_in(self.where)})
            return f"found {', '.join(names[:8])}" if names else "nothing is there"
        if not self.root.exists():
            return "nothing is there"
        if not self.root.is_dir():
            return "a file is there"
        names = sorted(child.name for child in self.root.iterdir())
        return f"found {', '.join(names[:8])}{', ...' * (len(names) > 8)}" if names else "empty"


def read_config(run: RunFolder) -> dict[str, Any]:
    """`config.json` of a run folder, in the form of the current version.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        config = read_json_object(run.config, _MOST_CONFIG_BYTES)
        if not isinstance(config.get("model"), dict):
            raise ValueError("it describes no model")
        if not isinstance(config.get("step", {}), dict):
            raise ValueError("its step is no object")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{run.where} is not a run folder, its config.json cannot be read ({error}): "
            f"{run.found()}; {way_out(run.root, 'give the model_dir of a run')}"
        ) from error
    return config


def read_model_config(run: RunFolder) -> ModelConfig:
    """The model's configuration in a run folder.

    Raises:
        ValueError: the file is missing, or its fields are not those of a ModelConfig.
    """
    return model_from_description(read_config(run)["model"], str(run.config))


def read_decoding(run: RunFolder) -> dict[str, Any]:
    """Decoding defaults that a model came with, or that INIT_FROM took; usually empty."""
    return _brought(run, "decoding") or {}


def read_rescaled(run: RunFolder) -> str | None:
    """The family whose factors are in a model's weights (`write_converted`), or in its base's.

    It follows the weights: into runs with INIT_FROM, averages, and reshaped or deployed
    models.
    """
    return _brought(run, "rescaled")


def _brought(run: RunFolder, name: str):
    """The entry `name` that a model came with, that INIT_FROM took, or that the adapters' base
    has; None where there is none."""
    found = read_config(run).get(name)
    if found is None and run.initialization.is_file():
        found = read_json_object(run.initialization, _MOST_CONFIG_BYTES).get(name)
    if found is None and run.adapter.is_file():
        found = _brought(RunFolder(read_json_object(run.adapter)["base"]), name)
    return found


def read_sparse_model_config(run: RunFolder) -> ModelConfig:
    """Like `read_model_config`; also raises ValueError if the model has no Switch layers."""
    model = read_model_config(run)
    require(
        model.switch is not None,
        f"{run.where} is the run of a dense model, which routes nothing; give the model_dir of "
        "a run with Switch layers",
    )
    return model


# Network file systems show a new file to other machines only after some seconds.
PATIENCE_S = 60.0


def require_shared(run: RunFolder, patience_s: float = PATIENCE_S) -> None:
    """Checks that all processes can read what process 0 writes into the run folder.

    Raises:
        ValueError: some processes cannot; the message names them.
    """
    if jax.process_count() == 1 or run.is_in_store:
        return
    nonce = int(multihost_utils.broadcast_one_to_all(np.int32(os.getpid())))
    token = run.root / f".seen_by_all_{nonce}"
    is_first = jax.process_index() == 0
    if is_first:
        token.write_text(socket.gethostname())
    multihost_utils.sync_global_devices("switchx_token_written")
    deadline = time.monotonic() + patience_s
    while not (is_seen := token.exists()) and time.monotonic() < deadline:
        os.listdir(run.root)  # NFS looks again
        time.sleep(0.2)
    seen = multihost_utils.process_allgather(np.array(is_seen))
    if is_first:
        token.unlink(missing_ok=True)
    if blind := np.flatnonzero(~seen).tolist():
        raise ValueError(
            f"model_dir={str(run.path)!r} is not one folder for all processes: process "
            f"{', '.join(map(str, blind))} does not see what process 0 writes there; give a "
            "folder on a file system that all machines share"
        )


def write_converted(
    run: RunFolder,
    config: ModelConfig,
    params: dict,
    vocabulary,
    origin: str,
    source=None,
    decoding: dict[str, Any] | None = None,
    train_state: dict | None = None,
    shapes: dict | None = None,
    rescaled: str | None = None,
) -> None:
    """Writes a model from another library into an existing, empty folder, as checkpoint 0.

    Args:
        params: NumPy or JAX arrays, in the dtypes of `config.precision.params`.
        origin: description of the model that was converted.
        source: description of the tasks that it was trained on, which determine how texts
            become its inputs; None where they are not known.
        decoding: decoding defaults, where the model has some.
        train_state: the rest of a training state, in the form of items.py; None writes none.
        shapes: shape structs of `params` where they are adapters; None takes the model's.
        rescaled: family whose factors were multiplied into `params`, so that adapters made for
            its original weights do not fit; None for all others.

    Raises:
        ValueError: the parameters are not those of the configuration (all that differ are
            named), or the vocabulary is larger than the embedding.
    """
    require_same_leaves(
        named_leaves(shapes or abstract_params(config)),
        named_leaves(params),
        "the converted model",
    )
    if vocabulary.size > config.vocab_size:
        raise ValueError(
            f"the vocabulary has {vocabulary.size} ids, the model's embedding "
            f"{config.vocab_size} rows; give the vocabulary that the model was trained with"
        )
    save_vocabulary(vocabulary, run.root)
    folder = run.checkpoints / "0"
    folder.mkdir(parents=True)
    items = {"params": params} | ({} if train_state is None else {"train_state": train_state})
    with ocp.Checkpointer(ChecksummedArrays(OneByOne())) as writer:
        for item, arrays in items.items():
            writer.save(folder / item, args=SaveArrays(arrays))
    write_manifest(folder, Manifest(0, None, {}))
    description = {"type": "ConvertedModel", "origin": origin, "model": describe(config)}
    description |= {} if source is None else {"source": source}
    description |= {} if rescaled is None else {"rescaled": rescaled}
    description |= {"decoding": decoding} if decoding else {}
    write_atomically(run.config, (json.dumps(description, indent=2) + "\n").encode())
