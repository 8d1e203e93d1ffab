# SPDX-License-Identifier: Apache-2.0
"""experiments/routing_statistics: what experts tell of labels, on samples made by hand."""

import numpy as np
import pytest

from experiments.routing_statistics.run import (
    Sample,
    beyond,
    of_kinds,
    of_sources,
    section,
    within_tokens,
    word_kinds,
)
from switchx.data.tokenizers import Piece

DOCUMENTS, LENGTH, EXPERTS = 40, 50, 4


class Words:
    """A vocabulary of words, as much of one as kinds of words are made of."""

    pieces = ("<pad>", " the", " and", " cell", "ing", "7", ",")
    size, num_sentinels = len(pieces), 0

    def piece(self, token: int) -> Piece:
        return Piece(self.pieces[token], "text" if token else "control")


def sample(expert_of, seed: int = 0) -> Sample:
    """Two books by turns; `expert_of(rng, book_T, token_T)` are the experts of two layers."""
    rng = np.random.default_rng(seed)
    source_D = np.arange(DOCUMENTS) % 2
    document_T = np.repeat(np.arange(DOCUMENTS), LENGTH)
    token_T = rng.integers(1, len(Words.pieces), len(document_T))
    expert_NT = np.stack([expert_of(rng, source_D[document_T], token_T)] * 2)
    return Sample(
        ["decoder 0", "decoder 1"], EXPERTS, expert_NT[..., None], token_T, document_T, source_D
    )


def test_an_expert_a_book_tells_all_and_by_context():
    found = of_sources(sample(lambda rng, book_T, token_T: book_T), ["a", "b"])
    layer, _ = found["layers"]
    assert layer["told"] == pytest.approx(1)
    assert layer["chance"] < 0.1 and layer["over chance"]["low"] > 0.5
    # Words are of both books alike: permuted among the same word, experts tell nothing.
    assert layer["over the tokens alone"]["low"] > 0.9
    assert layer["counts"] == [[1000, 0], [0, 1000], [0, 0], [0, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_experts_at_random_tell_no_more_than_chance(seed):
    drawn = sample(lambda rng, book_T, token_T: rng.integers(0, EXPERTS, len(token_T)), seed)
    for layer in of_sources(drawn, ["a", "b"])["layers"]:
        for over in ("over chance", "over the tokens alone"):
            assert abs(layer[over]["mean"]) < 0.005
            assert layer[over]["low"] < layer[over]["mean"] < layer[over]["high"]


def test_experts_by_word_tell_of_books_what_the_words_do():
    def by_word(rng, book_T, token_T):
        token_T[book_T == 1] = 1  # the second book says one word
        return token_T % EXPERTS

    for layer in of_sources(sample(by_word), ["a", "b"])["layers"]:
        assert layer["over chance"]["low"] > 0.2
        assert max(map(abs, layer["over the tokens alone"].values())) < 1e-12


def test_experts_change_places_within_a_token_alone():
    rng = np.random.default_rng(0)
    token_T, expert_TS = rng.integers(0, 5, 300), rng.integers(0, EXPERTS, (300, 1))
    permuted_TS = within_tokens(expert_TS, token_T, rng)
    assert not np.array_equal(permuted_TS, expert_TS)
    for token in range(5):
        is_token = token_T == token
        assert sorted(permuted_TS[is_token]) == sorted(expert_TS[is_token])


def test_kinds_of_words_are_closed_classes_and_token_classes():
    names, kind_V = word_kinds(Words())
    kinds = [names[kind] for kind in kind_V]
    assert kinds == [
        "special", "determiner", "conjunction", "word start", "word part", "digits",
        "punctuation",
    ]  # fmt: skip
    found = of_kinds(sample(lambda rng, book_T, token_T: token_T % EXPERTS), Words())
    assert found["names"] == kinds[1:]
    layer = found["layers"][0]
    assert layer["over the tokens alone"] is None
    # Experts are the ids, six of them, two by two: which ids share one is the same by chance.
    assert layer["told"] == pytest.approx(layer["chance"], abs=1e-9) and layer["told"] > 0.7


def test_what_is_beyond_permutations():
    found = beyond(0.5, np.linspace(0.0, 0.4, 401))
    assert (found.mean, found.low, found.high) == pytest.approx((0.3, 0.11, 0.49))


def test_the_map_has_a_panel_a_label_and_layer():
    found = of_sources(sample(lambda rng, book_T, token_T: book_T), ["a", "b"])
    (figure,) = section({"labels": {"book": found}}).figures
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles[:2] == ["book, decoder 0, experts sorted", "book, decoder 1, experts sorted"]
    shown = figure.axes[0].images[0].get_array()
    np.testing.assert_allclose(shown, [[1, 0, 0.5], [0, 0, 0], [0, 0, 0], [0, 1, 0.5]])
