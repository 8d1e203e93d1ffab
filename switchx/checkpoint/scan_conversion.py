# SPDX-License-Identifier: Apache-2.0
"""Run folders made of others: layers scanned or unrolled, and models from elsewhere.

In another layout of layers, parameters and all that the optimizer keeps for them are cut or
stacked over N; not a number changes. (A run that is resumed, evaluated or loaded needs no such
folder: `restore.py` does the same on the way.) A model from elsewhere becomes a run folder
whose checkpoint 0 holds parameters alone. Whatever reads a run's parameters reads both.
"""

import dataclasses
import json
import pathlib
import re
import shutil

import orbax.checkpoint as ocp

from switchx.checkpoint.items import (
    Manifest,
    items_of,
    read_items,
    read_manifest,
    require_same_leaves,
    write_manifest,
)
from switchx.checkpoint.run_folder import RunFolder, read_config, read_model_config
from switchx.data.data_dir import write_atomically
from switchx.data.vocabularies import save_vocabulary
from switchx.fields import describe
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from switchx.models.unroll import scanned_blocks, unrolled_blocks
from switchx.tree import Tree, named_leaves

# What of a run is true of the converted one, too; its metrics and routing stay behind.
_COPIED = ("git_commit.txt", "vocabulary.*", "model.gin")
_SCAN = re.compile(r"^(\w+\.|)ModelConfig\.scan_layers = .*$", re.MULTILINE)
_MODEL = re.compile(r"^((?:\w+\.)?ModelConfig)\.\w+ = ", re.MULTILINE)


def write_converted_layout(
    run: RunFolder, step: int, folder: pathlib.Path, *, is_scanned: bool
) -> None:
    """Writes one whole checkpoint of a run, in that layout, as a run of its own.

    Args:
        step: of a complete checkpoint.
        folder: exists and is empty; give it its name when this returns.

    Raises:
        ValueError: the run has that layout already, or its layers do not repeat.
    """
    config = read_model_config(run)
    layout = "scanned" if is_scanned else "unrolled"
    if config.scan_layers == is_scanned:
        raise ValueError(f"the layers of {run.root} are {layout} already; nothing to convert")
    converted = dataclasses.replace(config, scan_layers=is_scanned)
    source = run.checkpoints / str(step)
    items = read_items(source, dict.fromkeys(items_of(source)))
    if is_scanned:
        items = {name: scanned_blocks(item, config.period) for name, item in items.items()}
    else:
        items = {name: unrolled_blocks(item) for name, item in items.items()}
    _require_model(converted, items["params"])
    target = folder / "checkpoints" / str(step)
    target.mkdir(parents=True)
    with ocp.StandardCheckpointer() as writer:
        for name, item in items.items():
            writer.save(target / name, item)
    if (source / "data").is_dir():
        shutil.copytree(source / "data", target / "data")
    _write_records(run, folder, is_scanned)
    was = read_manifest(source)
    write_manifest(target, Manifest(step, was.score, was.metrics))


def _require_model(config, params: Tree) -> None:
    expected = named_leaves(abstract_params(config))
    require_same_leaves(expected, named_leaves(params), "the converted checkpoint")


def _write_records(run: RunFolder, folder: pathlib.Path, is_scanned: bool) -> None:
    for pattern in _COPIED:
        for path in run.root.glob(pattern):
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
    description = read_config(run)
    description["model"]["scan_layers"] = is_scanned
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    if run.operative_config.exists():
        text = run.operative_config.read_text(encoding="utf-8")
        (folder / "operative_config.gin").write_text(_with_scan(text, is_scanned))


def _with_scan(gin: str, is_scanned: bool) -> str:
    """The operative configuration of the other layout."""
    if _SCAN.search(gin):
        return _SCAN.sub(
            lambda match: f"{match[1] or ''}ModelConfig.scan_layers = {is_scanned}", gin
        )
    model = _MODEL.search(gin)
    name = model[1] if model else "ModelConfig"
    return f"{gin}\n{name}.scan_layers = {is_scanned}\n"


STEP = 0


def write_converted(
    run: RunFolder, config: ModelConfig, params: dict, vocabulary, origin: str
) -> None:
    """Writes configuration, vocabulary and parameters into an existing, empty folder.

    Args:
        params: NumPy or JAX arrays, in the dtypes of `config.precision.params`.
        origin: what the model was converted from, in words.

    Raises:
        ValueError: the parameters are not those of the configuration (all that differ are
            named), or the vocabulary is larger than the embedding.
    """
    require_same_leaves(
        named_leaves(abstract_params(config)), named_leaves(params), "the converted model"
    )
    if vocabulary.size > config.vocab_size:
        raise ValueError(
            f"the vocabulary has {vocabulary.size} ids, the model's embedding "
            f"{config.vocab_size} rows; give the vocabulary that the model was trained with"
        )
    save_vocabulary(vocabulary, run.root)
    folder = run.checkpoints / str(STEP)
    folder.mkdir(parents=True)
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "params", params)
    write_manifest(folder, Manifest(STEP, None, {}))
    description = {"type": "ConvertedModel", "origin": origin, "model": describe(config)}
    write_atomically(run.config, (json.dumps(description, indent=2) + "\n").encode())
