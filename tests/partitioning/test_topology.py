# SPDX-License-Identifier: Apache-2.0
import pytest

from switchx.partitioning.topology import GENERATIONS, Topology


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("v4:8x8x16", 1024),
        ("v4:2x2x1", 4),
        ("v5e:16x16", 256),
        ("v5p:8x8x16", 1024),
        ("v5p:16x16x24", 6144),
        ("tpu7x:2x2x1", 8),
        ("h200:8", 8),
    ],
)
def test_a_slice_and_its_devices(text, devices):
    topology = Topology.parse(text)
    assert str(topology) == text
    assert topology.num_devices == devices


def test_one_gpu_needs_no_number():
    assert Topology.parse("h200") == Topology.parse("h200:1")


@pytest.mark.parametrize(
    ("text", "said", "way_out"),
    [
        ("v9:2x2", "there is no 'v9'", "v4, v5e, v5p"),
        ("v4", "not understood", "as v4:8x8x16"),
        ("v4:8 x 8", "not understood", "KIND:SIDES"),
        ("v4:8x8x5", "does not exist", "use v4:8x8x4"),
        ("v4:3x3x3", "3 sides, each 2 or a multiple of 4", "use v4:4x4x4"),
        ("v4:8x8", "has 3 sides", "use v4:4x4x4"),
        ("v5e:16x16x1", "has 2 sides", "use v5e:16x16"),
        ("v5e:32x32", "at most 256 chips", "use v5e:16x16"),
        ("v5e:2x128", "2 sides, of 2x2, 2x4,", "use v5e:16x16"),
        ("v5e:6x10", "does not exist", "use v5e:8x8"),
        ("v6e:8x4", "does not exist", "use v6e:4x8"),
        ("v5e:0x7", "does not exist", "use v5e:2x2"),
        ("v4:0x2x2", "does not exist", "use v4:2x2x2"),
        ("h200:9", "1 to 8", "use h200:8"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_is_near(text, said, way_out):
    with pytest.raises(ValueError, match="topology") as error:
        Topology.parse(text)
    assert said in str(error.value)
    assert way_out in str(error.value)


def test_slices_of_so_many_devices():
    assert str(Topology.parse("v4:2x2x1").with_devices(1024)[0]) == "v4:8x8x16"
    assert str(Topology.parse("v5e:2x2").with_devices(256)[0]) == "v5e:16x16"
    assert Topology.parse("v5e:2x2").with_devices(512) == []
    assert Topology.parse("tpu7x:2x2x1").with_devices(9) == []  # cores come in pairs


def test_what_is_proposed_exists():
    """Every way out that an error can name is a slice itself."""
    for kind, generation in GENERATIONS.items():
        for devices in (1, 8, 32, 256, 2048):
            for one in Topology.parse(f"{kind}:{'x'.join('2' * generation.axes)}").with_devices(
                devices
            ):
                assert Topology.parse(str(one)).num_devices == devices
