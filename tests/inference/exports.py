# SPDX-License-Identifier: Apache-2.0
"""A small model, its inputs and its exports, for what writes and what runs them."""

import hashlib
import json

from switchx.inference.config import DecodingConfig
from switchx.inference.export import Shapes, Target, export_model
from switchx.inference.generate import Generator, for_decoding
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.partitioning.mesh import MeshSpec
from tests.inference.tiny import V, written

DECODER = ModelConfig(
    "decoder_only", V, 16, 32, 4, 8, 1, switch=SwitchConfig(4, every=1), init_scale=4.0
)
INPUTS = [[3, 4, 5, 8, 2], [6, 2, 7, 8, 9, 10], [5]]
SHAPES = Shapes(batch_size=4, input_length=6)
MESH = MeshSpec(data=2, expert=2, model=2)
REBUILD = "switchx export --model_dir=runs/x"


def export(folder, model, platforms, *, mesh=None, **decoding):
    """The manifest."""
    settings = DecodingConfig(max_new_tokens=5, **decoding)
    targets = [Target(platform, mesh=mesh) for platform in platforms]
    return export_model(folder, *model, settings, SHAPES, targets, {"rebuild": REBUILD})[0]


def generated(model, **decoding) -> list[list[tuple[list[int], float]]]:
    """What switchx says: of each input its hypotheses."""
    settings = DecodingConfig(max_new_tokens=5, pruning="experts", **decoding)
    config, params = model
    said = written(Generator(for_decoding(config), params, settings, 4), INPUTS)
    return [[(each.tokens, each.score) for each in hypotheses] for hypotheses in said]


def rewrite(folder, change) -> None:
    """The manifest, changed by one who knows its checksum."""
    content = json.loads((folder / "export.json").read_text())
    del content["sha256"]
    change(content)
    text = json.dumps(content, sort_keys=True)
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "export.json").write_text(json.dumps(content))
