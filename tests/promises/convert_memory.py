# SPDX-License-Identifier: Apache-2.0
"""Memory of `switchx convert` on a model of a GiB, in a process of its own.

`convert_rss_over_budget` is the most memory that the process had while it converted, less what
it had before reading, over the model's largest array plus the arrays of one stacked layer;
`convert_back_rss_over_budget` the same of a process that writes what the first has written.
`python -m tests.promises.convert_memory FOLDER` makes the model there and converts it; a
second run converts that back.
Dims: D model, E experts, F ffn, V vocabulary
"""

import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

from switchx.bench.storage import of_child
from switchx.cli.main import main as switchx
from switchx.interop.decoder_descriptions import describe
from switchx.interop.decoder_tensors import tensor_names
from switchx.interop.tensor_folder import torch_shapes, write_json, write_safetensors
from switchx.models.config import ModelConfig, RouterConfig, SwitchConfig
from tests.processes import peak_rss_bytes
from tests.promises.storage_memory import MEBIBYTE

# A layer of 384 MiB in float32, its largest array 128: beside Orbax' cache of 100.
ROUTER = RouterConfig(num_selected=2, gate="normalized", overflow="dropless")
MODEL = ModelConfig(
    "decoder_only", 4096, 1024, 2048, 8, 128, 3, activation="swiglu", positions="rotary",
    num_kv_heads=4, max_length=4096, norm_epsilon=1e-5, scale_attention=True,
    tie_embeddings=False, scale_tied_logits=False,
    switch=SwitchConfig(16, every=1, router=ROUTER, expert_bias=False),
)  # fmt: skip
SHARD_BYTES = 200 * MEBIBYTE


def conversion() -> Iterator[tuple]:
    """Memory of `convert` from transformers and back above the process's, over the budget."""
    with tempfile.TemporaryDirectory() as folder:
        row, back = (of_child(__name__, folder) for _ in range(2))
    row["back_more_mib"] = back["more_mib"]
    for name, value in row.items():
        yield name, "Mixtral's form", value
    for name, more in ("convert", "more_mib"), ("convert_back", "back_more_mib"):
        yield f"{name}_rss_over_budget", "Mixtral's form", row[more] / row["budget_mib"]


def main(folder: str) -> None:
    folder = pathlib.Path(folder)
    if (folder / "ours").is_dir():
        words = ["convert", "--to=huggingface", str(folder / "ours"), str(folder / "back")]
        print(json.dumps({"more_mib": memory_of(words)}))
        return
    kin, values, _ = describe(MODEL)
    shapes = torch_shapes(tensor_names(kin, MODEL), MODEL)
    (theirs := folder / "theirs").mkdir()
    write_json(theirs / "config.json", values | {"eos_token_id": 2, "pad_token_id": 0})
    rng = np.random.default_rng(0)
    tensors = ((name, Drawn(rng, shape)) for name, shape in shapes.items())
    write_safetensors(theirs, tensors, SHARD_BYTES)
    num_bytes = {name: 4 * math.prod(shape) for name, shape in shapes.items()}
    stacked = {}  # of our parameters in the first layer, experts together
    for parameter, names in tensor_names(kin, MODEL).items():
        stacked[parameter] = sum(num_bytes[name] for name in names)
    layer = sum(size for name, size in stacked.items() if "/layer_0/" in name)
    row = {
        "model_mib": sum(num_bytes.values()) / MEBIBYTE,
        "budget_mib": (max(stacked.values()) + layer) / MEBIBYTE,
    }
    words = ["convert", "--from=huggingface", str(theirs), str(folder / "ours")]
    print(json.dumps(row | {"more_mib": memory_of(words)}))


class Drawn:
    """Random numbers that are drawn as they are written."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...]):
        self._rng, self.shape, self.dtype = rng, shape, np.dtype(np.float32)
        self.nbytes = 4 * math.prod(shape)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self._rng.random(self.shape, np.float32)


def memory_of(words: list[str]) -> float:
    """Peak memory of a command above what the process had before, in MiB."""
    before = reset_peak()
    assert switchx(words) == 0, words
    return (peak_rss_bytes() - before) / MEBIBYTE


def reset_peak() -> int:
    """Makes Linux count the peak from now on; returns the bytes in use now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return peak_rss_bytes()


if __name__ == "__main__":
    main(sys.argv[1])
