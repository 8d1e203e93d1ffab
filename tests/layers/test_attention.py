# SPDX-License-Identifier: Apache-2.0
"""Attention against a NumPy loop, forward and gradients; its forms, dropout, first weights."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.aot import gpu_compiler, tpu_compiler
from switchx.layers.attention import (
    Attention,
    KeysValues,
    attend,
    attend_by_cudnn,
    attend_by_splash,
)
from switchx.models.config import ModelConfig
from switchx.partitioning.constrain import use_mesh
from switchx.partitioning.mesh import MeshSpec
from tests.absent_devices import compute_cudnn_by_xla, mesh_of
from tests.compare import assert_slope
from tests.layers.weights import numbers_for, with_params
from tests.moe.oracle import softmax
from tests.processes import script_with_compiler

B, L, M, H, K = 2, 5, 7, 3, 4


def inputs():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n, H, K)).astype(np.float32) for n in (L, M, M))
    bias_HLM = rng.normal(size=(H, L, M)).astype(np.float32)
    mask_BLM = rng.random((B, L, M)) < 0.7
    mask_BLM[:, :, 0] = True
    return q, k, v, bias_HLM, mask_BLM


def loop(q, k, v, bias_HLM, mask_BLM):
    out = np.zeros((B, L, H, K))
    for b in range(B):
        for h in range(H):
            for i in range(L):
                scores = np.array(
                    [q[b, i, h] @ k[b, j, h] + bias_HLM[h, i, j] for j in range(M)]
                )
                scores[~mask_BLM[b, i]] = -np.inf
                out[b, i, h] = softmax(scores) @ v[b, :, h]
    return out


def run(q, k, v, bias_HLM, mask_BLM, **options):
    memory = KeysValues(jnp.moveaxis(k, 1, 3), jnp.moveaxis(v, 1, 2))
    bias_HLM, mask_BLM = jnp.asarray(bias_HLM), jnp.asarray(mask_BLM)
    out = attend(jnp.asarray(q), memory, bias_HLM=bias_HLM, mask_BLM=mask_BLM, **options)
    return jnp.swapaxes(out, 1, 2)


def test_attend_equals_a_loop():
    q, k, v, bias_HLM, mask_BLM = inputs()
    got = run(q, k, v, bias_HLM, mask_BLM)
    np.testing.assert_allclose(got, loop(q, k, v, bias_HLM, mask_BLM), rtol=1e-5, atol=1e-6)


def test_gradients_equal_finite_differences():
    q, k, v, bias_HLM, mask_BLM = inputs()
    target = np.random.default_rng(1).normal(size=(B, L, H, K))
    arguments = (q, k, v, bias_HLM)

    def loss(q, k, v, bias_HLM):
        return jnp.sum(run(q, k, v, bias_HLM, mask_BLM) * target)

    grads = jax.grad(loss, (0, 1, 2, 3))(*map(jnp.asarray, arguments))
    arguments = [np.float64(each) for each in arguments]
    for i, grad in enumerate(grads):

        def by_loop(changed, i=i):
            return np.sum(loop(*arguments[:i], changed, *arguments[i + 1 :], mask_BLM) * target)

        assert_slope(by_loop, arguments[i], grad, rtol=1e-3)


def test_a_query_that_may_look_at_nothing_stays_finite():
    q, k, v, bias_HLM, _ = inputs()
    mask_BLM = jnp.zeros((B, L, M), bool)
    out, grads = jax.value_and_grad(lambda q: jnp.sum(run(q, k, v, bias_HLM, mask_BLM)))(
        jnp.asarray(q)
    )
    assert np.isfinite(out) and np.all(np.isfinite(grads))


def test_bfloat16_keeps_the_softmax_in_float32():
    q, k, v, bias_HLM, mask_BLM = inputs()
    half = [jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)]
    out = run(*half, bias_HLM, mask_BLM)
    assert out.dtype == jnp.bfloat16
    exact = loop(*(np.asarray(a, np.float32) for a in half), bias_HLM, mask_BLM)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, rtol=2e-2, atol=2e-2)


def test_bfloat16_gradients_are_those_of_float32():
    """The backward pass reads rounded weights; the error is that of one rounding or two."""
    q, k, v, bias_HLM, mask_BLM = inputs()
    target = np.random.default_rng(1).normal(size=(B, L, H, K)).astype(np.float32)

    def gradients(*arguments):
        def loss(q, k, v, bias_HLM):
            return jnp.sum(run(q, k, v, bias_HLM, mask_BLM).astype(jnp.float32) * target)

        return jax.grad(loss, (0, 1, 2, 3))(*arguments)

    half = [jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)]
    got = gradients(*half, bias_HLM)
    want = gradients(*(each.astype(jnp.float32) for each in half), bias_HLM)
    assert [each.dtype for each in got] == [jnp.bfloat16] * 3 + [jnp.float32]
    for g, w in zip(got, want, strict=True):
        error = np.linalg.norm(np.asarray(g, np.float32) - w) / np.linalg.norm(w)
        assert error < 2**-7


def test_a_bias_for_each_row_is_added_and_has_gradients():
    """Rows of one alone, where a bias for each is a bias for all."""
    q, k, v, bias_HLM, mask_BLM = map(jnp.asarray, inputs())
    row_bias_BHLM = jnp.stack([bias_HLM, -2 * bias_HLM])
    target = np.random.default_rng(1).normal(size=(B, L, H, K)).astype(np.float32)

    def got(row_bias_BHLM):
        out = run(q, k, v, bias_HLM, mask_BLM, row_bias_BHLM=row_bias_BHLM)
        return jnp.sum(out * target)

    def want(row_bias_BHLM):
        rows = (slice(b, b + 1) for b in range(B))
        return sum(
            jnp.sum(
                target[b]
                * run(q[b], k[b], v[b], bias_HLM + row_bias_BHLM[b.start], mask_BLM[b])
            )
            for b in rows
        )

    for f, g in zip(
        *(jax.value_and_grad(each)(row_bias_BHLM) for each in (got, want)), strict=True
    ):
        np.testing.assert_allclose(f, g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_what_cudnn_is_asked_for_equals_attend(dtype, error, monkeypatch):
    """Values and raw gradients, with both biases, a mask and dropout."""
    compute_cudnn_by_xla(monkeypatch)
    *arrays, bias_HLM, mask_BLM = inputs()
    biases = bias_HLM, np.stack([bias_HLM, -2 * bias_HLM])
    target = np.random.default_rng(1).normal(size=(B, H, L, K))
    options = dict(mask_BLM=jnp.asarray(mask_BLM), dropout_rate=0.3, key=jax.random.key(0))

    def values(attend):
        def loss(q, k, v, bias, rows):
            memory = KeysValues(jnp.moveaxis(k, 1, 3), jnp.moveaxis(v, 1, 2))
            out = attend(q, memory, bias_HLM=bias, row_bias_BHLM=rows, **options)
            return jnp.sum(out.astype(jnp.float32) * target), out

        arguments = [jnp.asarray(each, dtype) for each in arrays] + list(biases)
        return jax.tree.leaves(jax.grad(loss, range(5), has_aux=True)(*arguments))

    got, want = values(attend_by_cudnn), values(attend)
    assert [each.dtype for each in got] == [each.dtype for each in want]
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        assert np.linalg.norm(g - w) / np.linalg.norm(w) < error


@pytest.mark.parametrize(
    ("kind", "dtype", "length", "reason"),
    [
        ("cpu", "bfloat16", 6, "JAX runs on cpu"),
        ("NVIDIA H200", "float32", 6, "computes in float32, not in bfloat16 or float16"),
        ("NVIDIA H200", "bfloat16", 5, "has 5 queries and 6 keys, not even numbers"),
        ("NVIDIA H200", "bfloat16", 6, "is inside of a shard_map"),
    ],
)
def test_what_cudnn_does_not_take_is_refused(kind, dtype, length, reason):
    query_BLHK = jnp.zeros((B, length, H, K), dtype)
    memory = KeysValues.empty((B, H, 6, K), dtype)
    mesh = mesh_of(kind, "gpu" if "H200" in kind else "cpu", {"data": 2})
    if "shard_map" in reason:
        mesh = mesh.update(axis_types=(jax.sharding.AxisType.Manual,))
    refused = pytest.raises(ValueError, match=f"'cudnn': {reason}; use 'einsum'")
    with refused, jax.sharding.use_abstract_mesh(mesh):
        attend_by_cudnn(query_BLHK, memory)


# JAX asks libcudnn for its version where it traces; XLA needs it on a device alone.
WITH_CUDNN = """
import json
import jax, jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from pallas_kernels.aot.gpu_compiler import described_gpus
from switchx.bench.compiled_layer import described_chip
from switchx.compiled.moved_bytes import moved_bytes
from switchx.layers import attention
from switchx.partitioning.topology import Topology

cudnn.check_cudnn_version = lambda: 91200
attention._require_cudnn = lambda *arguments: None
device = described_gpus("h200")[0]
on = jax.sharding.SingleDeviceSharding(device)
B, H, K = 16, 12, 64

def compiled(by, L, M):
    def loss(q, k, v, bias, mask, dy):
        memory = attention.KeysValues(k, v)
        out = attention.ATTENDS[by](q, memory, bias_HLM=bias, mask_BLM=mask)
        return jnp.sum((out * dy).astype(jnp.float32))
    shapes = (B, L, H, K), (B, H, K, M), (B, H, M, K), (H, L, M), (B, L, M), (B, H, L, K)
    dtypes = *3 * [jnp.bfloat16], jnp.float32, jnp.bool_, jnp.bfloat16
    with described_chip(Topology.parse("h200:1"), device):
        arrays = (jax.ShapeDtypeStruct(*each, sharding=on) for each in zip(shapes, dtypes))
        return jax.jit(jax.grad(loss, range(4))).lower(*arrays).compile().as_text()

try:
    odd = compiled("cudnn", 113, 512)
except NotImplementedError as error:
    odd = str(error)
flash, other = compiled("cudnn", 512, 512), compiled("cudnn", 114, 512)
moved = [moved_bytes(hlo).num_bytes for hlo in (compiled("einsum", 512, 512), flash)]
counts = [hlo.count("u8[0]{0}) custom-call(") for hlo in (flash, other)]
print(json.dumps([odd, moved, counts]))
"""


@pytest.mark.aot
def test_cudnns_attention_is_lowered_for_a_gpu_that_is_not_there():
    """What docs/compiled.md says of it; where JAX takes or says more, this fails."""
    done = script_with_compiler(gpu_compiler, WITH_CUDNN)
    odd, (ours, flash), counts = json.loads(done.stdout.splitlines()[-1])
    assert odd == "Unsupported sequence length Q 113, KV 512."
    # Forward and backward: cuDNN's own plans would have a workspace.
    assert counts == [2, 2]
    workspace = 2 * 2 * 16 * 12 * 512 * 512  # bytes that cuDNN writes and reads
    assert 0.35 < (flash + workspace) / ours < 0.55


@pytest.mark.slow  # interprets a TPU's kernels
@pytest.mark.parametrize("mesh", [MeshSpec(data=1), MeshSpec(data=2, model=4)])
def test_splash_attention_equals_attend(mesh):
    """Values and raw gradients of packed rows with padding and dropout, two heads of queries a
    head of keys; over four devices the two heads of keys do not divide."""
    rng, (B, L, H, Z, K) = np.random.default_rng(0), (2, 256, 4, 2, 16)
    shapes = (B, L, H, K), (B, Z, K, L), (B, Z, L, K)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    segment_BL = np.ones((B, L), np.int32)
    segment_BL[0, 100:], segment_BL[1, 200:] = 2, 0
    is_text_BL = segment_BL > 0
    is_same_BLM = (segment_BL[:, :, None] == segment_BL[:, None]) & is_text_BL[:, None]
    mask_BLM = jnp.asarray(is_same_BLM & np.tril(np.ones((L, L), bool)))
    target = rng.normal(size=(B, H, L, K)) * is_text_BL[:, None, :, None]
    options = dict(dropout_rate=0.3, key=jax.random.key(0))

    def values(attend, **how):
        def loss(q, k, v):
            out_BHLK = attend(q, KeysValues(k, v), **how, **options)
            return jnp.sum(out_BHLK * target), out_BHLK * is_text_BL[:, None, :, None]

        return jax.tree.leaves(jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays))

    how = dict(segment_BL=jnp.asarray(segment_BL), interpret=True)
    with use_mesh(mesh.build(jax.devices()[: mesh.num_devices(1)]), mesh.rules):
        got = jax.jit(lambda: values(attend_by_splash, **how))()
    for g, w in zip(got, values(attend, mask_BLM=mask_BLM), strict=True):
        assert np.linalg.norm(g - w) / np.linalg.norm(w) < 2e-6


def test_splash_attention_is_refused_where_it_cannot_run():
    query_BLHK, memory = jnp.zeros((1, 100, H, K)), KeysValues.empty((1, H, 100, K), "float32")
    reason = "'splash': JAX runs on cpu, rows have 100 tokens, no multiple of 128; use 'einsum'"
    with pytest.raises(ValueError, match=reason):
        attend_by_splash(query_BLHK, memory, segment_BL=jnp.ones((1, 100), jnp.int32))
    with pytest.raises(ValueError, match="positions='relative': it takes decoder-only models"):
        dataclasses.replace(CONFIG, training_attention="splash")


# A step by each implementation for four chips, whose heads and rows are divided.
BY_DEVICE = """
import dataclasses, json, sys
from switchx.compiled.devices import describe_devices
from switchx.compiled.training_step import compile_step
from switchx.layers import attention
from switchx.models.config import ModelConfig, Precision
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.topology import Topology
from tests.training.jobs import make_job

topology = Topology.parse(sys.argv[1])
if topology.generation.platform != "tpu":
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    cudnn.check_cudnn_version = lambda: 91200
seen, temporaries = [], []
for name in ("splash", "cudnn"):
    def watched(*arguments, name=name, found=attention.ATTENDS[name], **options):
        seen.append(name)
        return found(*arguments, **options)
    attention.ATTENDS[name] = watched
for by in ("einsum", "auto"):
    model = ModelConfig(
        "decoder_only", 512, 256, 256, 4, 128, 2, positions="rotary", num_kv_heads=2,
        scale_attention=True, remat="full", scan_layers=True, training_attention=by,
        precision=Precision(compute="bfloat16"),
    )
    job = make_job(model, mesh=MeshSpec(data=2, model=2), batch_size=4)
    job = dataclasses.replace(job, inputs_length=1024, targets_length=1024)
    step = compile_step(job, describe_devices(topology), 1 << 40)
    temporaries.append(step.memory.temporaries)
print(json.dumps([sorted(set(seen)), temporaries]))
"""


@pytest.mark.aot
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("topology", "name"), [("v5e:2x2", "splash"), ("h200:4", "cudnn")])
def test_auto_is_the_flash_attention_of_the_device(topology, name):
    """Compiled, not run; on a TPU a step of 2,048 tokens a row has half of the temporaries."""
    compiler = tpu_compiler if name == "splash" else gpu_compiler
    done = script_with_compiler(compiler, BY_DEVICE, topology)
    seen, (by_einsum, by_flash) = json.loads(done.stdout.splitlines()[-1])
    assert seen == [name]
    assert name == "cudnn" or by_flash < 0.6 * by_einsum  # 21.9 of 42.7 MB


def test_entries_of_a_cache_go_where_they_are_put():
    kept = KeysValues.empty((1, 1, 4, 2), jnp.float32)
    ones = jnp.ones((1, 1, 2, 2))
    kept = kept.written(jnp.int32(1), KeysValues(ones, 2 * ones))
    assert kept.key_BHKM[0, 0, 0].tolist() == [0, 1, 1, 0]
    assert kept.value_BHMK[0, 0, :, 0].tolist() == [0, 2, 2, 0]


CONFIG = ModelConfig("decoder_only", 8, 6, 8, H, K, 1)


def test_cross_attention_reads_the_memory():
    """Queries from x, keys and values from the memory, through each one's own weights."""
    rng = np.random.default_rng(3)
    module = Attention(CONFIG, key=jax.random.key(0))
    w = numbers_for(module, scale=0.5)
    module = with_params(module, w)
    x_BLD, memory_BMD = (rng.normal(size=(B, n, 6)).astype(np.float32) for n in (L, M))
    q, k, v = (
        np.einsum("BLD,DHK->BLHK", source, w[f"w_{name}_DHK"])
        for source, name in [(x_BLD, "query"), (memory_BMD, "key"), (memory_BMD, "value")]
    )
    out_BLHK = loop(q, k, v, np.zeros((H, L, M)), np.ones((B, L, M), bool))
    y_BLD = module(jnp.asarray(x_BLD), module.project_memory(jnp.asarray(memory_BMD)))
    want_BLD = np.einsum("BLHK,HKD->BLD", out_BLHK, w["w_out_HKD"])
    np.testing.assert_allclose(y_BLD, want_BLD, rtol=1e-4, atol=1e-5)


def test_dropout_falls_on_the_weights_for_all_queries_alike(key):
    """With values of one, an output is the sum of kept weights, doubled; T5X shares the mask
    over queries."""
    config = dataclasses.replace(CONFIG, num_heads=1, d_head=6, dropout_rate=0.5)
    module = Attention(config, key=key)
    w = jax.tree.map(np.zeros_like, numbers_for(module))
    w["w_value_DHK"][:, 0], w["w_out_HKD"][0] = np.eye(6), np.eye(6)
    module = with_params(module, w)
    x_BLD = jnp.ones((200, 4, 6))
    memory = module.project_memory(x_BLD)
    np.testing.assert_allclose(module(x_BLD, memory), 1.0, rtol=1e-6)
    y_BLD = np.asarray(module(x_BLD, memory, key=key))
    assert np.ptp(y_BLD, axis=(1, 2)).max() < 1e-6
    # Four weights of 1/4, each kept half of the time and doubled: binomial of 4 and 1/2 over
    # 200 rows, five deviations of at most sqrt(1/4 / 200) = 0.035.
    values, counts = np.unique(y_BLD[:, 0, 0].round(4), return_counts=True)
    assert values.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    np.testing.assert_allclose(counts / 200, np.array([1, 4, 6, 4, 1]) / 16, atol=0.176)


@pytest.mark.parametrize(("scale_attention", "divisor"), [(False, math.sqrt(32)), (True, 1.0)])
def test_first_weights(scale_attention, divisor, key):
    """T5 starts its queries sqrt(K) smaller and divides no scores; GPT the other way."""
    config = dataclasses.replace(
        CONFIG, d_model=48, num_heads=4, d_head=32, scale_attention=scale_attention
    )
    module = Attention(config, key=key)
    for name, stddev in [
        ("w_query_DHK", 1 / math.sqrt(48) / divisor),
        ("w_key_DHK", 1 / math.sqrt(48)),
        ("w_value_DHK", 1 / math.sqrt(48)),
        ("w_out_HKD", 1 / math.sqrt(4 * 32)),
    ]:
        got = np.asarray(getattr(module, name)[...]).std()
        np.testing.assert_allclose(got, stddev, rtol=0.05)
