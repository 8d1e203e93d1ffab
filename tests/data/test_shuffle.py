# SPDX-License-Identifier: Apache-2.0
import pytest

from switchx.data.streams import Shuffled


@pytest.mark.parametrize("num_records", [1, 7, 65_536])
def test_every_epoch_is_another_order_of_all(num_records):
    records = range(100, 100 + num_records)
    shuffled = Shuffled(records, (0, 1))
    epochs = [
        [shuffled[epoch * num_records + i] for i in range(num_records)] for epoch in range(2)
    ]
    assert all(sorted(epoch) == list(records) for epoch in epochs)
    if num_records > 1:
        assert epochs[0] != epochs[1] and epochs[0] != list(records)


@pytest.mark.parametrize("num_records", [50, 70_000])
def test_depends_on_seed_and_index_alone(num_records):
    indices = [5, num_records + 5, 3 * num_records, 6]
    first = [Shuffled(range(num_records), (0,))[i] for i in indices]
    shuffled = Shuffled(range(num_records), (0,))
    assert [shuffled[i] for i in reversed(indices)] == first[::-1]
    assert [Shuffled(range(num_records), (1,))[i] for i in indices] != first


def test_neighbouring_seeds_do_not_share_epochs():
    """Epoch e of seed s must not be epoch 0 of seed s + e."""
    later = [Shuffled(range(50), (0,))[50 + i] for i in range(50)]
    assert later != [Shuffled(range(50), (1,))[i] for i in range(50)]
