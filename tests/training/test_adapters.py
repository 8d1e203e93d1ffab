# SPDX-License-Identifier: Apache-2.0
"""Adapters: products against NumPy, gradients by the chain rule and on meshes, memory, runs.

Dims: B batch, L length, D model, F ffn, E experts, R rows, J rank
"""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import switchx
from pallas_kernels import dequantize, implementations, quantize
from pallas_kernels.implementations import Device
from switchx import tree
from switchx.checkpoint.adapter_run import AdapterRecord
from switchx.checkpoint.averaging import moving_average
from switchx.checkpoint.items import read_items
from switchx.checkpoint.restore import restore_params
from switchx.checkpoint.run_folder import RunFolder
from switchx.checkpoint.verify import checkpoint_faults
from switchx.cli.main import main
from switchx.compiled.workload import workload_of
from switchx.inference.quantize import is_quantized
from switchx.layers.adapted_weight import AdaptedWeight, adapter_dims
from switchx.layers.dense import times
from switchx.models.adapters import (
    LoRASpec,
    abstract_adapters,
    init_adapters,
    merged,
    quantized_base,
)
from switchx.models.config import Precision
from switchx.models.params import abstract_params
from switchx.models.unroll import unrolled, unrolled_blocks
from switchx.moe.experts import ExpertFFN, rows_product
from switchx.optim.adamw import AdamW
from switchx.optim.updates import global_norm
from switchx.partitioning.mesh import MeshSpec
from switchx.training.adapter_program import AdapterProgram, adapted_by
from switchx.training.distillation.soft_loss import Distillation
from switchx.training.loop import train
from switchx.training.losses import batch_loss
from switchx.training.offload.storage_spec import StorageSpec
from switchx.training.program import TrainingProgram
from switchx.training.step import Seam, StepConfig, gradients
from tests.cases import slow
from tests.data.refusals import refused
from tests.integration.runs import arguments
from tests.training.jobs import (
    DENSE,
    LOSS,
    MODERN,
    SPARSE,
    SWITCH,
    Events,
    make_batch,
    make_job,
    make_params,
    with_switch,
)
from tests.training.saved_runs import lines, save_run
from tests.training.steps import MESHES, raw_gradients

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

ROWS = 16
WEIGHTY = dataclasses.replace(LOSS, balance_weight=0.5)
# One with a gate, heads of keys for several of queries, and a shared expert.
GATED = dataclasses.replace(MODERN, scan_layers=True)
NO_BASE = LoRASpec("nowhere", rank=2, alpha=3.0)


def drawn(shapes, seed=0):
    """Numbers in these shapes, as float32."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, jnp.float32), shapes
    )


def make_adapters(config, spec, seed=3):
    """Adapters whose B is not zero."""
    return drawn(abstract_adapters(abstract_params(config), spec), seed)


def numbers(seed, *shapes):
    return drawn([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], seed)


@pytest.mark.parametrize("dims", ["DHK", "HKD"])
def test_products_are_those_of_a_merged_matrix(dims):
    sizes = {"D": 4, "H": 2, "K": 3, "J": 2}
    letters = (dims, *adapter_dims(dims))
    w, a, b = numbers(0, *(tuple(sizes[d] for d in each) for each in letters))
    contracted, kept = ("D", "HK") if dims == "DHK" else ("HK", "D")
    (x,) = numbers(1, (5, 3, *(sizes[d] for d in contracted)))
    y = times(f"BL{contracted},{dims}->BL{kept}", x, AdaptedWeight(w, a, b, None, letters, 0.5))
    rows = np.float64(x).reshape(15, -1)
    matrix = np.float64(w).reshape(rows.shape[1], -1)
    matrix += 0.5 * np.float64(a).reshape(-1, 2) @ np.float64(b).reshape(2, -1)
    np.testing.assert_allclose(np.reshape(y, (15, -1)), rows @ matrix, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("is_shared", [False, slow(True)])
def test_experts_are_those_of_a_loop_over_rows(is_shared):
    E, R, D, F, J = 3, 4, 6, 5, 2
    weights, x_ERD = {}, numbers(0, (E, R, D))[0]
    for seed, (name, shape) in enumerate(
        {"w_in_EDF": (E, D, F), "w_out_EFD": (E, F, D), "w_gate_EDF": (E, D, F)}.items()
    ):
        dims = name.rpartition("_")[2]
        lead = () if is_shared else (E,)
        w, a, b = numbers(seed, shape, (*lead, shape[1], J), (*lead, J, shape[2]))
        letters = (dims, *adapter_dims(dims, is_shared=is_shared))
        weights[name] = AdaptedWeight(w, a, b, None, letters, 1.5)
    b_in_EF, b_out_ED = numbers(9, (E, F), (E, D))
    bank = ExpertFFN(**weights, b_in_EF=b_in_EF, b_out_ED=b_out_ED, activation="swiglu")

    def matrix(name, e):
        w = weights[name]
        a, b = (np.float64(each if is_shared else each[e]) for each in (w.a, w.b))
        return np.float64(w.base[e]) + 1.5 * a @ b

    want = np.zeros((E, R, D))
    for e in range(E):
        h = np.float64(x_ERD[e]) @ matrix("w_in_EDF", e) + np.float64(b_in_EF[e])
        h = h / (1 + np.exp(-h)) * (np.float64(x_ERD[e]) @ matrix("w_gate_EDF", e))
        want[e] = h @ matrix("w_out_EFD", e) + np.float64(b_out_ED[e])
    got = jax.jit(lambda x_ERD: bank(x_ERD))(x_ERD)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    count_E, gate_R = jnp.array([R] * E), jnp.arange(E * R, dtype=jnp.float32)
    got = jax.jit(lambda *rows: bank.run_rows(*rows))(x_ERD.reshape(E * R, D), count_E, gate_R)
    rows = want.reshape(E * R, D) * np.arange(E * R)[:, None]
    np.testing.assert_allclose(got, rows, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bits", [4, slow(8)])
def test_gradients_of_a_quantized_product_are_those_of_the_dequantized_one(bits):
    E, R, D, F = 3, 10, 8, 6
    w_EDF, x_RD, dy_RF = numbers(0, (E, D, F), (R, D), (R, F))
    a_EDJ, b_EJF = numbers(1, (E, D, 2), (E, 2, F))
    q, count_E = quantize(w_EDF, bits), jnp.array([3, 0, 6])
    letters = ("EDF", "EDJ", "EJF")

    def loss(arrays, base):
        x_RD, a, b = arrays
        w = AdaptedWeight(base, a, b, None, letters, 0.5)
        y_RF = rows_product(x_RD, w, count_E=count_E, activation="relu")
        return jnp.sum(y_RF * dy_RF)

    arrays = x_RD, a_EDJ, b_EJF
    got, want = (jax.jit(jax.grad(loss))(arrays, base) for base in (q, dequantize(q)))
    assert float(jnp.abs(want[0]).max()) > 0.1
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def gradients_alone(config, base, adapters, spec):
    def compute(adapters, base):  # not a constant: XLA folds int4 constants to other numbers
        return gradients(
            config, WEIGHTY, StepConfig(), adapters, make_batch(config, ROWS),
            key=jax.random.key(0), seam=adapted_by(base, spec),
        )  # fmt: skip

    return jax.device_get(jax.jit(compute)(adapters, base))


def require_near(got, want, bound: float) -> None:
    got, want = tree.named_leaves(got), tree.named_leaves(want)
    assert got.keys() == want.keys()
    for name, leaf in want.items():
        size, error = np.linalg.norm(leaf), np.linalg.norm(got[name] - leaf)
        # Gradients of queries and keys are differences of larger numbers, in float32.
        own = 1e-4 if re.search("query|key", name) else bound
        assert size > 1e-4 and error <= own * size, (name, error / size)


def merged_gradients(config, base, adapters, spec):
    """JAX's gradients through W + s A B, by the loss of a model without adapters."""

    def loss_of(config, loss, adapters, *given, **arguments):
        return batch_loss(config, loss, merged(base, adapters, spec), *given, **arguments)

    def compute(adapters):
        batch, key = make_batch(config, ROWS), jax.random.key(0)
        given = config, WEIGHTY, StepConfig(), adapters, batch
        return gradients(*given, key=key, seam=Seam(loss_of))

    return jax.device_get(jax.jit(compute)(adapters))


@pytest.mark.slow  # two programs each
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (GATED, {}),
        (GATED, {"shared_by_experts": True, "targets": ("experts",)}),
        (SPARSE, {"targets": ("attention", "routers")}),
        (with_switch(SPARSE, dispatcher="dropless"), {}),
        (with_switch(SPARSE, dispatcher="einsum"), {}),
    ],
)
def test_raw_gradients_are_those_of_merged_weights(config, changes):
    spec = dataclasses.replace(NO_BASE, **changes)
    base, adapters = make_params(config), make_adapters(config, spec)
    got, value, *_ = gradients_alone(config, base, adapters, spec)
    want, loss, *_ = merged_gradients(config, base, adapters, spec)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    require_near(got, want, 2e-5)


@pytest.mark.slow
def test_first_adapters_change_nothing_and_are_those_of_their_layer():
    spec = dataclasses.replace(NO_BASE, targets=("attention", "experts"))
    scanned = init_adapters(GATED, spec, jax.random.key(1))
    alone, params = unrolled(GATED, make_params(GATED))
    apart = init_adapters(alone, spec, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, unrolled_blocks(scanned), apart)
    whole = merged(params, apart, spec)
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    a_DJ = apart["decoder"]["blocks"]["layer_0"]["self_attention"]["w_query_DHK"]["a_DJ"]
    assert 0.5 < 4 * np.abs(a_DJ).max() <= 1  # within 1 / sqrt(16)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Run folders of the bases, by configuration."""
    folder, made = tmp_path_factory.mktemp("bases"), {}

    def base(config):
        if config not in made:
            made[config] = save_run(folder / str(len(made)), config)
        return str(made[config])

    return base


KINDS = {
    "each": {},
    "shared": {"shared_by_experts": True},
    "routers": {"targets": ("attention", "experts", "routers")},
    "int4": {"bits": 4},
    "int8, dropless": {"bits": 8},
}
CELLS = [(mesh, "each", parts) for mesh in MESHES for parts in (1, 2)]
CELLS += [(mesh, kind, 1) for mesh in ("all", "fsdp") for kind in KINDS if kind != "each"]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        (Device("cuda", "NVIDIA H200", "9.0"), jnp.int4),  # not in the order of its registers
        (Device("cuda", "NVIDIA A100-SXM4-80GB", "8.0"), jnp.uint8),
        (Device("tpu", "TPU v5 lite", None), jnp.int4),
        (Device("cpu", "cpu", None), jnp.uint8),
    ],
)
def test_a_base_of_4_bits_is_as_the_kernel_in_use_reads_it(monkeypatch, device, dtype):
    monkeypatch.setattr(implementations, "current_device", lambda: device)
    base = quantized_base(make_params(SPARSE), dataclasses.replace(NO_BASE, bits=4))
    leaves = jax.tree.leaves(base, is_leaf=is_quantized)
    found = [each for each in leaves if is_quantized(each)]
    assert {(each.values.dtype, each.is_fragments) for each in found} == {
        (jnp.dtype(dtype), False)
    }


@pytest.mark.slow  # two programs each; `switchx check equivalence` has a layer on every mesh
@pytest.mark.parametrize(("mesh", "kind", "parts"), CELLS)
def test_raw_gradients_on_a_mesh_are_those_of_one_device(bases, mesh, kind, parts):
    dispatcher = "dropless" if "dropless" in kind and mesh == "fsdp" else "gather"
    model = with_switch(SPARSE, dispatcher=dispatcher)
    spec = LoRASpec(bases(SPARSE), rank=2, **KINDS[kind])
    # Small, so that no softmax is sure of itself and rounding counts for little.
    adapters = jax.tree.map(lambda x: x / 4, make_adapters(model, spec))
    alone = quantized_base(make_params(model, seed=9), spec)
    want, value, *_ = gradients_alone(model, alone, adapters, spec)
    job = make_job(
        model, mesh=MESHES[mesh], loss=WEIGHTY, batch_size=ROWS, lora=spec,
        step=StepConfig(num_microbatches=parts),
    )  # fmt: skip
    devices = jax.devices()[: MESHES[mesh].num_devices(1)]
    program = AdapterProgram(job, RunFolder("new"), devices)
    seam_of = functools.partial(adapted_by, spec=spec)
    got, loss, *_ = jax.device_get(raw_gradients(program, params=adapters, seam_of=seam_of))
    np.testing.assert_allclose(loss, value, rtol=3e-6)
    np.testing.assert_allclose(global_norm(got), global_norm(want), rtol=1e-5)
    require_near(got, want, 1e-5)


@pytest.mark.slow
def test_dropout_is_of_the_inputs_of_a_and_the_same_on_a_mesh(bases):
    spec = LoRASpec(bases(DENSE), rank=2, dropout=0.5)
    base, adapters = make_params(DENSE, seed=9), make_adapters(DENSE, spec)
    job = make_job(DENSE, mesh=MeshSpec(data=2, fsdp=2), batch_size=ROWS, lora=spec)
    program = AdapterProgram(job, RunFolder("new"), jax.devices()[:4])

    def loss(dropout, adapters, batch, base):
        own = dataclasses.replace(spec, dropout=dropout)
        given = DENSE, LOSS, StepConfig(), adapters, batch
        return gradients(*given, key=jax.random.key(5), seam=adapted_by(base, own))[1]

    batch = make_batch(DENSE, ROWS)
    alone, other = (float(loss(rate, adapters, batch, base)) for rate in (0.5, 0.0))
    with program.scope():
        placed = jax.device_put(adapters, program.shardings.params)
        on_mesh = jax.jit(functools.partial(loss, 0.5))
        found = on_mesh(placed, program.place(batch), *program.beside)
    np.testing.assert_allclose(found, alone, rtol=1e-6)
    assert abs(alone - other) > 1e-3


@pytest.mark.slow  # two programs
def test_the_state_is_that_of_the_adapters_and_no_gradient_is_of_a_weight(bases):
    wide = dataclasses.replace(DENSE, d_model=64, d_ff=2048, switch=SWITCH)
    job = make_job(wide, lora=LoRASpec(bases(wide), rank=2), optimizer=AdamW(), batch_size=2)
    one = jax.devices()[:1]
    program = AdapterProgram(job, RunFolder("new"), one)
    state = program.abstract_state
    halves = dataclasses.replace(wide, precision=Precision("bfloat16"))
    kept = jax.eval_shape(lambda: init_adapters(halves, job.lora, jax.random.key(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype("float32")}
    size = tree.num_bytes(state.params)
    # Two moments, and the optimizer's counts.
    assert 2 * size <= tree.num_bytes(state.opt_state) <= 2 * size + 16
    batch = jax.eval_shape(lambda: make_batch(wide, 2))
    full, temporary = TrainingProgram(dataclasses.replace(job, lora=None), one), []
    for each in (program, full):
        with each.scope():
            compiled = each.trace_step(batch).lower().compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
        arrays = re.findall(r" = f32\[8,(?:64,2048|2048,64)\]\S* (\w+)\(", compiled.as_text())
        assert (set(arrays) == {"parameter"}) == (each is program)
    weights = tree.num_bytes(abstract_params(wide)["decoder"])
    assert temporary[0] < 0.25 * weights < 0.9 * weights < temporary[1]


def trained(run, base, steps, **changes):
    job = make_job(
        SPARSE, train_steps=steps, lora=LoRASpec(base, rank=2), optimizer=AdamW(), **changes
    )
    train(job, RunFolder(run), events := Events(), devices=jax.devices()[:1])
    return events


@pytest.mark.slow
def test_a_run_goes_on_with_its_base_and_refuses_another(bases, tmp_path):
    base, run = tmp_path / "base", RunFolder(tmp_path / "run")
    shutil.copytree(bases(SPARSE), base)
    trained(run.root, base, 2)
    shutil.rmtree(base / "checkpoints/5")  # is not the one
    assert any("resumed from step 2" in note for note in trained(run.root, base, 4).notes)
    losses = [line["loss"] for line in lines(run.metrics)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    record = json.loads(run.adapter.read_text())
    assert (record["base"], record["step"], record["rank"]) == (str(base), 9, 2)
    assert checkpoint_faults(run, 4) == []
    # What reads a run reads base and adapters, on a mesh and unrolled or not.
    params, own = restore_params(run.root), make_params(SPARSE, seed=9)
    stored = tree.named_leaves(params)
    moved = {
        n for n, leaf in tree.named_leaves(own).items() if not np.array_equal(leaf, stored[n])
    }
    adapters = tree.named_leaves(make_adapters(SPARSE, LoRASpec(base, rank=2)))
    assert moved == {name.rpartition("/")[0] for name in adapters}
    manifest = next((base / "checkpoints/9").glob("*manifest*"))
    content = manifest.read_text()
    manifest.write_text(content.replace("{", "{ ", 1))
    with refused("has another model now, of <any>: put it back, or write the folder of a copy"):
        restore_params(run.root)
    with refused("has another model now"):
        trained(run.root, base, 6)
    manifest.write_text(content)
    base.rename(tmp_path / "moved")
    with refused("which is not there: <any>; put it back, or write the folder of a copy"):
        restore_params(run.root)
    for wrong in ({"base": 5}, {"step": "1"}, {"fingerprint": None}):
        run.adapter.write_text(json.dumps(record | wrong))
        with refused("adapter.json cannot be read"):
            restore_params(run.root)
    run.adapter.write_text(json.dumps(record | {"base": str(tmp_path / "moved")}))
    jax.tree.map(np.testing.assert_array_equal, restore_params(run.root), params)
    run.adapter.write_text(json.dumps(record))  # names the folder that is not there
    trained(run.root, tmp_path / "moved", 4)
    assert json.loads(run.adapter.read_text()) == record | {"base": str(tmp_path / "moved")}
    jax.tree.map(np.testing.assert_array_equal, restore_params(run.root), params)
    with refused("has adapters alone, and a whole model is read here; merge them first"):
        train(make_job(SPARSE, init_from=str(run.root)), RunFolder(tmp_path / "b"), Events())


@pytest.mark.slow  # compiles both layouts
@pytest.mark.usefixtures("one_device")
def test_a_run_with_rates_by_parameter_goes_on_in_the_other_layout(bases, tmp_path):
    run, whole = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "whole")
    step = StepConfig(rate_multipliers=((r".*/b_\w+", 16.0),))

    def job(steps, is_scanned=False):
        model = dataclasses.replace(SPARSE, scan_layers=is_scanned)
        spec = LoRASpec(bases(SPARSE), rank=2)
        return make_job(model, train_steps=steps, lora=spec, optimizer=AdamW(), step=step)

    for steps, is_scanned in ((2, False), (3, True), (4, False)):
        train(job(steps, is_scanned), run, Events())
        assert checkpoint_faults(run, steps) == []
    train(job(4), whole, Events())
    losses, want = ([line["loss"] for line in lines(each.metrics)] for each in (run, whole))
    assert losses == pytest.approx(want, rel=1e-5)
    found = switchx.evaluate(run.root, job(4))["cross_entropy"]
    assert found == pytest.approx(lines(run.validation)[-1]["cross_entropy"], rel=1e-5)


@pytest.mark.slow  # three steps; `restore_params` merges by the same function
def test_the_average_of_adapters_is_that_of_what_training_kept(bases, tmp_path):
    base, run = bases(SPARSE), RunFolder(tmp_path / "run")
    trained(run.root, base, 3, step=StepConfig(ema_decay=0.5))
    spec = LoRASpec(base, rank=2)
    average = read_items(run.checkpoints / "3", {"average": None})["average"]
    want = merged(restore_params(base), average, spec)
    got, last = moving_average(run, 3), restore_params(run.root)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)
    same = jax.tree.map(np.array_equal, got, last)
    assert not all(jax.tree.leaves(same))


def test_what_adapters_exclude_is_refused_by_name(bases):
    def refuse(said, model=SPARSE, base=None, **changes):
        settings = changes.pop("settings", {})
        with refused(said):
            job = make_job(model, lora=LoRASpec(base or bases(SPARSE), **settings), **changes)
            AdapterProgram(job, RunFolder("new"), jax.devices()[:1])

    refuse("LoRASpec.rank=0; use at least 1", settings={"rank": 0})
    refuse("LoRASpec.alpha=0; use a number above 0", settings={"alpha": 0})
    refuse(
        "LoRASpec.targets='ffn' is unknown; use one of attention", settings={"targets": ["ffn"]}
    )
    refuse("LoRASpec.targets=(): nothing would be trained", settings={"targets": ()})
    refuse("LoRASpec.bits=2; use 4 or 8", settings={"bits": 2})
    whole = dataclasses.replace(SPARSE.switch.router, balance_scope="batch")
    refuse(
        "TrainingJob.lora with StepConfig.num_microbatches: RouterConfig.balance_scope='batch'",
        with_switch(SPARSE, router=whole), step=StepConfig(num_microbatches=2),
    )  # fmt: skip
    refuse("LoRASpec.group_size=4 without bits", settings={"group_size": 4})
    refuse(
        "LoRASpec.targets=('experts',) matches no weight of experts: this model has attention, "
        "dense_ffn; use these",
        DENSE, bases(DENSE), settings={"targets": ("experts",)},
    )  # fmt: skip
    refuse(
        "LoRASpec.bits=4 of a model without experts", DENSE, bases(DENSE), settings={"bits": 4}
    )
    refuse("holds another model", DENSE)
    refuse("LoRASpec.base='nowhere' has no config.json", base="nowhere")
    refuse("no complete checkpoint of step 3", settings={"step": 3})
    refuse("lora with MeshSpec.pipe: stages", mesh=MeshSpec(pipe=2))
    refuse("lora with StepConfig.bucket_bytes: ", step=StepConfig(bucket_bytes=1024))
    refuse("lora with StorageSpec.experts: ", storage=StorageSpec("host"))
    refuse("lora with SwitchConfig.num_replicas: ", with_switch(SPARSE, num_replicas=8))
    refuse("lora with TrainingJob.init_from: ", init_from="runs/a")
    refuse("lora with TrainingJob.distillation: ", distillation=Distillation("runs/a"))
    with refused("TrainingJob.lora: plan and compile know steps that train all parameters"):
        workload_of(make_job(SPARSE, lora=LoRASpec(bases(SPARSE))))


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_the_commands_read_a_run_of_adapters_and_merge_it(
    finished_run, in_a_folder, capsys, monkeypatch
):
    base, files = finished_run.folder, finished_run.files
    bindings = ("LORA=@LoRASpec()", f"LoRASpec.base='{base}'", "LoRASpec.rank=2")
    bindings += ("LoRASpec.bits=4", "TRAIN_STEPS=4")
    monkeypatch.chdir(base.parent)  # a relative base is found from another directory, too
    bindings = (bindings[0], f"LoRASpec.base='{base.name}'", *bindings[2:])
    assert main(["train", *arguments(str(in_a_folder / "lora"), files, *bindings)]) == 0
    printed = capsys.readouterr().out
    assert "reshape --merge_adapter" in printed and "INIT_FROM" not in printed
    monkeypatch.chdir(in_a_folder)
    run = RunFolder(in_a_folder / "lora")
    assert "model_flops_per_s" not in run.metrics.read_text()  # no weight has a gradient
    assert AdapterRecord.read(run).spec.bits == 4
    assert main(["reshape", "--model_dir=lora", "--output=whole", "--experts=2"]) == 2
    assert "has adapters; merge them first, with --merge_adapter" in capsys.readouterr().err
    merging = ["reshape", "--model_dir=lora", "--output=whole", "--merge_adapter"]
    assert main([*merging, "--every=2"]) == 2
    assert "--every=2 with --merge_adapter has no effect" in capsys.readouterr().err
    assert main(merging) == 0
    jax.tree.map(
        np.testing.assert_array_equal, restore_params("whole"), restore_params(run.root)
    )
    found = []
    for folder in ("lora", "whole"):
        capsys.readouterr()
        assert main(["eval", *arguments(folder, files), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["cross_entropy"])
    logged = lines(run.validation)[-1]["cross_entropy"]
    assert found == [pytest.approx(logged, rel=1e-5)] * 2
    assert main(["reshape", "--model_dir=whole", "--output=x", "--merge_adapter"]) == 2
    assert "has no adapters to merge" in capsys.readouterr().err
