# SPDX-License-Identifier: Apache-2.0
"""A job's whole training step, compiled for devices that are not present, and what it takes.

Forward, backward and the optimizer are one program; no parameter is allocated. Memory is as the
compiler itself reports it, collectives are read off the compiled text. The devices are those of
`devices.py`.

Dims: B batch, L length
"""

import dataclasses
import functools
import math
import re
import time

import jax
from jax.sharding import NamedSharding

from pallas_kernels.aot import gpu_compiler
from switchx.compiled.collectives import collectives_by_kind, overlapped_exchanges
from switchx.compiled.computed_rows import executed_slots
from switchx.compiled.devices import described
from switchx.compiled.flops import has_uncounted_products, matrix_flops
from switchx.compiled.hlo import NO_SHARES
from switchx.compiled.host_copies import host_copies, noted_strides, share_overlapped
from switchx.compiled.workload import require_all_trained, state_arrays
from switchx.data.loader import with_task_ids
from switchx.data.mixtures import as_mixture
from switchx.fields import require
from switchx.models.config import ModelConfig
from switchx.models.flops import experts_per_token
from switchx.models.params import abstract_params, forward
from switchx.moe.config import DISPATCHERS
from switchx.moe.experts import BLOCKS
from switchx.moe.replay import unset_choices
from switchx.partitioning.mesh import HOST, platform_of
from switchx.pipeline.ticks import branch_shares
from switchx.training.distillation.written_teacher import student_program
from switchx.training.job import TrainingJob
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.program import TrainingProgram
from switchx.training.programs import compiled_program
from switchx.tree import num_elements

_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# "Used 99.70G of 15.25G hbm", or "(2.00T) exceeds available HBM (15.25G)".
_SIZE = r"([\d.]+)([KMGT]?)"
_USED = re.compile(
    rf"Used {_SIZE} of {_SIZE} hbm|\({_SIZE}\) exceeds available HBM \({_SIZE}\)"
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
        arguments: bytes of parameters, optimizer state and batch, and of a teacher's
            parameters.
        temporaries: peak bytes of all intermediate arrays, and of the program.
        needed: all bytes together; results overwrite the arguments.
        limit: bytes that a program may use.
    """

    arguments: int
    temporaries: int
    needed: int
    limit: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.limit

    @property
    def excess(self) -> int:
        """The bytes that are missing; 0 if the step fits."""
        return max(0, self.needed - self.limit)


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Host memory that a step with experts in it needs, for one device.

    Attributes:
        formula: bytes of the experts' parameters, gradients and optimizer state.
        without: memory of the device if they were all on it.
        needed: bytes that the compiled program takes. This and the two below are None if
            nothing could be compiled.
        copies_overlapped: result of `host_copies.share_overlapped`.
        strides: result of `host_copies.noted_strides`.
    """

    formula: int
    without: Memory
    needed: int | None = None
    copies_overlapped: float | None = None
    strides: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A training step for a mesh of devices.

    Attributes:
        devices: number of devices that the program runs on.
        parameters: number of parameters among the program's arguments.
        tokens_per_batch: tokens of the encoder in a batch, as T5 counts them; in a decoder-only
            model, tokens of its rows.
        target_tokens_per_batch: tokens of the decoder of an encoder-decoder model; 0 in a
            decoder-only model.
        slots_per_token: expert slots computed over tokens routed; None in a dense model.
        flops: FLOPs of the matrix products on one device, with remat's recomputation. They and
            `collectives` are None if nothing could be compiled.
        collectives: number of times a step executes it and bytes on one device, by kind.
        seconds: seconds that compiling took.
        host: host memory that experts take; None if they are not in host memory.
        teacher_parameters: number of parameters of a teacher beside the student.
        overlapped_exchanges: number of all-to-alls that run beside the experts' products.
        batch_bytes: bytes of the batch among the arguments of one device.
        others: memory of the run's other programs, `evaluation` and `initialization`, with what
            stays on the device beside them; empty if they were not compiled.
    """

    devices: int
    parameters: int
    tokens_per_batch: int
    target_tokens_per_batch: int
    slots_per_token: float | None
    memory: Memory
    flops: int | None
    collectives: dict[str, tuple[int, int]] | None
    seconds: float
    host: HostMemory | None = None
    teacher_parameters: int = 0
    overlapped_exchanges: int | None = None
    batch_bytes: int = 0
    others: dict[str, Memory] = dataclasses.field(default_factory=dict)


def batch_shapes(program: TrainingProgram, num_rows: int | None = None) -> dict:
    """Shape structs of a batch, or of some of its rows, on the devices that read it."""
    one_row = with_task_ids(
        program.job.features.batch([[]]), [0] if as_mixture(program.job.source).rows else None
    )
    if (switch := program.job.model.switch) is not None and switch.router.replay:
        one_row |= unset_choices(program.job.model, one_row)
    return {
        name: jax.ShapeDtypeStruct(
            (num_rows or program.job.batch_size, *rows.shape[1:]),
            rows.dtype,
            sharding=program.batch_sharding,
        )
        for name, rows in one_row.items()
    }


def compile_step(
    job: TrainingJob, devices, hbm_bytes: int, *, with_others: bool = False
) -> CompiledStep:
    """Compiles a job's step ahead of time, for the devices of a target topology.

    Args:
        devices: devices as `jax.experimental.topologies` describes them.
        hbm_bytes: bytes that a program may use on one device, unless the compiler states
            another number.
        with_others: whether evaluation and initialization are compiled too, for a job without a
            teacher whose experts are on the devices.

    Raises:
        ValueError: the job does not suit its mesh, or the mesh does not suit the devices; or
            experts are on a disk, so that the step is not a single program.
    """
    mesh = job.mesh.build(devices)
    job.require_storage(dict(mesh.shape))
    require_all_trained(job)
    require(
        job.storage.experts != "disk",
        "StorageSpec.experts='disk': a step is a program for each period, and compile "
        "compiles one for all of it; use experts='host' or 'device', or "
        "`switchx plan --storage=disk`, which predicts memory and time",
    )
    is_described = job.storage.experts == "host" and devices[0].platform == "gpu"
    # Described devices of CUDA have no memories to place arrays in (`compile_lowered`).
    if job.distillation is None:
        program = compiled_program(job, described(mesh) if is_described else devices)
    else:
        program = student_program(job, devices)
    started = time.monotonic()
    batch = program.abstract_batch(batch_shapes(program))
    encoder, decoder = (job.batch_size * length for length in job.sequence_lengths)
    own = list(mesh.devices.flat) if is_described else None
    memory, text, on_host = _measure(program, batch, hbm_bytes, own)
    # A pipeline's conditionals are read from tables by the program.
    shares = branch_shares(program.pipeline) if job.mesh.pipe > 1 else NO_SHARES
    host = None
    if job.storage.experts == "host":
        resident = TrainingProgram(dataclasses.replace(job, storage=StorageSpec()), devices)
        without, *_ = _measure(resident, batch, hbm_bytes)
        host = HostMemory(expert_bytes(program), without)
        if text is not None:
            overlapped = share_overlapped(host_copies(text))
            strides = tuple(noted_strides(text))
            host = HostMemory(host.formula, without, on_host, overlapped, strides)
    flops = None
    if text is not None and not has_uncounted_products(text):
        flops = matrix_flops(text, shares=shares)
    seconds, others = time.monotonic() - started, {}
    if with_others and job.storage.experts == "device" and job.distillation is None:
        others = _other_programs(program, batch, hbm_bytes)
    return CompiledStep(
        devices=program.mesh.size,
        parameters=num_elements(program.abstract_state.params),
        tokens_per_batch=encoder or decoder,
        target_tokens_per_batch=decoder if encoder else 0,
        slots_per_token=slots_per_token(program),
        memory=memory,
        flops=flops,
        collectives=None if text is None else collectives_by_kind(text, shares),
        seconds=seconds,
        host=host,
        teacher_parameters=program.teacher_parameters,
        overlapped_exchanges=None if text is None else overlapped_exchanges(text, BLOCKS),
        batch_bytes=bytes_on_one_device(batch),
        others=others,
    )


def expert_bytes(program: TrainingProgram) -> int:
    """Bytes of one device's part of the experts' parameters, gradients and optimizer state."""
    rules, mesh = program.job.mesh.rules, program.mesh
    total = 0
    for array in state_arrays(program.job):
        if array.is_in_blocks and array.table == "expert_params":
            spec = rules.spec(array.dims, array.shape, mesh, table=array.table)
            shape = NamedSharding(mesh, spec).shard_shape(array.shape)
            copies = 2 if array.kind == "params" else 1
            total += copies * math.prod(shape) * array.itemsize
    return total


def slots_per_token(program: TrainingProgram) -> float | None:
    """Expert slots that a forward pass in training computes, over the tokens it routes.

    They are counted for one microbatch, whose tokens are grouped separately. Layers of the
    encoder and of the decoder are weighted by their tokens. If rows are not in equal blocks, it
    is the number of experts that a token visits; None in a dense model.

    Raises:
        RuntimeError: rows are in equal blocks, but no product of them is found.
    """
    model: ModelConfig = program.job.model
    if model.switch is None or not model.switch.has_ffn:
        return None
    rows = program.job.batch_size // program.job.step.num_microbatches
    run = functools.partial(forward, model, is_training=True)
    with program.scope():
        traced = jax.jit(run).trace(abstract_params(model), batch_shapes(program, rows))
    lengths = dict(zip(("encoder", "decoder"), program.job.sequence_lengths, strict=True))
    routed = rows * sum(
        length * model.num_sparse_layers_of(stack) for stack, length in lengths.items()
    )
    if slots := executed_slots(traced.jaxpr, model):
        return slots / routed
    if DISPATCHERS[model.switch.dispatcher].has_equal_blocks:
        raise RuntimeError(
            f"dispatcher={model.switch.dispatcher!r} has equal blocks of rows, but the traced "
            "program has no product [E, R, D] x [E, D, F]; planner/memory.py has to "
            "learn how experts are computed now"
        )
    return experts_per_token(model.switch)


def bytes_on_one_device(arrays) -> int:
    """Bytes of shape structs with shardings in the memory of one device; parts are equal."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
        if leaf.sharding.memory_kind != HOST
    )


def memory_in_refusal(message: str) -> tuple[int, int] | None:
    """(bytes used, bytes available) in a TPU compiler's RESOURCE_EXHAUSTED; else None."""
    if not (match := _USED.search(message)):
        return None
    sizes = zip(match.groups()[::2], match.groups()[1::2], strict=True)
    used, limit = (round(float(n) * _UNITS[unit or "B"]) for n, unit in sizes if n is not None)
    return used, limit


def _measure(
    program: TrainingProgram, batch, limit: int, devices: list | None = None
) -> tuple[Memory, str | None, int]:
    """`_compile` of the step; no text if the arguments alone are too large."""
    all_of_them = program.abstract_state, batch, program.abstract_beside
    arguments = bytes_on_one_device(all_of_them)
    memory = Memory(arguments, 0, arguments, limit)
    if not memory.fits:
        return memory, None, 0
    with program.scope():
        traced = program.trace_step(batch)
    return _compile(program, traced, memory, devices)


def _other_programs(program: TrainingProgram, batch, limit: int) -> dict[str, Memory]:
    """Memory of evaluation and of initialization; the optimizer's state stays on the device
    during an evaluation."""
    state = program.abstract_state
    arguments = bytes_on_one_device((state.params, batch))
    stays = bytes_on_one_device(state) - bytes_on_one_device(state.params)
    with program.scope():
        evaluation = program.eval_step.trace(state.params, batch)
        initialization = program.trace_init()
    evaluation, *_ = _compile(program, evaluation, Memory(arguments, 0, arguments, limit))
    return {
        "evaluation": dataclasses.replace(evaluation, needed=evaluation.needed + stays),
        "initialization": _compile(program, initialization, Memory(0, 0, 0, limit))[0],
    }


def _compile(
    program: TrainingProgram,
    traced: jax.stages.Traced,
    memory: Memory,
    devices: list | None = None,
) -> tuple[Memory, str | None, int]:
    """The memory that one of a run's programs takes once compiled, its text, and its bytes of
    host memory; or the memory that a refusal states.

    Args:
        memory: memory of the program's arguments.
        devices: GPUs that a program of an abstract mesh is compiled for; None compiles for the
            program's devices.
    """
    platform = platform_of(program.mesh)
    platforms = ("cuda" if platform == "gpu" else platform,)
    with program.scope():
        try:
            lowered = traced.lower(lowering_platforms=platforms)
            if devices is None:
                compiled = lowered.compile()
                facts, text = compiled.memory_analysis(), compiled.as_text()
            else:
                options = program.compiler_options
                compiled = gpu_compiler.compile_lowered(lowered, devices, options)
                facts = compiled.get_compiled_memory_stats()
                text = compiled.hlo_modules()[0].to_string()
        except jax.errors.JaxRuntimeError as error:
            if not (found := memory_in_refusal(str(error))):
                message = f"the compiler refuses this step: {str(error).strip()[:600]}"
                if "agged all-to-all" in message:
                    message += (
                        "; groups that devices share travel by one, so use a "
                        "SwitchConfig.group_size that gives each device whole groups"
                    )
                raise RuntimeError(message) from error
            used, limit = found
            temporaries = max(0, used - memory.arguments)
            return Memory(memory.arguments, temporaries, used, limit), None, 0
    on_host = facts.host_argument_size_in_bytes + facts.host_temp_size_in_bytes
    return memory_of(facts, memory.limit, platform), text, on_host


def memory_of(facts, limit: int, platform: str) -> Memory:
    """The memory of one device that a compiled program needs.

    Args:
        facts: `compiled.memory_analysis()`.
    """
    arguments = facts.argument_size_in_bytes
    code = facts.generated_code_size_in_bytes
    # Donated arguments' results take their places.
    results = max(0, facts.output_size_in_bytes - facts.alias_size_in_bytes)
    temporaries = facts.temp_size_in_bytes + code
    if platform == "tpu" and facts.peak_memory_in_bytes:
        # A TPU's temporaries may count an in-place update twice: its compiler accepts programs
        # whose arguments and temporaries exceed a chip's memory.
        peak = facts.peak_memory_in_bytes + code
        temporaries = min(temporaries, max(0, peak - arguments - results))
    return Memory(arguments, temporaries, arguments + results + temporaries, limit)
