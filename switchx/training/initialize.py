# SPDX-License-Identifier: Apache-2.0
"""Parameters of a new run from an earlier one, by rules, and the optimizer state if asked.

The rules are those of T5X's `assignment_map` (Roberts et al. 2022, arXiv:2203.17189): ordered
pairs of a regular expression, which has to match a parameter's whole path, and a replacement,
which names the path in the source, groups of the expression (`\\1`) filled in. The first that
matches decides; None draws the parameter afresh; without a match it comes from its own path.
A parameter of the source that nothing takes is refused, unless a rule decides for its path or
`drop` names it. Everything is compared before anything is read or computed.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

import jax

from switchx.checkpoint.adapter_run import require_merged
from switchx.checkpoint.items import read_leaves, require_same_leaves, stored_items
from switchx.checkpoint.restore import (
    checkpoint_paths,
    choose_step,
    restore_items,
    stored_model,
)
from switchx.checkpoint.run_folder import (
    RunFolder,
    read_decoding,
    read_model_config,
    read_rescaled,
)
from switchx.fields import require
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params, init_params
from switchx.optim.protocol import NEW_AT_OLD_COUNT
from switchx.partitioning.rules import param_sharding
from switchx.training.job import InitConfig, TrainingJob
from switchx.training.program import TrainingProgram
from switchx.training.resume import require_vocabulary_of
from switchx.training.step import TrainState, init_key
from switchx.tree import Tree, named_leaves, nested


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The source of each parameter of a new run.

    Attributes:
        sources: path in the source, by path of the new run's parameter; None for drawn ones.
        dropped: paths of the source that no parameter takes.
    """

    sources: dict[str, str | None]
    dropped: tuple[str, ...]

    def changes(self) -> list[str]:
        """A line for each parameter that is not taken from its own path."""
        lines = [
            f"{name}: drawn afresh" if source is None else f"{name}: from {source}"
            for name, source in self.sources.items()
            if source != name
        ]
        return lines + [f"{name}: dropped" for name in self.dropped]


def assign(init: InitConfig, names: Collection[str], sources: Collection[str]) -> Assignment:
    """The source, out of `sources`, of every parameter in `names`.

    Raises:
        ValueError: a rule or a pattern of `drop` matches nothing, or a rule's replacement is no
            path of the source (similar ones are named).
    """
    found: dict[str, str | None] = {}
    replaced = []
    unused = [pattern for pattern, _ in init.rules]
    for name in names:
        found[name] = name
        for pattern, replacement in init.rules:
            match = re.fullmatch(pattern, name)
            if match is None:
                continue
            if pattern in unused:
                unused.remove(pattern)
            found[name] = source = None if replacement is None else match.expand(replacement)
            require(
                source is None or source in sources,
                f"InitConfig.rules: ({pattern!r}, {replacement!r}) takes {name} from {source}, "
                f"which the source does not have; like it are {_like(source, sources)}",
            )
            replaced.append(name)
            break
    require(
        not unused,
        f"InitConfig.rules: {', '.join(map(repr, unused))} decides for no parameter: each has "
        "to match a whole path, and no earlier rule may match all that it does; paths like it "
        f"are {'; '.join(_like(each, names) for each in unused)}",
    )
    taken = set(found.values())
    dropped = [name for name in sources if name in replaced and name not in taken]
    for pattern in init.drop:
        left = [name for name in sources if name not in (*taken, *dropped)]
        matched = [name for name in left if re.fullmatch(pattern, name)]
        require(
            bool(matched),
            f"InitConfig.drop: {pattern!r} matches no path of the source that is left over; "
            f"left over are {', '.join(left) or 'none'}",
        )
        dropped += matched
    return Assignment(found, tuple(dropped))


class Source:
    """The checkpoint that a new run starts from; everything wrong with it is reported at once.

    Attributes:
        step: the checkpoint's step.
        assignment: the source of each of the new run's parameters.
        notes: sentences for the user.
    """

    def __init__(self, job: TrainingJob, program: TrainingProgram):
        """Compares names and shapes; reads no array.

        Raises:
            ValueError: `job.init_from` is no run, has another vocabulary, or lacks the step
                (its steps are named); rules match nothing; parameters or the optimizer's
                arrays are missing, left over, or of another shape or dtype (all are
                listed).
        """
        folder = _checked_folder(job)
        self.step = _step(folder, job.init.step)
        self._job, self._program, self._folder = job, program, folder
        self._path = folder.checkpoints / str(self.step)
        self._model = _in_layout_of(job.model, read_model_config(folder))
        stored = stored_items(self._path)
        self._is_same_layout = stored_model(self._path, self._model) == self._model
        params = stored["params"] if self._is_same_layout else abstract_params(self._model)
        self._stored = named_leaves(params)
        self._targets = named_leaves(program.abstract_params)
        self.assignment = assign(job.init, self._targets, self._stored)
        self._require_fit(self._targets, self._stored, self.assignment)
        if job.init.optimizer:
            self._check_optimizer(named_leaves(stored.get("train_state", {})))

    def _require_fit(self, targets: Mapping, stored: Mapping, assignment: Assignment) -> None:
        expected, got = {}, {}
        for name, source in assignment.sources.items():
            if source is not None:
                key = name if source == name else f"{name} (from {source})"
                expected[f"params/{key}"] = targets[name]
                if source in stored:
                    got[f"params/{key}"] = stored[source]
        left = stored.keys() - set(assignment.sources.values()) - set(assignment.dropped)
        got |= {f"params/{name}": stored[name] for name in left}
        require_same_leaves(expected, got, f"checkpoint {self._path}")

    def _check_optimizer(self, stored: Mapping[str, Any]) -> None:
        job, begin = self._job, "InitConfig.optimizer=True"
        require(
            any(name.startswith("opt_state") for name in stored),
            f"{begin}, but {self._path} has parameters alone; use a checkpoint of training, or "
            "a fresh optimizer",
        )
        require(
            self._is_same_layout,
            f"{begin}, but the layers of {self._path} are "
            f"{'unrolled' if job.model.scan_layers else 'scanned'} and this job's are not; use "
            f"ModelConfig.scan_layers={not job.model.scan_layers}, or a fresh optimizer",
        )
        targets = named_leaves({"opt_state": self._program.abstract_state.opt_state})
        self._statistics = {}
        for name in targets:
            source = self._statistic_source(name)
            if source is not None:
                self._statistics[name] = source
        expected = {n: targets[n] for n in self._statistics}
        got = {n: stored[s] for n, s in self._statistics.items() if s in stored}
        require_same_leaves(expected, got, f"the optimizer of checkpoint {self._path}")

    def _statistic_source(self, name: str) -> str | None:
        """The source of an optimizer's array, by the source of its parameter."""
        parts = name.split("/")
        for i in range(len(parts)):
            for j in range(len(parts), i, -1):
                path = "/".join(parts[i:j])
                if path in self.assignment.sources:
                    source = self.assignment.sources[path]
                    return (
                        None if source is None else "/".join([*parts[:i], source, *parts[j:]])
                    )
        return name

    @property
    def notes(self) -> tuple[str, ...]:
        taken = [name for name, source in self.assignment.sources.items() if source is not None]
        state = "optimizer as there, step" if self._job.init.optimizer else "optimizer and step"
        if self._job.init.optimizer and len(taken) < len(self.assignment.sources):
            state = (
                f"optimizer as there, new for what is drawn afresh ({NEW_AT_OLD_COUNT}), step"
            )
        size = sum(self._targets[n].size * self._targets[n].dtype.itemsize for n in taken)
        return (
            f"restored {len(taken)} parameter arrays, {size} bytes, from {self._path}; {state} "
            f"{'is' if self._job.init.optimizer else 'are'} fresh",
            *self.assignment.changes(),
        )

    @property
    def listing(self) -> str:
        """JSON that says what came from where."""
        content = {"checkpoint": str(self._path), "optimizer": self._job.init.optimizer}
        content |= {"parameters": self.assignment.sources, "dropped": self.assignment.dropped}
        if decoding := read_decoding(self._folder):
            content["decoding"] = decoding
        if rescaled := read_rescaled(self._folder):
            content["rescaled"] = rescaled
        return json.dumps(content, indent=2) + "\n"

    def state(self) -> TrainState:
        """The state at step 0, every device reading its part."""
        state = self._program.init_state(self.params())
        if not self._job.init.optimizer:
            return state
        targets = named_leaves({"opt_state": self._program.abstract_state.opt_state})
        leaves = named_leaves({"opt_state": state.opt_state})
        for name in self._statistics:
            leaves[name].delete()
        wanted = {n: (f"train_state/{s}", targets[n]) for n, s in self._statistics.items()}
        leaves |= self._read(wanted)
        structure = jax.tree.structure(state.opt_state)
        return dataclasses.replace(
            state, opt_state=jax.tree.unflatten(structure, list(leaves.values()))
        )

    def params(self) -> Tree:
        """The parameters at step 0, every device reading its part."""
        wanted = {
            name: (f"params/{source}", self._targets[name])
            for name, source in self.assignment.sources.items()
            if source is not None
        }
        is_whole = {source for source, _ in wanted.values()} == {
            f"params/{name}" for name in self._stored
        }
        if self._is_same_layout and not (is_whole and len(wanted) == len(self._stored)):
            leaves = self._read(wanted)
        else:
            leaves = self._read_all(wanted)
        fresh = [name for name in self._targets if name not in leaves]
        return nested(leaves | self._drawn(fresh))

    def _read(self, wanted: dict[str, tuple[str, Any]]) -> dict[str, jax.Array]:
        """Arrays by the new run's names; one that several names take is read for each."""
        leaves, left = {}, dict(wanted)
        while left:
            names = {source: name for name, (source, _) in reversed(left.items())}
            targets = {source: left[name][1] for source, name in names.items()}
            read = read_leaves(self._path, targets)
            leaves |= {name: read[source] for source, name in names.items()}
            left = {name: each for name, each in left.items() if name not in leaves}
        return {name: leaves[name] for name in wanted}

    def _read_all(self, wanted: dict[str, tuple[str, Any]]) -> dict[str, jax.Array]:
        """The same arrays as `_read`, read whole, if layers have to be unstacked or stacked."""
        rules, mesh = self._job.mesh.rules, self._program.mesh
        targets = {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=param_sharding(rules, mesh, name, leaf)
            )
            for name, leaf in self._stored.items()
        }
        first: dict[str, str] = {}
        for name, (source, target) in wanted.items():
            source = source.removeprefix("params/")
            if first.setdefault(source, name) == name:
                targets[source] = target
        read = named_leaves(
            restore_items(self._path, {"params": nested(targets)}, self._model)["params"]
        )
        leaves = {}
        for name, (source, target) in wanted.items():
            array = read[source.removeprefix("params/")]
            is_first = first[source.removeprefix("params/")] == name
            leaves[name] = array if is_first else jax.device_put(array.copy(), target.sharding)
        return leaves

    def _drawn(self, names: list[str]) -> dict[str, jax.Array]:
        """Parameters as drawn by a run without a source; one at a time is on the devices."""
        model, key = self._job.model, init_key(self._job.seed)
        rules, mesh, drawn = self._job.mesh.rules, self._program.mesh, {}
        for name in names:  # XLA leaves out what is not asked for
            target = self._targets[name]
            draw = jax.jit(
                lambda name=name: named_leaves(init_params(model, key))[name],
                out_shardings=param_sharding(rules, mesh, name, target),
            )
            drawn[name] = jax.device_put(draw(), target.sharding)
        return drawn


def _like(name: str | None, names: Collection[str]) -> str:
    return ", ".join(difflib.get_close_matches(name or "", names, n=5, cutoff=0.0))


def _checked_folder(job: TrainingJob) -> RunFolder:
    source = RunFolder(job.init_from)
    require_merged(source, "init_from")
    require_vocabulary_of(source, job, "init_from")
    return source


def _step(folder: RunFolder, step: int | Literal["best"] | None) -> int:
    steps = [int(path.name) for path in checkpoint_paths(folder.checkpoints)]
    if isinstance(step, int) and steps:
        require(
            step in steps,
            f"InitConfig.step={step} is not in {folder.checkpoints}; use one of "
            f"{', '.join(map(str, sorted(steps)))}, 'best', or None for the newest",
        )
    return choose_step(folder, step)


def _in_layout_of(model: ModelConfig, source: ModelConfig) -> ModelConfig:
    """The source's model with its layers scanned or unrolled like the new one's, if they can
    be scanned."""
    if not source.can_be_scanned:
        return source
    return dataclasses.replace(source, scan_layers=model.scan_layers)
