# SPDX-License-Identifier: Apache-2.0
"""Rows of a vocabulary on eight devices against NumPy: owners, requests, what returns."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from switchx.compiled.collectives import collectives
from switchx.partitioning.mesh import MeshSpec
from switchx.partitioning.vocab import RowOwners, buffer_rows, look_up, requests
from tests.data.refusals import refused

P, V, D, T = 8, 1024, 4, 64
AXES = ("data", "expert")
MESH = MeshSpec(data=2, expert=4).build()
OWNERS = RowOwners(V, P)


@pytest.mark.parametrize("num_rows", [V, 8 * 13, 8])
def test_dealt_rows_are_where_their_owner_says(num_rows):
    """A block that its devices divide, one that they do not, and one row a device."""
    owners = RowOwners(num_rows, P)
    table_VD = np.random.default_rng(0).normal(size=(num_rows, D)).astype(np.float32)
    deal = jax.shard_map(
        lambda table_VD: owners.deal(table_VD, AXES)[None],
        mesh=MESH,
        in_specs=PartitionSpec(AXES),
        out_specs=PartitionSpec(AXES),
    )
    rows_PRD, pull_back = jax.vjp(jax.jit(deal), table_VD)
    owner_V, place_V = owners.of(np.arange(num_rows))
    np.testing.assert_array_equal(np.asarray(rows_PRD)[owner_V, place_V], table_VD)
    np.testing.assert_array_equal(pull_back(rows_PRD)[0], table_VD)


@given(st.lists(st.integers(0, V - 1), min_size=1, max_size=80))
@settings(max_examples=30)
def test_an_id_is_requested_once_however_often_it_occurs(ids):
    place_T, asked_P = jax.jit(requests, static_argnums=1)(np.array(ids, np.int32), OWNERS)
    different = sorted(set(ids))
    owner_U = np.array(different) % P
    np.testing.assert_array_equal(asked_P, np.bincount(owner_U, minlength=P))
    place = dict(zip(ids, np.asarray(place_T).tolist(), strict=True))
    for p in range(P):
        places = sorted(place[v] for v in different if v % P == p)
        assert places == list(range(len(places)))


def test_buffers_are_a_share_and_never_more_than_can_be_requested():
    assert buffer_rows(64, OWNERS, 1.0) == (8, 64)
    assert buffer_rows(64, OWNERS, 1.3) == (11, 64)
    assert buffer_rows(64, OWNERS, 100.0) == (64, 64)
    # No more different rows than the owner has.
    assert buffer_rows(4096, OWNERS, 1.0) == (128, 128)


def on_devices(table_VD, id_PT, dy_PTD, factor=1.0):
    """Looked-up rows and the table's raw gradient."""

    def local(table_VD, id_PT):
        rows_RD = OWNERS.deal(table_VD, AXES)
        options = dict(factor=factor, everywhere=AXES)
        return look_up(rows_RD, id_PT[0], OWNERS, AXES, **options)[None]

    spec = PartitionSpec(AXES)
    run = jax.shard_map(local, mesh=MESH, in_specs=(spec, spec), out_specs=spec)
    x_PTD, pull_back = jax.vjp(lambda table_VD: run(table_VD, id_PT), table_VD)
    return x_PTD, pull_back(dy_PTD)[0]


run = jax.jit(on_devices, static_argnums=3)
RNG = np.random.default_rng(0)
TABLE_VD = RNG.normal(size=(V, D)).astype(np.float32)
# Whole numbers: their sums are exact in any order, so gradients have to be equal bit by bit.
DY_PTD = RNG.integers(-8, 9, (P, T, D)).astype(np.float32)
ZIPF = np.minimum(RNG.zipf(1.3, (P, T)) - 1, V - 1)
IDS = {
    "random": RNG.integers(0, V, (P, T)),
    "text-like (Zipf)": ZIPF,
    "all the same": np.full((P, T), 5),
    "all of one owner": RNG.integers(0, V // P, (P, T)) * P + 3,
    "one device asks one owner": np.where(np.arange(P)[:, None] == 2, np.arange(T) * P, 7),
    "one device's block": RNG.integers(0, V // P, (P, T)),
}


def assert_as_whole(id_PT):
    """The rows and the raw gradient are those of a table that every device has."""
    x_PTD, dtable_VD = run(TABLE_VD, id_PT.astype(np.int32), DY_PTD)
    np.testing.assert_array_equal(x_PTD, TABLE_VD[id_PT])
    expected = np.zeros((V, D), np.float32)
    np.add.at(expected, id_PT, DY_PTD)
    np.testing.assert_array_equal(dtable_VD, expected)


@pytest.mark.parametrize("name", IDS)
def test_rows_and_gradients_are_those_of_the_whole_table(name):
    assert_as_whole(IDS[name])


@given(st.integers(0, 2**32 - 1), st.integers(0, V - 1), st.integers(1, V))
@settings(max_examples=15)
def test_any_ids_give_the_rows_and_gradients_of_the_whole_table(seed, first, span):
    id_PT = np.random.default_rng(seed).integers(first, first + span, (P, T)) % V
    assert_as_whole(id_PT)


def test_skewed_text_does_not_overload_an_owner():
    """A vocabulary and a batch of a usual size, and words as frequent as Zipf says."""
    owners, tokens = RowOwners(32768, P), 4096
    rng = np.random.default_rng(1)
    frequency_V = 1 / np.arange(1, owners.num_rows + 1)
    frequency_V /= frequency_V.sum()
    asked = [np.unique(rng.choice(owners.num_rows, tokens, p=frequency_V)) for _ in range(P)]

    def counts(owner_of):
        return np.array([np.bincount(owner_of(ids), minlength=P) for ids in asked])

    hashed_PP = counts(lambda ids: owners.of(ids)[0])
    blocks_PP = counts(lambda ids: ids // owners.block)
    room, most = buffer_rows(tokens, owners, 1.0)
    assert (room, most) == (512, 4096)
    assert hashed_PP.max() < 0.6 * room
    assert hashed_PP.sum(axis=0).max() < 1.1 * hashed_PP.sum(axis=0).mean()
    # Without hashing, the first block has the frequent words.
    assert blocks_PP.max() > room
    assert blocks_PP.sum(axis=0).max() > 3 * blocks_PP.sum(axis=0).mean()


def test_ids_out_rows_back_and_gradients_back_are_three_all_to_alls():
    """SE-MoE, Figure 9; and one each way deals the blocks."""
    id_PT = np.zeros((P, T), np.int32)
    hlo = run.lower(TABLE_VD, id_PT, DY_PTD, 1.0).compile().as_text()
    found = [(each.kind, each.num_bytes) for each in collectives(hlo)]
    expected = [("all-reduce", 4)]  # whether some buffer is too small
    expected += [("all-to-all", 4 * V // P * D)] * 2  # blocks dealt
    for room in buffer_rows(T, OWNERS, 1.0):  # one of the two runs
        ids, rows = 4 * P * room, 4 * P * room * D
        expected += [("all-to-all", ids), ("all-to-all", rows), ("all-to-all", rows)]
    assert sorted(found) == sorted(expected)


def test_a_vocabulary_that_the_devices_do_not_divide_is_refused():
    with refused(
        "a vocabulary of V=1001 rows is not divisible by the 8 devices that hold them"
    ):
        RowOwners(1001, 8)
