# SPDX-License-Identifier: Apache-2.0
"""What to make of a run, checked against its model and the devices beforehand.

Shen et al. 2022 (SE-MoE, arXiv:2205.10034), section 3.1: the resources determine how the model
is split over devices.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Literal

import jax

from switchx.checkpoint.restore import checkpoint_fingerprint, choose_step
from switchx.checkpoint.run_folder import RunFolder, read_config, read_model_config
from switchx.data.tasks import TextFormat
from switchx.data.tokenizers import TokenIdVocabulary
from switchx.data.vocabularies import DESCRIPTION_FILE, load_vocabulary
from switchx.deploy.distill import CheckedTeacher
from switchx.fields import check_choices, require, require_above_zero, require_at_least
from switchx.hardware.spec import Hardware, hardware_of
from switchx.inference.artifact import is_artifact
from switchx.inference.config import DecodingConfig
from switchx.inference.export import DEVICE_KINDS, Target
from switchx.inference.generate import for_decoding, positions_needed
from switchx.inference.offload.copy_times import most_slots, streaming
from switchx.inference.texts import decoding_ids
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from switchx.models.reshape import reduced_config
from switchx.partitioning.mesh import MeshSpec
from switchx.planner.serving import (
    Ring,
    ServedModel,
    Split,
    choose_ring,
    choose_split,
    splits,
    weights_of,
)

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class DeploySettings:
    """Settings of a deployment.

    Attributes:
        platform: one of `DEVICE_KINDS`; programs for this machine are also made.
        experts: number of experts to keep in each Switch layer; None keeps all.
        reduce: `merge` merges similar experts, `drop` drops those of the lowest REAP score.
        teacher: run folder of the model that teaches the one with fewer experts; None trains
            nothing.
        distill_steps: number of steps of this training.
        dtype: dtype of parameters and of computation, except the routers'; None keeps both.
        devices, memory_gib: number of devices, and memory of each for the model in GiB; None is
            no limit.
        mesh: sizes of the mesh's axes, instead of the planner's; their product is `devices`.
        bits: bits of each expert weight, 4 or 8; None does not quantize.
        device_kind: kind of the device, as JAX names it; None is the kind in `DEVICE_KINDS`.
        batch_size, input_length: sizes for which the programs are compiled.
    """

    platform: str
    experts: int | None = None
    reduce: Literal["merge", "drop"] = "merge"
    teacher: str | None = None
    distill_steps: int | None = None
    dtype: Literal["bfloat16", "float32"] | None = None
    devices: int = 1
    memory_gib: float | None = None
    mesh: Mapping[str, int] | None = None
    bits: Literal[4, 8] | None = None
    device_kind: str | None = None
    batch_size: int = 8
    input_length: int = 64
    decoding: DecodingConfig = DecodingConfig()

    def __post_init__(self):
        check_choices(self)
        require_at_least(self, 1, "devices", "batch_size", "input_length", "distill_steps")
        require_above_zero(self, "memory_gib")
        for name, value, choices in (
            ("platform", self.platform, tuple(DEVICE_KINDS)),
            ("dtype", self.dtype, (None, "bfloat16", "float32")),
            ("bits", self.bits, (None, 4, 8)),
        ):
            require(value in choices, f"{name}={value!r}; use {', '.join(map(str, choices))}")
        require(
            (self.teacher is None) == (self.distill_steps is None),
            f"--teacher={self.teacher} with --distill_steps={self.distill_steps}; give both, "
            "or neither",
        )
        require(
            self.teacher is None or self.experts is not None,
            f"--teacher={self.teacher} without --experts: a model of fewer experts is taught; "
            "give --experts, or leave the teacher out",
        )
        Target(self.platform, self.device_kind)  # refuses a kind that the platform has not


class DeployPlan:
    """A checked plan of a deployment.

    Attributes:
        run_folder, step: folder of the run, and step of its checkpoint.
        source: description of the model, for the deployment's log.
        reduced: configuration of the deployed model, before its experts are quantized.
        teacher: teacher of the settings, checked; None if there is none.
        split: split of the model over the devices, by the planner.
        ring: ring of the deployed programs; None keeps all experts on the device.
        because: reason for where the experts are placed.
        decoding: decoding settings, with the form that prompts had in training.
    """

    def __init__(
        self, model_dir: str | os.PathLike, step: int | str | None, settings: DeploySettings
    ):
        """Reads the configuration and the checkpoint's bytes; writes nothing.

        Args:
            step: step of the checkpoint; None is the newest complete one.

        Raises:
            ValueError: there is no run or no complete checkpoint, the model cannot decode,
                settings do not suit it, memory is too small, or the devices differ from those
                of this machine.
        """
        require(
            not is_artifact(model_dir),
            f"{model_dir} is made for inference already; give the run folder it was made from",
        )
        self.run_folder, self.settings = RunFolder(model_dir), settings
        self.config = read_model_config(self.run_folder)
        self.reduced = self._reduced()
        self._check_lengths()
        self.teacher = (
            None
            if settings.teacher is None
            else CheckedTeacher.of(settings.teacher, self.reduced, self.run_folder)
        )
        self.split, self.ring, self.because = self._placed()
        self._require_devices()
        self.step = choose_step(self.run_folder, step)
        root = self.run_folder.root
        has_vocabulary = (root / DESCRIPTION_FILE).exists()
        vocabulary = load_vocabulary(root) if has_vocabulary else None
        self.source = {
            "model_dir": str(self.run_folder.where),
            "checkpoint": self.step,
            "fingerprint": checkpoint_fingerprint(self.run_folder, self.step, vocabulary),
        }
        text_format = TextFormat.of_training(
            read_config(self.run_folder).get("source"),
            is_encoder_decoder=self.config.is_encoder_decoder,
        )
        self.decoding = dataclasses.replace(
            settings.decoding,
            pruning="experts",
            is_prompt_bidirectional=text_format.is_prompt_bidirectional,
            **decoding_ids(vocabulary or TokenIdVocabulary(self.config.vocab_size)),
        )

    @property
    def mesh(self) -> MeshSpec | None:
        """The split's mesh; None is one device."""
        if self.settings.devices == 1:
            return None
        return MeshSpec(**({"data": 1} | self.split.sizes))

    def _reduced(self) -> ModelConfig:
        settings, config = self.settings, self.config
        tasks = 1 if config.switch is None else config.switch.router.num_tasks
        require(
            tasks == 1,
            f"the experts of {self.run_folder.root} are divided among {tasks} tasks, and one "
            "model is deployed; make that of a task by `switchx export --task=NAME`, or by "
            "`switchx quantize --task=NAME` for `switchx serve`",
        )
        for_decoding(config)
        if settings.experts is not None:
            is_merged = settings.reduce == "merge"
            config = reduced_config(config, settings.experts, is_merged=is_merged)
        require(
            settings.bits is None or config.switch is not None,
            f"bits={settings.bits} of a dense model, which has no experts to quantize; leave "
            "it out",
        )
        precision = config.precision
        if settings.dtype is not None:
            precision = dataclasses.replace(
                precision, params=settings.dtype, compute=settings.dtype
            )
        return dataclasses.replace(config, precision=precision, scan_layers=False)

    def _check_lengths(self) -> None:
        settings, config = self.settings, self.config
        new = settings.decoding.max_new_tokens
        needed = positions_needed(config, settings.input_length, new)
        require(
            needed is None or needed <= config.max_length,
            f"input_length={settings.input_length} and max_new_tokens={new} need {needed} "
            f"positions, the model has {config.max_length}; use less",
        )

    def _placed(self) -> tuple[Split, Ring | None, str]:
        """The split; the ring, if one device has no room for all experts; and the reason."""
        settings = self.settings
        served = ServedModel(
            self.reduced,
            weights_of(abstract_params(self.reduced), settings.bits),
            settings.batch_size,
            settings.input_length,
            settings.decoding.max_new_tokens,
            settings.decoding.beam_size,
        )
        memory = None if settings.memory_gib is None else settings.memory_gib * GIB
        devices, hardware = settings.devices, self._hardware()
        if devices == 1 and memory is not None and most_slots(self.reduced) >= 2:
            (whole,) = splits(served, 1, hardware)
            if whole.total > memory:
                ring = choose_ring(served, memory)
                return whole, ring, _why_ring(served, whole, ring, memory, hardware)
        split = choose_split(served, devices, memory, hardware, settings.mesh)
        if memory is None:
            return split, None, "without --memory all are taken to fit"
        needed = f"{split.total / GIB:,.3g} of {settings.memory_gib:,.3g} GiB a device"
        return split, None, f"all fit: {needed}"

    def _hardware(self) -> Hardware | None:
        with contextlib.suppress(ValueError):  # there may be no spec, as for CPUs
            target = Target(self.settings.platform, self.settings.device_kind)
            return hardware_of(target.kind)
        return None

    def _require_devices(self) -> None:
        """Requires the devices for which programs are made: they are run here once."""
        wanted, here = self.settings.devices, jax.devices()
        require(
            wanted in (1, len(here)),
            f"devices={wanted}, but there are {len(here)} ({here[0].platform}), and the split "
            "programs are run here once: do it where there are as many, or with "
            f"JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count={wanted}",
        )


def _why_ring(
    served: ServedModel, whole: Split, ring: Ring, memory: float, hardware: Hardware | None
) -> str:
    """The reason for a ring of this number of slots, and whether its copies are hidden."""
    why = (
        f"resident, {whole.total / GIB:,.3g} of {memory / GIB:,.3g} GiB are needed, with "
        f"{ring.slots} slots {ring.total / GIB:,.3g}"
    )
    if hardware is None or hardware.host is None:
        return f"{why}; no spec of the device says whether copies hide"
    config, B = served.config, served.batch_size
    reads = "encoder" if config.is_encoder_decoder else "decoder"
    calls = [(reads, B * served.input_length), ("decoder", B * served.num_beams)]
    for stack, tokens in calls:
        if stack not in ring.streamed:
            continue
        size = ring.layer_bytes / config.switch.num_experts
        call = streaming(config, hardware, stack, tokens, size)
        copies_s = ring.streamed[stack] * ring.layer_bytes / call.link_bytes_per_s
        has = "hide a copy" if call.mode == "ring" else "do not"
        why += (
            f"; {stack}, {tokens:,} tokens: {call.tokens_per_expert:,.2f} an expert {has} "
            f"(from {call.least_tokens:,.0f} on), {1e3 * copies_s:,.3g} ms of copies, "
            f"{1e3 * call.compute_s:,.3g} ms of computing"
        )
    return why
