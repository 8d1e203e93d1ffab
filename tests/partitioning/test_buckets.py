# SPDX-License-Identifier: Apache-2.0
"""Slices in buckets: index, whole parameters, summed gradients; docs/memory_sharding.md."""

import itertools
import re
import shlex
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from switchx import tree
from switchx.cli.main import main
from switchx.compiled.collectives import collectives
from switchx.gin_config import building
from switchx.models.params import abstract_params
from switchx.partitioning.buckets import SliceIndex, Slicing, sliced, whole
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.optimizer_slices import slice_spec
from switchx.partitioning.rules import Rules, param_spec
from switchx.training.job import TrainingJob
from tests.cases import slow_unless
from tests.data.refusals import refused
from tests.processes import ROOT

DTYPES = ("float32", "bfloat16")
PARTS = st.integers(1, 4)
ARRAYS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
        st.integers(0, 2),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=8,
)


def index_of(arrays, num_parts, bucket_bytes) -> SliceIndex:
    slices = [
        (f"w_{i}", tuple(shape), axis % len(shape), dtype)
        for i, (shape, axis, dtype) in enumerate(arrays)
    ]
    return SliceIndex.of(slices, num_parts=num_parts, bucket_bytes=bucket_bytes)


def numbers(index: SliceIndex, num_parts: int) -> dict:
    """Whole arrays in which every element is another one."""
    arrays = {}
    for i, each in enumerate(index.slices):
        shape = list(each.shape)
        shape[each.axis] *= num_parts
        arrays[each.name] = (np.arange(np.prod(shape)).reshape(shape) + i).astype(each.dtype)
    return arrays


@given(ARRAYS, PARTS, st.integers(1, 2000))
def test_every_slice_has_its_place_and_buckets_are_no_larger_than_asked(
    arrays, num_parts, bucket_bytes
):
    index = index_of(arrays, num_parts, bucket_bytes)
    assert [each.name for each in index.slices] == [f"w_{i}" for i in range(len(arrays))]
    assert sum(map(len, index.buckets)) == len(arrays)
    for bucket in index.buckets:
        assert len({each.dtype for each in bucket}) == 1
        ends = [0] + [each.end for each in bucket]
        assert [each.offset for each in bucket] == ends[:-1]
        num_bytes = ends[-1] * num_parts * jnp.dtype(bucket[0].dtype).itemsize
        assert num_bytes <= bucket_bytes or len(bucket) == 1


@pytest.mark.parametrize(
    ("num_parts", "bucket_bytes", "num_buckets"), [(1, 10**6, 2), (3, 10**6, 2), (3, 60, 4)]
)
def test_whole_arrays_come_back_from_the_slices_of_all_devices(
    num_parts, bucket_bytes, num_buckets
):
    """Along each axis, of two dtypes, in one bucket of each or in several."""
    arrays = [
        ((2, 3), 1, "float32"), ((4,), 0, "bfloat16"), ((3, 1, 2), 2, "float32"),
        ((2, 2), 0, "float32"), ((1, 5), 0, "bfloat16"),
    ]  # fmt: skip
    index = index_of(arrays, num_parts, bucket_bytes)
    assert index.num_buckets == num_buckets
    whole = numbers(index, num_parts)
    parts = {
        each.name: np.split(np.asarray(whole[each.name]), num_parts, each.axis)
        for each in index.slices
    }
    sent = [
        jax.jit(index.flatten)({name: slices[p] for name, slices in parts.items()})
        for p in range(num_parts)
    ]
    gathered = [np.stack(bucket) for bucket in zip(*sent, strict=True)]
    cut = jax.jit(lambda whole: index.join(index.cut(whole)))(whole)
    for got in (jax.jit(index.join)(gathered), cut):
        assert got.keys() == whole.keys()
        for name, want in whole.items():
            assert got[name].dtype == want.dtype
            np.testing.assert_array_equal(got[name], want)


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_holds_something(bucket_bytes):
    with refused(f"bucket_bytes={bucket_bytes}"):
        index_of([((4,), 0, "float32")], 2, bucket_bytes)


RULES = Rules()
SHAPES = {
    "w_in_DF": (8, 6),
    "w_out_FD": (6, 8),
    "experts": {"w_in_EDF": (2, 8, 3), "b_EF": (2, 3)},
    "scale_D": (8,),
    "bias_UH": (4, 2),
}
RNG = np.random.default_rng(0)
PARAMS = jax.tree.map(
    lambda shape: RNG.integers(-4, 5, shape).astype(np.float32),
    SHAPES,
    is_leaf=lambda leaf: isinstance(leaf, tuple),
)
SLICED = 4  # of the six: all that have a D
# Whole numbers, so that sums over devices are exact in any order: one weight a device.
WEIGHT_P = np.array([1, -2, 3, 5, -1, 4, 2, 7], np.float32)
ONE_BUCKET, ONE_EACH = 2**20, 1


def total_of(params, weight_P):
    """Half the squares of all elements, weighed by their numbers and by the device's weight."""
    total = sum(jnp.sum(leaf**2 * numbers_of(leaf)) for leaf in jax.tree.leaves(whole(params)))
    return total * weight_P[0] / 2


def numbers_of(leaf):
    return np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape)


def mapped(function, spec: MeshSpec, bucket_bytes: int, out_specs):
    """`function(params, weight_P)` on every device of a mesh, on its slices and its weight."""
    mesh = spec.build()
    slicing = Slicing.on(mesh, RULES, bucket_bytes)
    specs = tree.map_named(lambda name, leaf: param_spec(RULES, mesh, name, leaf.shape), PARAMS)

    def local(params, weight_P):
        with sliced(slicing):
            return function(params, weight_P)

    rows = PartitionSpec(("data", "fsdp"))
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs, rows), out_specs=out_specs)
    return jax.jit(lambda params: run(params, WEIGHT_P))


def gradients(spec: MeshSpec, bucket_bytes: int, function=total_of):
    """Jitted: the sum over devices and its raw gradients, taken outside."""

    def summed(params, weight_P):
        return jax.lax.psum(function(params, weight_P), ("data", "fsdp"))

    return jax.jit(jax.value_and_grad(mapped(summed, spec, bucket_bytes, PartitionSpec())))


@pytest.mark.parametrize(
    ("fsdp", "bucket_bytes"),
    [
        slow_unless(cell in ((2, 300), (8, ONE_EACH)), *cell)
        for cell in itertools.product((2, 8), (ONE_EACH, 300, ONE_BUCKET))
    ],
)
def test_every_device_sees_whole_parameters_and_gradients_are_summed(fsdp, bucket_bytes):
    spec = MeshSpec(fsdp=fsdp)

    def see(params, weight_P):
        return jax.tree.map(lambda leaf: leaf[None], whole(params))

    seen = mapped(see, spec, bucket_bytes, PartitionSpec(("data", "fsdp")))(PARAMS)
    _, grads = gradients(spec, bucket_bytes)(PARAMS)

    def check(param, grad, seen):
        np.testing.assert_array_equal(seen, np.broadcast_to(param, (8, *param.shape)))
        np.testing.assert_array_equal(grad, param * numbers_of(param) * WEIGHT_P.sum())

    jax.tree.map(check, PARAMS, grads, seen)


def kinds(spec: MeshSpec, bucket_bytes: int, function=total_of) -> dict[str, int]:
    """How many collectives of each kind there are, one-element ones left out."""
    compiled = gradients(spec, bucket_bytes, function).lower(PARAMS).compile()
    return Counter(each.kind for each in collectives(compiled.as_text()) if each.num_bytes > 4)


def test_collectives_are_as_many_as_buckets():
    # The gradients of the two that have no slices are summed together.
    alone = {"all-reduce": 1}
    assert kinds(MeshSpec(fsdp=8), ONE_BUCKET) == alone | {"all-gather": 1, "reduce-scatter": 1}
    each = {"all-gather": SLICED, "reduce-scatter": SLICED}
    assert kinds(MeshSpec(fsdp=8), ONE_EACH) == alone | each
    # Replicas add their scattered parts up: one all-reduce more a bucket.
    found = kinds(MeshSpec(fsdp=4), ONE_BUCKET)
    assert (found["all-gather"], found["all-reduce"]) == (1, 2)


def test_what_is_recomputed_gathers_again():
    """In a loop, as scanned layers are; CPU's compiler merges gathers of straight code."""

    def total_of_layers(params, weight_P):
        def body(carry, _):
            return carry + jax.checkpoint(total_of)(params, weight_P * (1 + 0 * carry)), None

        return jax.lax.scan(body, 0 * weight_P[0], length=3)[0]

    again = kinds(MeshSpec(fsdp=8), ONE_BUCKET, total_of_layers)
    assert again == {"all-gather": 2, "reduce-scatter": 1, "all-reduce": 1}


def test_nothing_happens_outside_of_slices():
    assert whole(PARAMS) is PARAMS


def test_slices_are_read_off_the_rules():
    slicing = Slicing.on(MeshSpec(fsdp=4).build(), RULES, 100)
    assert (slicing.axes, slicing.replicas, slicing.num_parts) == (("fsdp",), ("data",), 4)
    assert slicing.sliced_axis("decoder/w_in_DF", (2, 6)) == 0
    assert slicing.sliced_axis("blocks/w_out_FD", (3, 6, 2)) == 2
    assert slicing.sliced_axis("experts/w_in_EDF", (2, 2, 3)) == 1
    assert slicing.sliced_axis("bias_UH", (4, 2)) is None


PAGE = (ROOT / "docs/memory_sharding.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]

# So that a run takes seconds; a later flag wins.
BRIEF = [
    *(f"--gin.ModelConfig.{name}=8" for name in ("d_model", "d_ff", "d_head")),
    *(f"--gin.ModelConfig.num_{stack}_layers=2" for stack in ("encoder", "decoder")),
    "--gin.ModelConfig.num_heads=1",
    "--gin.NUM_EXPERTS=4",
    "--gin.VOCAB_SIZE=504",
    "--gin.TRAIN_STEPS=2",
    "--gin.TrainingJob.eval_batches=1",
]


def switchx_words(command: str) -> list[str]:
    """Arguments of a command of the page, whose flag simulates the devices that tests have."""
    flags, program, *words = shlex.split(command)
    assert flags == "XLA_FLAGS=--xla_force_host_platform_device_count=8"
    assert program == "switchx"
    return words


def test_commands_slice_parameters():
    """The optimizer's state alone over `data`; D over `fsdp`; the table's rows over `data`."""
    tables, kept = [], []
    for words in map(switchx_words, COMMANDS):
        files = [
            word.removeprefix("--gin_file=") for word in words if word.startswith("--gin_file")
        ]
        bindings = [
            word.removeprefix("--gin.")
            for word in [*words, *BRIEF]
            if word.startswith("--gin.")
        ]
        building.parse_files(files, bindings, [])
        job = building.build("JOB", TrainingJob)
        table = tree.named_leaves(abstract_params(job.model))["embedding/embedding_VD"]
        mesh, rules = job.mesh.build(), job.mesh.rules
        tables.append(param_spec(rules, mesh, "embedding_VD", table.shape))
        kept.append(slice_spec(rules, mesh, "embedding_VD", table.shape))
    columns, rows = PartitionSpec(None, "fsdp"), PartitionSpec("data", None)
    assert tables == [PartitionSpec(None, None), columns, rows]
    assert kept == [rows, columns, rows]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, in_a_folder, capsys):
    assert main([*switchx_words(command), *BRIEF]) == 0, capsys.readouterr().err
