# SPDX-License-Identifier: Apache-2.0
"""The models of a server: which one answers a request, and how newer ones replace them.

A request names its model; one that names none goes to the first model. When the server is asked
to reload, the newest checkpoint of each model's folder is loaded beside the running one. It
takes new requests once its programs are compiled; those that were admitted before are answered
by the model that admitted them, which is then dropped. Until then both are in memory.
"""

import contextlib
import dataclasses
import gc
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from switchx import api
from switchx.checkpoint.manifest import damages
from switchx.checkpoint.restore import checkpoint_paths
from switchx.checkpoint.run_folder import RunFolder
from switchx.checkpoint.verify import checkpoint_faults
from switchx.inference.artifact import is_artifact
from switchx.inference.config import ExpertSlots
from switchx.partitioning.compiler_options import CompilerOptions
from switchx.partitioning.mesh import MeshSpec
from switchx.serving import refusals
from switchx.serving.asked_shapes import MOST_SHAPES
from switchx.serving.limits import Limits
from switchx.serving.metrics import Metrics
from switchx.serving.refusals import Refusal
from switchx.serving.requests import excerpt
from switchx.serving.service import Service

LOG = logging.getLogger(__name__)
# The name of its thread.
READER = "switchx-reader"
# Time between two checks of a thread.
_LOOK_S = 0.05
MOST_COLLECTIONS = 10


class Models:
    """The services of a server's models, used in its event loop.

    Attributes:
        services: services that take new requests, by name; the first one takes requests that
            name no model.
        num_open: number of open requests of all models, from their heads to their responses.
        is_draining: whether new requests are refused.
    """

    def __init__(self, services: Sequence[Service]):
        """Takes services of different names, with the same limits and `Metrics`."""
        self.services = {each.name: each for each in services}
        self._retired: list[Service] = []
        self._newer: queue.SimpleQueue[Service] = queue.SimpleQueue()
        self.num_open, self.is_draining = 0, False
        # Reads texts again for log-probabilities of prompts: one pass at a time over all
        # models, as each takes all cores.
        self.reader = ThreadPoolExecutor(1, READER)
        for name, each in self.services.items():
            each.metrics.running.set_function(lambda name=name: self._num_running(name))
            each.metrics.waiting.set_function(lambda name=name: self._num_waiting(name))
        self.metrics.built = lambda: [
            (name, each.model.step) for name, each in self.services.items()
        ]

    @property
    def first(self) -> Service:
        return next(iter(self.services.values()))

    @property
    def limits(self) -> Limits:
        return self.first.limits

    @property
    def metrics(self) -> Metrics:
        return self.first.metrics.server

    @property
    def all(self) -> list[Service]:
        """The services that take new requests, and those that still answer old ones."""
        return [*self.services.values(), *self._retired]

    @property
    def is_ready(self) -> bool:
        """Whether every model takes requests."""
        is_each_ready = all(each.worker.is_ready for each in self.services.values())
        return is_each_ready and not self.is_draining

    @property
    def is_alive(self) -> bool:
        """Whether every worker is alive, and none is stuck."""
        return self.error is None and not any(each.worker.is_stuck for each in self.all)

    @property
    def error(self) -> BaseException | None:
        """The error that ended a worker."""
        return next((each.worker.error for each in self.all if each.worker.error), None)

    def named(self, name: Any) -> Service:
        """The service of a name; for None, the first one.

        Raises:
            Refusal: 404, there is no model of this name.
        """
        if name is None:
            return self.first
        if not isinstance(name, str) or name not in self.services:
            names = ", ".join(map(repr, self.services))
            raise Refusal(
                404,
                f"model is {excerpt(name)}; this server has {names}",
                field="model",
                code="model_not_found",
            )
        return self.services[name]

    @contextlib.contextmanager
    def admitted(self):
        """A request from its head to its response.

        Raises:
            Refusal: 503, the server is stopping.
        """
        if self.is_draining:
            raise refusals.stopping()
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def replace(self, service: Service) -> None:
        """Makes a ready service take the requests of its name, at the next `look`; any thread
        may call it."""
        self._newer.put(service)

    def look(self) -> None:
        """Puts new services in place, and closes old ones that have answered everything."""
        with contextlib.suppress(queue.Empty):
            while newer := self._newer.get_nowait():
                self._retired.append(self.services[newer.name])
                self.services[newer.name] = newer
                LOG.info("%s: step %d answers", newer.name, newer.model.step)
        for each in [each for each in self._retired if not each.num_open]:
            each.close()
            self._retired.remove(each)

    def refuse_open(self, message: str) -> None:
        """Ends every request that is not answered yet with 503."""
        for each in self.all:
            each.refuse_open(message)

    def close(self) -> None:
        """Stops all workers after their batches."""
        for each in self.all:
            each.close()
        self.reader.shutdown(wait=False, cancel_futures=True)

    def _num_running(self, name: str) -> int:
        return sum(len(each.worker.running) for each in self.all if each.name == name)

    def _num_waiting(self, name: str) -> int:
        return sum(each.num_waiting for each in self.all if each.name == name)


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """Where a model is loaded from: the arguments of `switchx.load`."""

    model_dir: str | os.PathLike
    step: int | Literal["best"] | None = None
    mesh: MeshSpec | None = None
    expert_slots: int | ExpertSlots | None = None
    task: str | None = None
    compiler: CompilerOptions = CompilerOptions()

    def load(self) -> api.Model:
        """Raises ValueError as `switchx.load` does."""
        return api.load(
            self.model_dir,
            self.step,
            mesh=self.mesh,
            expert_slots=self.expert_slots,
            task=self.task,
            compiler=self.compiler,
        )

    def load_other(self, fingerprint: str) -> api.Model | None:
        """The model that is there now; None if it is the one of the fingerprint.

        All its bytes are compared with their checksums, and no older checkpoint is used instead
        of a damaged one.

        Raises:
            ValueError: the model is damaged, or see `switchx.load`.
            OSError: the model cannot be read.
        """
        if is_artifact(self.model_dir):
            model = self.load()
            return None if model.fingerprint == fingerprint else model
        run = RunFolder(self.model_dir)
        newest = checkpoint_paths(run.checkpoints)[:1] if self.step is None else []
        for path in newest:
            if damage := next(damages(path), None):
                raise ValueError(f"the newest checkpoint, {path}, is not whole: {damage}")
        model = self.load()
        if model.fingerprint == fingerprint:
            return None
        if faults := checkpoint_faults(run, model.step):
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            path = run.checkpoints / str(model.step)
            raise ValueError(f"checkpoint {path} is damaged: {faults[0]}{more}")
        return model


class _ServerStopsError(Exception):
    """The server is stopping, and nothing is waited for."""


class Reloader(threading.Thread):
    """Reloads models when it is asked to: one after the other, beside the running ones.

    It goes on to the next model when the last one's predecessor is gone, so that at most one
    model is in memory twice.
    """

    def __init__(self, models: Models, folders: Mapping[str, ModelFolder]):
        """`folders` are the models' folders, by name."""
        super().__init__(name="switchx-reloader", daemon=True)
        self._models, self._folders = models, folders
        # A signal may interrupt the handler of another one: this queue's `put` is reentrant.
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_closed = False

    def ask(self) -> None:
        """Requests that all models be reloaded; may be called from a signal handler."""
        self._asked.put(True)

    def close(self) -> None:
        """Ends the thread; what is being loaded is dropped."""
        self._is_closed = True
        self._asked.put(False)

    def run(self) -> None:
        with contextlib.suppress(_ServerStopsError):
            while not self._is_closed and self._asked.get():
                with contextlib.suppress(queue.Empty):
                    while self._asked.get_nowait():  # asked several times: loaded once
                        pass
                for name, folder in self._folders.items():
                    old = weakref.ref(self._models.services[name])
                    self._reload(name, folder)
                    self._free(old)

    def _free(self, old: weakref.ref) -> None:
        """Frees the memory of a model that was replaced, or that was not taken.

        Requests and exceptions are in reference cycles, which hold a model; a request may take
        a little while to end.
        """
        for _ in range(MOST_COLLECTIONS):
            gc.collect()
            if old() is None or old() in self._models.all:
                return
            time.sleep(1.0)

    def _reload(self, name: str, folder: ModelFolder) -> None:
        running = self._models.services[name]
        step, outcome = running.model.step, "failed"
        LOG.info("%s: loading %s again", name, folder.model_dir)
        try:
            model = folder.load_other(running.model.fingerprint)
            if model is not None:
                self._replace(running, model)
                outcome = "loaded"
            else:
                LOG.info("%s: step %d is the newest; it goes on", name, step)
                outcome = "unchanged"
        except _ServerStopsError:
            raise
        except Exception:
            LOG.exception("%s: not loaded again, step %d goes on", name, step)
        running.metrics.reloads[outcome].inc()
        if outcome == "loaded":
            self._wait(lambda: running not in self._models.all)
            for each in (running.worker, running.worker.compiler):
                each.join()

    def _replace(self, running: Service, model: api.Model) -> None:
        """Makes another model take the requests of a running one.

        Raises:
            Exception: the error with which its worker failed.
        """
        # A copy, as its worker goes on counting.
        asked = [shape for shape, _ in running.worker.asked.copy().most_common(MOST_SHAPES)]
        service = Service(model, running.limits, running.name, running.metrics.server, asked)
        try:
            # The running one answers meanwhile.
            self._wait(lambda: service.worker.is_warm or service.worker.error)
            if service.worker.error is not None:
                raise service.worker.error
            self._models.replace(service)
            self._wait(lambda: self._models.services[running.name] is service)
        except BaseException:
            service.close()
            # A process does not end well while a thread is in the compiler.
            for each in (service.worker, service.worker.compiler):
                each.join()
            raise

    def _wait(self, is_done: Callable[[], Any]) -> None:
        while not is_done():
            if self._is_closed:
                raise _ServerStopsError
            time.sleep(_LOOK_S)
