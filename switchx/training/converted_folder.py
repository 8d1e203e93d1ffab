# SPDX-License-Identifier: Apache-2.0
"""A model from elsewhere as a run folder, whose checkpoint 0 holds parameters alone.

Whatever reads a run's parameters reads it: `switchx.load`, `INIT_FROM`, `switchx eval`.
"""

import json

import orbax.checkpoint as ocp

from switchx.data.data_dir import write_atomically
from switchx.data.saved_vocabulary import save_vocabulary
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from switchx.training.checkpoint_items import require_same_leaves
from switchx.training.manifest import write_manifest
from switchx.training.run_config import describe
from switchx.training.run_folder import RunFolder
from switchx.tree import named_leaves

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
    write_manifest(folder, STEP, None, {})
    description = {"type": "ConvertedModel", "origin": origin, "model": describe(config)}
    write_atomically(run.config, (json.dumps(description, indent=2) + "\n").encode())
