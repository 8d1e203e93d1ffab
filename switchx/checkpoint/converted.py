# SPDX-License-Identifier: Apache-2.0
"""Run folders of models from elsewhere: checkpoint 0, which holds parameters alone.

Whatever reads a run's parameters reads them: `INIT_FROM`, `switchx eval`, `switchx.load`.
"""

import json

import orbax.checkpoint as ocp

from switchx.checkpoint.items import Manifest, require_same_leaves, write_manifest
from switchx.checkpoint.run_folder import RunFolder
from switchx.data.data_dir import write_atomically
from switchx.data.vocabularies import save_vocabulary
from switchx.fields import describe
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
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
    write_manifest(folder, Manifest(STEP, None, {}))
    description = {"type": "ConvertedModel", "origin": origin, "model": describe(config)}
    write_atomically(run.config, (json.dumps(description, indent=2) + "\n").encode())
