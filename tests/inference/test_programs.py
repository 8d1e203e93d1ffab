# SPDX-License-Identifier: Apache-2.0
"""Programs of decoding: few for many settings, a bounded number, what prefill needs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.inference.config import NEW_TOKENS, DecodingConfig
from switchx.inference.decode import prefill
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.logits_processors import Rows, RowSettings
from switchx.inference.program_cache import COMPILATIONS, Programs, num_maps
from switchx.inference.running_batch import are_compiled
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from tests.inference import slot_models, tiny


def scaled(factor, params):
    return jnp.sort(params) * factor


def moved(factor, x_B):
    return x_B[::-1] * factor


def test_the_least_recently_used_program_leaves():
    programs = Programs(most=2)

    def run(factor):
        return programs.run(scaled, (factor,), (3,), params=np.arange(3.0)).tolist()

    assert [run(1), run(2), run(1), run(3)] == [[0, 1, 2], [0, 2, 4], [0, 1, 2], [0, 3, 6]]
    assert len(programs) == 2
    held = [programs.holds(scaled, (factor,), (3,)) for factor in (1, 2, 3)]
    assert held == [True, False, True]
    assert run(2) == [0, 2, 4]


@pytest.mark.skipif(num_maps() == 0, reason="the system does not say its memory maps")
def test_memory_maps_of_programs_that_left_are_given_back():
    programs, found = Programs(most=3), []
    for factor in range(30):
        before = COMPILATIONS.number
        programs.run(scaled, (factor + 0.5,), (3,), params=np.arange(3.0))
        assert COMPILATIONS.number > before
        found.append(num_maps())
    # A program has some maps; 20 more that were compiled since have none.
    assert found[-1] <= found[9] + 2


def test_few_maps_that_are_left_bound_them_too(monkeypatch):
    programs = Programs(most=9)
    monkeypatch.setattr("switchx.inference.program_cache.share_of_maps", lambda: 0.51)
    for factor in range(3):
        programs.run(scaled, (factor,), (3,), params=np.arange(3.0))
    assert len(programs) == 1


def test_eight_programs_without_weights_count_as_one_with():
    programs = Programs(most=2)
    programs.run(scaled, (1,), (3,), params=np.arange(3.0))
    for factor in range(9):
        programs.run(moved, (factor,), (3,), x_B=np.arange(3.0))
        # Eight beside the one; with the ninth it leaves, as it was used longest ago.
        assert programs.holds(scaled, (1,), (3,)) == (factor < 8)
    assert len(programs) == 9


def test_programs_that_are_cut_are_kept_with_the_others(monkeypatch):
    """What has left gives its maps back, and is compiled again.

    Steps have three parts, prompts two: what their last experts say is not read.
    """
    programs = Programs(most=3)
    for user in ("offload.cut_program", "running_batch"):
        monkeypatch.setattr(f"switchx.inference.{user}.PROGRAMS", programs)
    config, experts = slot_models.with_slots("gpt", 4, 2)
    generator = slot_models.generator(config, experts, 1)
    said = slot_models.written(generator)
    assert len(programs) == 2  # for prompts and for steps
    assert are_compiled(generator, 4, 4) and not are_compiled(generator, 4, 8)
    before = num_maps()
    programs.run(scaled, (1,), (3,), params=np.arange(3.0))
    assert len(programs) == 3 and are_compiled(generator, 4, 4)
    for number in (2, 3):
        programs.run(scaled, (number,), (3,), params=np.arange(3.0))
    assert len(programs) == 3 and not are_compiled(generator, 4, 4)
    assert before == 0 or num_maps() < before
    number = COMPILATIONS.number
    assert slot_models.written(generator) == said
    assert COMPILATIONS.number == number + 2 + 3


def test_other_settings_compile_nothing_and_say_other_texts():
    sampling = DecodingConfig(6, temperature=1.0, seed=1, eos_id=-1, pruning="experts")
    others = [
        dataclasses.replace(sampling, seed=5),
        dataclasses.replace(sampling, temperature=0.3, top_k=4),
        dataclasses.replace(sampling, top_p=0.4, length_penalty=-2.0),
        dataclasses.replace(sampling, max_new_tokens=16, length_penalty=0.0),
    ]

    def said(decoding):
        generator = Generator(*tiny.model(), decoding, 4)
        return {number: best for number, (best,) in generator([[3, 4, 5, 8], [6, 2, 7]])}

    first = said(sampling)
    assert are_compiled(Generator(*tiny.model(), sampling, 4), 2, 4)
    assert not are_compiled(Generator(*tiny.model(), sampling, 4), 2, 8)
    before, texts = COMPILATIONS.number, [first]
    for decoding in others:
        texts.append(said(decoding))
    assert COMPILATIONS.number == before
    assert len({str(each) for each in texts}) == len(texts)
    # With places for more tokens the first ones are the same.
    assert [len(each.tokens) for each in texts[-1].values()] == [16, 16]
    for number, each in first.items():
        assert texts[-1][number].tokens[:6] == each.tokens


def test_numbers_of_new_tokens_are_rounded_up():
    assert DecodingConfig(1).program == DecodingConfig(16).program
    assert DecodingConfig(17).program.max_new_tokens == 32
    assert DecodingConfig(2**20).program.max_new_tokens == 2**20 == NEW_TOKENS[-1]


def test_a_prompt_has_logits_of_its_last_place_alone():
    """By the compiler's account, temporaries have no logits of all places."""
    B, P, V = 8, 64, 8192
    config = for_decoding(ModelConfig("decoder_only", V, 8, 8, 1, 8, 1))
    decoding = DecodingConfig(16)
    rows = Rows(
        jnp.arange(B), jnp.ones(B, bool), jnp.full(B, 16), RowSettings.of([decoding] * B)
    )
    compiled = prefill.lower(
        config,
        decoding.program,
        abstract_params(config),
        prompt_BP=jax.ShapeDtypeStruct((B, P), jnp.int32),
        is_prompt_BP=jax.ShapeDtypeStruct((B, P), bool),
        rows=rows,
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < B * P * V * 4 / 4
