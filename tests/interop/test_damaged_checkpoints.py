# SPDX-License-Identifier: Apache-2.0
"""Bytes of a checkpoint changed at random: it is read, or refused, and nothing else happens."""

import random

import pytest

from switchx.interop import huggingface, t5x
from tests.interop.folders import SWITCH, huggingface_folder
from tests.interop.t5x_files import SWITCH as T5X_SWITCH
from tests.interop.t5x_files import by_layers, write_t5x
from tests.training.jobs import make_params


def huggingface_reader(folder):
    huggingface_folder(folder, SWITCH, most_shard_bytes=20_000)
    return lambda: huggingface.read_checkpoint(folder)


def t5x_reader(folder):
    tree = by_layers(T5X_SWITCH, make_params(T5X_SWITCH))
    write_t5x(folder, tree, compressor="gzip")
    return lambda: t5x.read_checkpoint(folder, T5X_SWITCH)


@pytest.mark.parametrize("make_reader", [huggingface_reader, t5x_reader])
def test_damage_is_refused_as_a_value_error(tmp_path, make_reader):
    read = make_reader(tmp_path / "checkpoint")
    read()
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    draw, num_refused = random.Random(0), 0
    for _ in range(60):
        path = draw.choice(files)
        content = path.read_bytes()
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 3)):  # where headers are
            damaged[draw.randrange(min(len(damaged), 2000))] = draw.randrange(256)
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            read()
        except ValueError:
            num_refused += 1
        path.write_bytes(content)
    assert num_refused > 20
    read()
