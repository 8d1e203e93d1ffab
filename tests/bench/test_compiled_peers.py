# SPDX-License-Identifier: Apache-2.0
"""Layers by a compiler's clock: kernels of others counted by hand, ratios, bounds, peers.

Dims: R rows, D inputs, F outputs, E experts
"""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.bench import compiled_layer, compiled_peers, compiled_step, peer_layers
from switchx.bench.pallas_grids import pallas_launches
from switchx.bench.peer_layers import LayerShape
from switchx.cli.main import main
from switchx.compiled.moved_bytes import Rates, moved_bytes
from switchx.models.params import params_of
from switchx.moe.layer import SwitchFFN

SHAPE = LayerShape(8, 768, 2048, 16, 512, is_gated=True, capacity_factor=1.25)
SIZES_E = np.array([10, 0, 20, 34], np.int32)


def megablox(x_RD, w_EDF, sizes_E):
    """JAX's own kernel, of which MaxText's is a copy: tiles of 16 rows and 128 x 128."""
    gmm = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    return gmm.gmm(x_RD, w_EDF, sizes_E, jnp.float32, (16, 128, 128))


def traced_megablox(function=megablox):
    shapes = ((64, 256), jnp.float32), ((4, 256, 256), jnp.float32), ((4,), jnp.int32)
    return jax.jit(function).trace(*(jax.ShapeDtypeStruct(*each) for each in shapes)).jaxpr


def test_a_kernel_of_others_is_counted_by_its_grid_and_schedule():
    [launch] = pallas_launches(traced_megablox(), [None, None, SIZES_E])
    # Rows 0 to 10, 10 to 30 and 30 to 64 touch 1, 2 and 3 of the four tiles of 16 rows.
    tiles, blocks_F, blocks_D = 6, 2, 2
    assert launch.flops(SIZES_E) == tiles * 2 * 16 * 256 * 256
    (*_, of_x, of_w), [of_y] = launch.copied(SIZES_E)
    steps = tiles * blocks_F * blocks_D
    assert (of_x, of_w) == (steps * 16 * 128 * 4, steps * 128 * 128 * 4)
    assert of_y == 4 * blocks_F * 16 * 128 * 4  # a tile stays until the last of its experts


def test_a_schedule_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="depends on arguments that are not known"):
        pallas_launches(traced_megablox(), [None, None, None])


def test_a_kernel_in_a_loop_is_an_error():
    def repeated(x_RD, w_EDF, sizes_E):
        return jax.lax.scan(lambda x, _: (megablox(x, w_EDF, sizes_E), None), x_RD, None, 2)[0]

    with pytest.raises(ValueError, match="a Pallas kernel stands in scan"):
        pallas_launches(traced_megablox(repeated), [None, None, SIZES_E])


# As the TPU compiler writes it: a matrix that a nested fusion hands on as it is, cycles of a
# product, a slice that is copied beside other work, and a sort, which has no cycles.
HLO = """\
HloModule m

%handed_on (p: bf16[64,256]) -> bf16[64,256] {
  %p = bf16[64,256]{1,0} parameter(0)
  ROOT %b = bf16[64,256]{1,0} bitcast(%p)
}

%product (p0: bf16[8,64], p1: bf16[64,256]) -> bf16[8,256] {
  %p0 = bf16[8,64]{1,0} parameter(0)
  %p1 = bf16[64,256]{1,0} parameter(1)
  %same = bf16[64,256]{1,0} fusion(%p1), kind=kLoop, calls=%handed_on
  ROOT %c = bf16[8,256]{1,0} convolution(%p0, %same), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[8,64], w: bf16[64,256]) -> bf16[8,256] {
  %a = bf16[8,64]{1,0} parameter(0)
  %w = bf16[64,256]{1,0} parameter(1)
  %y = bf16[8,256]{1,0} fusion(%a, %w), kind=kOutput, calls=%product, \
backend_config={"window_config":{"estimated_cycles":"3000"}}
  %slice-start = (bf16[64,256]{1,0}, bf16[16,256]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%w)
  %slice-done = bf16[16,256]{1,0:S(1)} slice-done(%slice-start)
  %whole = bf16[16,256]{1,0:S(1)} custom-call(%slice-done), custom_call_target="ConcatBitcast"
  ROOT %sorted = bf16[8,256]{1,0} sort(%y), dimensions={1}
}
"""


def test_bytes_and_seconds_by_hand():
    moved = moved_bytes(HLO, rates=Rates(1e12, 1e9, 1e6))
    of_product, of_slice, of_sort = (
        2 * (8 * 64 + 64 * 256 + 8 * 256),
        2 * 16 * 256,
        2 * 2 * 8 * 256,
    )
    assert (moved.kernels, moved.num_bytes) == (3, of_product + of_slice + of_sort)
    assert moved.compiler_s == pytest.approx(3000 / 1e6)
    assert moved.other_s == pytest.approx((of_slice + of_sort) / 1e9)
    assert moved.estimated_s == moved.compiler_s + moved.other_s
    assert moved.roofline_s == pytest.approx((of_product + of_slice + of_sort) / 1e9)
    slow = moved_bytes(HLO, rates=Rates(1e3, 1e9, 1e6))
    flops = 2 * 8 * 64 * 256
    assert slow.roofline_s == pytest.approx(flops / 1e3 + (of_slice + of_sort) / 1e9)


def test_cycles_are_those_of_the_chips():
    """1.5 GHz and 1.75 GHz, which Google names for these chips."""
    assert compiled_layer.rates_of("v5e").cycles_per_s == pytest.approx(1.5e9, rel=0.01)
    assert compiled_layer.rates_of("v5p").cycles_per_s == pytest.approx(1.75e9, rel=0.01)


def test_the_ideal_by_hand():
    products, router = 8192 * 6 * 768 * 2048, 8192 * 2 * 768 * 8
    assert compiled_peers.ideal_flops(SHAPE, "forward", 1.25) == 1.25 * products + router
    assert compiled_peers.ideal_flops(SHAPE, "backward", None) == 3 * (products + router)


def test_a_recorded_routing_is_the_split(key):
    """Our own router sends the recorded rows where the split says."""
    shape = LayerShape(4, 16, 32, 16, 512, is_gated=True, capacity_factor=None)
    sizes_E = np.array([4096, 2048, 2048, 0])
    arguments = [
        jax.ShapeDtypeStruct(each, jnp.float32)
        for each in ((4, 16, 32), (16, 4), (16, 512, 16))
    ]
    nothing, w_DE, x_BLD = compiled_peers.recorded_routing(arguments, shape, sizes_E)
    assert nothing is None
    chosen_R = np.argmax(np.asarray(x_BLD).reshape(-1, 16) @ np.asarray(w_DE), axis=-1)
    np.testing.assert_array_equal(np.bincount(chosen_R, minlength=4), sizes_E)


def row(layer, seconds, factor=1.25, **changes):
    return {
        "layer": layer, "target": "v5e:2x2", "experts": 64, "pass": "forward",
        "rows_by_expert": "zipf", "capacity_factor": factor, "estimated_s": seconds,
        "flops_vs_ideal": 1.0, "bytes_vs_ideal": 1.2,
    } | changes  # fmt: skip


def test_the_default_is_held_against_the_quickest_peer_of_its_cell():
    rows = compiled_peers.with_ratios([
        row("gather", 8.0), row("gather", 3.0, 1.0, bytes_vs_ideal=1.6),
        row("dropless", 1.0, None),
        row("maxtext", 10.0, None), row("flaxformer", 16.0),
        row("flaxformer", 1.0, experts=8),  # another cell
        row("flaxformer", 2.0, 1.0, rows_by_expert="balanced"),
        {"layer": "maxtext", "target": "v5e:2x2", "not_compared": "why"},
        {"target": "v5p:2x2x1", "not_run": "absent"},
    ])  # fmt: skip
    assert [each.get("seconds_vs_best_peer") for each in rows[:3]] == [0.8, 0.3, None]
    found = {each.name: (each.value, each.holds) for each in compiled_peers.checks(rows)}
    assert found == {
        "flops_vs_ideal": (1.0, True),
        "bytes_vs_ideal": (1.6, False),
        "seconds_vs_best_peer": (0.8, True),
    }
    assert compiled_peers.checks(rows[-2:]) == []


def test_a_folder_that_is_no_clone_is_an_error(tmp_path, capsys):
    (tmp_path / "src" / "maxtext").mkdir(parents=True)
    (tmp_path / "src" / "maxtext" / "__init__.py").touch()
    assert peer_layers.folder_on_path(str(tmp_path)) == str(tmp_path / "src")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["bench", "compiled", f"--peer={empty}"]) == 2
    assert f"--peer={empty}: expected a clone of google/flaxformer" in capsys.readouterr().err


def test_peers_whose_code_is_not_given_are_not_compared(tmp_path, monkeypatch, capsys):
    for variable in ("SWITCHX_AOT_TPU", "SWITCHX_AOT_GPU"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert main(["bench", "compiled", "--quick", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["checks"] == []
    without = [each for each in printed["results"] if "not_compared" in each]
    assert {each["layer"] for each in without} == {"flaxformer", "maxtext"}
    assert all("--peer=FOLDER" in each["not_compared"] for each in without)


def test_bytes_of_products_count_a_loop_by_its_length():
    def repeated(x_RD, w_NDD):
        return jax.lax.scan(lambda x, w: (x @ w, None), x_RD, w_NDD)[0]

    shapes = (jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in ((8, 64), (3, 64, 64)))
    jaxpr = jax.jit(repeated).trace(*shapes).jaxpr.jaxpr
    assert compiled_step.product_bytes(jaxpr) == 3 * 2 * (2 * 8 * 64 + 64 * 64)


@pytest.mark.slow
@pytest.mark.skipif(
    not peer_layers.has_peer("maxtext"),
    reason="needs a clone of AI-Hypercomputer/maxtext with its requirements on PYTHONPATH",
)
def test_with_our_weights_maxtexts_layer_gives_our_outputs(key):
    """But for the gate: MaxText normalizes after its choice of one, and multiplies by 1."""
    shape = LayerShape(4, 128, 128, 2, 32, is_gated=True, capacity_factor=None)
    ours = SwitchFFN(compiled_peers.our_config("dropless", shape), key=key)
    params = params_of(ours)
    x_BLD = jnp.array(np.random.default_rng(0).normal(size=(2, 32, 128)), jnp.float32)
    y_BLD, stats = ours(x_BLD, jnp.ones((2, 32), bool), is_training=False)
    [choices] = stats.choices
    forward, theirs = peer_layers.maxtext_forward(shape, jax.devices()[0])
    experts = params["experts"]
    named = {
        "gate": params["w_router_DE"], "wi_0": experts["w_in_EDF"],
        "wi_1": experts["w_gate_EDF"], "wo": experts["w_out_EFD"],
    }  # fmt: skip
    theirs = jax.tree_util.tree_map_with_path(lambda path, _: named[path[0].key], theirs)
    found_BLD, _ = forward(theirs, x_BLD)
    np.testing.assert_allclose(found_BLD * choices.gate_BLS, y_BLD, rtol=1e-3, atol=1e-4)


@pytest.mark.aot
@pytest.mark.timeout(1800)
def test_layers_of_switch_base_compile_near_the_ideal():
    rows = compiled_peers.rows_of_child(compiled_peers.__name__, "v5e:2x2", "1")
    if "not_run" in rows[0]:
        pytest.skip(rows[0]["not_run"])
    assert {each["layer"] for each in rows} == set(compiled_peers.OURS)
    assert [each.name for each in compiled_peers.checks(rows) if not each.holds] == []
