# SPDX-License-Identifier: Apache-2.0
"""The six steps from a run to a folder to be served, each from the folder of the one before.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 3.1, Figure 3:

    1_fuse      graph fusion: one unsharded model from a run's checkpoint, no optimizer
    2_reduce    compression: fewer experts, dropped or merged, and their routers; taught by a
                teacher, if there is one
    3_convert   graph conversion: layers unrolled, the dtype of inference, an artifact
    4_segment   graph segmentation: programs split over devices, with their collectives
    5_optimize  optimization: quantized experts, programs with the kernels of the platform
    6_deploy    deployment: the folder that `run.py` and `switchx serve` read

The first two are run folders of one checkpoint, so a reduced model can be trained further. From
the third on, tokens are compared with those of the same weights in this process, on one device.
"""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from switchx import api, tree
from switchx.api import Model
from switchx.checkpoint.run_folder import (
    RunFolder,
    read_config,
    read_rescaled,
    write_converted,
)
from switchx.compiled.collectives import collectives_by_kind
from switchx.data.tokenizers import TokenIdVocabulary
from switchx.deploy.checked_plan import DeployPlan
from switchx.deploy.compiled import compile_programs, slice_for
from switchx.deploy.distill import distilled
from switchx.deploy.folders import MANIFEST, FinishedStep, Step, run_steps
from switchx.deploy.measure import (
    ValidationText,
    sample_layers,
    tokens_differing,
    validation_loss,
    written_by,
    written_by_export,
)
from switchx.fields import describe, require
from switchx.gin_config.writing import model_gin
from switchx.inference.artifact import describe_artifact, write_artifact
from switchx.inference.export import Shapes, Target, export_model
from switchx.inference.quantize import model_bytes, native, quantize_experts
from switchx.inference.run_exported import ExportedModel
from switchx.models.config import ModelConfig
from switchx.models.reshape import drop_experts, merge_experts
from switchx.models.unroll import unrolled
from switchx.training.job import TrainingJob
from switchx.whole_folders import git_commit, num_bytes

REDUCTIONS = {"merge": merge_experts, "drop": drop_experts}


class Deployment:
    """Makes the folder of a plan."""

    def __init__(
        self,
        plan: DeployPlan,
        text: Callable[[], ValidationText],
        described: Any,
        rebuild: str,
        job: TrainingJob | None = None,
    ):
        """Prepares the steps; makes nothing yet.

        Args:
            text: function that reads the validation text; called once, when a step needs it.
            described: origin of that text, JSON; if it changes, all steps run again.
            rebuild: the command, for the deployed model's messages.
            job: the job that trained the run; a teacher needs it.

        Raises:
            ValueError: there is a teacher and no job.
        """
        require(
            plan.teacher is None or job is not None,
            f"teacher={plan.settings.teacher!r} without a job: its student is trained on the "
            "run's own task; give the TrainingJob",
        )
        self.plan = plan
        self.described = described
        self.rebuild = rebuild
        self.job = job
        self._text = functools.cache(text)
        self._note: Callable[[str], None] = lambda line: None

    def run(
        self, output: str | os.PathLike, note: Callable[[str], None] = lambda text: None
    ) -> list[FinishedStep]:
        """Makes what is missing in the folder; see `folders.run_steps`."""
        self._note = note
        return run_steps(output, self.plan.source, self._steps(), note)

    def _steps(self) -> list[Step]:
        settings, plan = self.plan.settings, self.plan
        mesh = plan.split.sizes if settings.devices > 1 else {}
        # As it will be read back, with lists for tuples.
        decoding = json.loads(json.dumps(dataclasses.asdict(plan.decoding)))
        shapes = {"batch_size": settings.batch_size, "input_length": settings.input_length}
        how = None if settings.experts is None else settings.reduce
        target = {"platform": settings.platform, "device_kind": settings.device_kind}
        target |= {"ring_slots": self._ring_slots}
        return [
            Step("fuse", {"checkpoint": self.plan.step, "text": self.described}, self._fuse),
            Step(
                "reduce",
                {"experts": settings.experts, "how": how} | self._taught(),
                self._reduce,
            ),
            Step(
                "convert",
                {"dtype": settings.dtype, "decoding": decoding} | shapes,
                self._convert,
            ),
            Step("segment", {"mesh": mesh}, self._segment),
            Step("optimize", {"bits": settings.bits} | target, self._optimize),
            Step("deploy", {}, self._deploy),
        ]

    def _taught(self) -> dict[str, Any]:
        """The settings of the reduced model's training; empty without a teacher."""
        if self.plan.teacher is None:
            return {}
        return {
            "teacher": self.plan.teacher.fingerprint,
            "distill_steps": self.plan.settings.distill_steps,
            "job": describe(self.job),
        }

    @property
    def _ring_slots(self) -> int | None:
        return None if self.plan.ring is None else self.plan.ring.slots

    # The steps.

    def _fuse(self, made: dict[str, FinishedStep], folder: pathlib.Path) -> dict[str, Any]:
        model = api.load(self.plan.run_folder.path, self.plan.step)
        self._write_run(folder, model, model.config, model.params)
        return self._measured(folder, api.load(folder))

    def _reduce(self, made: dict[str, FinishedStep], folder: pathlib.Path) -> dict[str, Any]:
        model, settings = api.load(made["fuse"].path), self.plan.settings
        config, params = model.config, model.params
        if settings.experts is not None:
            samples = sample_layers(model, self._text())
            reduction = REDUCTIONS[settings.reduce]
            config, params, _ = reduction(config, params, samples, settings.experts)
        taught = {}
        if self.plan.teacher is not None:
            untaught = dataclasses.replace(model, config=config, params=params)
            taught["untaught_loss"] = validation_loss(untaught, self._text())
            params = self._distilled(folder, model, config, params)
        self._write_run(folder, model, config, params)
        return self._measured(folder, api.load(folder)) | taught

    def _distilled(self, folder: pathlib.Path, model: Model, config, params):
        """Trains in a folder that is removed at the end, or with the step's folder."""
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            start = pathlib.Path(scratch, "start")
            start.mkdir()
            self._write_run(start, model, config, params)
            return distilled(
                self.plan.teacher,
                self.job,
                config,
                start,
                pathlib.Path(scratch, "run"),
                self.plan.settings.distill_steps,
                self._note,
            )

    def _convert(self, made: dict[str, FinishedStep], folder: pathlib.Path) -> dict[str, Any]:
        model = api.load(made["reduce"].path)
        config, params = _converted(model.config, model.params, self.plan.settings.dtype)
        if self.plan.settings.dtype is not None:
            model = dataclasses.replace(model, config=config, params=params)
        expected = written_by(model, self._text(), self.plan.decoding).tokens
        provenance = self._about(model, bits=None)
        write_artifact(folder, config, params, provenance, model.save_vocabulary)
        return self._measured(folder, api.load(folder), expected)

    def _segment(self, made: dict[str, FinishedStep], folder: pathlib.Path) -> dict[str, Any]:
        model = api.load(made["convert"].path)
        expected = made["convert"].measured["expected"]
        here = Target(_platform_here(), mesh=self.plan.mesh)
        self._export(folder, model, model.config, model.params, [here], model.save_vocabulary)
        measured = self._measured_export(folder, expected)
        measured["validation_loss"] = validation_loss(model, self._text())
        measured["collectives"] = {}
        if self.plan.mesh is not None:
            text = ExportedModel(folder).lowered_step().compile().as_text()
            executed = collectives_by_kind(text)
            measured["collectives"] = {kind: count for kind, (count, _) in executed.items()}
        return measured

    def _optimize(self, made: dict[str, FinishedStep], folder: pathlib.Path) -> dict[str, Any]:
        settings, model = self.plan.settings, api.load(made["convert"].path)
        config, params = model.config, model.params
        if settings.bits is not None:
            config, params, *_ = quantize_experts(config, params, bits=settings.bits)
        ready = native(params, in_order=config.precision.compute == "float32")
        in_use = dataclasses.replace(model, config=config, params=ready)
        expected = written_by(in_use, self._text(), self.plan.decoding).tokens
        targets = {
            settings.platform: Target(settings.platform, settings.device_kind, self.plan.mesh)
        }
        here = _platform_here()
        targets.setdefault(here, Target(here, mesh=self.plan.mesh))

        def add_files(partial: pathlib.Path) -> None:
            model.save_vocabulary(partial)
            describe_artifact(partial, config, params, self._about(model, settings.bits))

        ring_slots = self._ring_slots
        self._export(
            folder, model, config, params, list(targets.values()), add_files, ring_slots
        )
        measured = self._measured_export(folder, expected)
        measured["validation_loss"] = validation_loss(in_use, self._text())
        measured["compiled"] = self._compiled(folder, targets[settings.platform])
        # What does not fit was refused before the first step.
        where = "resident" if ring_slots is None else f"a ring of {ring_slots} slots"
        return measured | {"experts_are": where, "because": self.plan.because}

    def _deploy(self, made: dict[str, FinishedStep], folder: pathlib.Path) -> dict[str, Any]:
        optimized = made["optimize"]
        for path in optimized.path.iterdir():
            if path.name != MANIFEST:
                _link(path, folder / path.name)
        expected = optimized.measured["expected"]
        measured = self._measured_export(folder, expected)
        served = api.load(folder)
        found = written_by(served, self._text(), self.plan.decoding).tokens
        measured["tokens_differing"] += tokens_differing(found, expected)
        measured["validation_loss"] = validation_loss(served, self._text())
        return measured

    # What the steps write and measure.

    def _write_run(self, folder: pathlib.Path, model: Model, config, params) -> None:
        vocabulary = model.vocabulary or TokenIdVocabulary(config.vocab_size)
        origin = f"switchx deploy: {self.plan.source['model_dir']}, checkpoint {self.plan.step}"
        source = read_config(self.plan.run_folder).get("source")
        run = RunFolder(folder)
        carried = (vocabulary, origin, source, model.decoding)
        rescaled = read_rescaled(self.plan.run_folder)
        write_converted(run, config, params, *carried, rescaled=rescaled)
        run.model_gin.write_text(model_gin(config), encoding="utf-8")

    def _export(
        self,
        folder: pathlib.Path,
        model: Model,
        config,
        params,
        targets,
        add_files,
        ring_slots: int | None = None,
    ) -> None:
        shapes = Shapes(self.plan.settings.batch_size, self.plan.settings.input_length)
        provenance = self._about(model, self.plan.settings.bits) | {
            "rebuild": self.rebuild,
            "fingerprint": model.fingerprint,
        }
        export_model(
            folder,
            config,
            params,
            self.plan.decoding,
            shapes,
            targets,
            provenance,
            add_files,
            ring_slots=ring_slots,
        )

    def _compiled(self, folder: pathlib.Path, target: Target) -> dict[str, Any] | None:
        """The programs' memory on the platform, if its compiler is installed; None
        otherwise.

        Programs for this machine were compiled to be run.
        """
        topology = slice_for(target.kind, self.plan.settings.devices)
        if target.platform == _platform_here() or topology is None:
            return None
        found = compile_programs(folder, target.platform, topology)
        return None if found is None else {"topology": str(topology)} | found

    def _about(self, model: Model, bits: int | None) -> dict[str, Any]:
        return {
            "source": self.plan.source["model_dir"],
            "source_fingerprint": self.plan.source["fingerprint"],
            "step": self.plan.step,
            "bits": bits,
            "text_format": dataclasses.asdict(model.text_format),
            "decoding": model.decoding,
            "versions": {"switchx": git_commit(), "jax": jax.__version__},
        }

    def _measured(self, folder: pathlib.Path, model: Model, expected=None) -> dict[str, Any]:
        """Measures a model that was read back, on one device."""
        written = written_by(model, self._text(), self.plan.decoding)
        loss = validation_loss(model, self._text())
        measured = {"bytes_of_weights": model_bytes(model.params), "validation_loss": loss}
        return self._compared(folder, model.config, written, expected) | measured

    def _measured_export(self, folder: pathlib.Path, expected) -> dict[str, Any]:
        """Measures exported programs, on the devices for which they were made."""
        written = written_by_export(ExportedModel(folder), self._text())
        size = (folder / "weights.safetensors").stat().st_size
        measured = {"bytes_of_weights": size, "mesh": self.plan.split.name}
        return self._compared(folder, self.plan.reduced, written, expected) | measured

    def _compared(self, folder, config: ModelConfig, written, expected) -> dict[str, Any]:
        switch = config.switch
        differing = None if expected is None else tokens_differing(written.tokens, expected)
        return {
            "experts": None if switch is None else switch.num_experts,
            "bytes_of_files": num_bytes(folder),
            "tokens_per_s": written.tokens_per_s,
            "tokens_differing": differing,
            "expected": expected,
        }


def _converted(config: ModelConfig, params: dict, dtype: str | None):
    """The model with layers unrolled, and everything except routers in the dtype."""
    config, params = unrolled(config, params)
    if dtype is None:
        return config, params

    def convert(name, leaf):
        return leaf if "router" in name else jnp.asarray(leaf).astype(dtype)

    precision = dataclasses.replace(config.precision, params=dtype, compute=dtype)
    config = dataclasses.replace(config, precision=precision)
    return config, tree.map_named(convert, params)


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    """Links a file to another name, or copies it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _platform_here() -> str:
    """The platform's name in `jax.export`."""
    name = jax.default_backend()
    return {"gpu": "cuda"}.get(name, name)
