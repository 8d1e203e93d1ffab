# SPDX-License-Identifier: Apache-2.0
"""Experts taken apart: those and nothing else, and the same texts."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import SeparateMatrices
from switchx import tree
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator
from switchx.inference.quantize import quantize_experts
from switchx.inference.quantize import separate_experts
from tests.inference import tiny


def is_separate(leaf) -> bool:
    return isinstance(leaf, SeparateMatrices)


def taken_apart(params) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_separate)
    return {tree.path_name(path) for path, leaf in leaves if is_separate(leaf)}


def test_takes_experts_apart_and_nothing_else():
    config, params = tiny.model()
    names = taken_apart(separate_experts(params))
    assert names and names == {
        name for name in tree.named_leaves(params) if "/experts/w_" in name
    }


def test_what_is_apart_stays_as_it_is():
    _, params = tiny.model()
    apart = separate_experts(params)
    again = separate_experts(apart)
    for one, other in zip(jax.tree.leaves(apart), jax.tree.leaves(again), strict=True):
        assert one is other


def test_quantized_experts_and_those_of_a_mesh_stay_as_they_are():
    config, params = tiny.model()
    _, quantized, _, _ = quantize_experts(config, params, bits=8)
    assert taken_apart(separate_experts(quantized)) == set()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert taken_apart(separate_experts(jax.device_put(params, everywhere))) == set()


def test_texts_are_those_of_the_stacked_experts():
    config, params = tiny.model()
    inputs = np.random.default_rng(0).integers(3, config.vocab_size, (5, 7)).tolist()
    for beams in (1, 3):
        generator = Generator(config, params, DecodingConfig(6, beam_size=beams), 4)
        apart = dict(generator(inputs))
        generator.params = jax.tree.map(jnp.asarray, params)
        stacked = dict(generator(inputs))
        for number in range(len(inputs)):
            assert apart[number][0].tokens == stacked[number][0].tokens
            np.testing.assert_allclose(
                apart[number][0].score, stacked[number][0].score, rtol=1e-5
            )
