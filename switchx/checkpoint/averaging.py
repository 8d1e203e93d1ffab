# SPDX-License-Identifier: Apache-2.0
"""Making a model from several checkpoints of a run, or from the average that training kept.

The mean of a run's last checkpoints (Vaswani et al. 2017, arXiv:1706.03762, section 6.1) and
the exponential moving average of `StepConfig.ema_decay` become run folders of their own, with
one checkpoint of parameters: whatever reads a run's parameters can read them.
"""

import shutil
from collections.abc import Sequence

import jax
import numpy as np

from switchx.checkpoint.adapter_run import AdapterRecord
from switchx.checkpoint.items import abstract, items_of
from switchx.checkpoint.restore import (
    choose_step,
    merged_with_base,
    restore_items,
    restore_params,
)
from switchx.checkpoint.run_folder import (
    RunFolder,
    read_config,
    read_decoding,
    read_model_config,
    read_rescaled,
    write_converted,
)
from switchx.data.vocabularies import load_vocabulary
from switchx.fields import require
from switchx.models.params import abstract_params
from switchx.partitioning.mesh import cpu_device
from switchx.tree import Tree


def mean_of_checkpoints(run: RunFolder, steps: Sequence[int]) -> Tree:
    """The mean of the parameters of several checkpoints, on the host, summed in float32.

    At most one checkpoint is in memory besides the sum. Layers may be scanned in some and
    unrolled in others.

    Raises:
        ValueError: there are fewer than two steps, a step is given twice, or one has no
            complete checkpoint.
    """
    require(
        len(set(steps)) == len(steps) > 1,
        f"steps {', '.join(map(str, steps))}; use two or more different ones",
    )
    for step in steps:
        choose_step(run, step)  # checks all before the first is read
    model, total = read_model_config(run), None
    target = _on_cpu(run)
    for step in steps:
        params = restore_params(run.path, step, target=target, model=model)
        shares = jax.tree.map(lambda w: np.asarray(w, np.float32) / len(steps), params)
        total = shares if total is None else jax.tree.map(np.add, total, shares)
    return jax.tree.map(lambda mean, like: mean.astype(like.dtype), total, target)


def moving_average(run: RunFolder, step: int) -> Tree:
    """The average that training kept, as of one checkpoint, in the parameters' dtypes; for an
    adapter run, the base merged with the adapters' average.

    Raises:
        ValueError: training kept no average.
    """
    path, target = run.checkpoints / str(choose_step(run, step)), _on_cpu(run)
    require(
        "average" in items_of(path),
        f"{path} has no average of parameters; train with StepConfig.ema_decay, or give steps "
        "whose mean is to be taken",
    )
    model = read_model_config(run)
    if (record := AdapterRecord.read(run)) is not None:
        average = merged_with_base(run, path, record, target, model, "average")
    else:
        in_float32 = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=leaf.sharding),
            target,
        )
        average = restore_items(path, {"average": in_float32}, model)["average"]
    return jax.tree.map(lambda a, like: np.asarray(a).astype(like.dtype), average, target)


def write_average(run: RunFolder, params: Tree, folder: RunFolder, origin: str) -> None:
    """Writes averaged parameters of `run` into an existing, empty folder.

    The folder also gets the run's vocabulary, tasks and gin configuration, so that it can be
    evaluated as the run is.

    Args:
        origin: description of the averaged parameters.
    """
    source = read_config(run).get("source")
    vocabulary = load_vocabulary(run.root)
    carried = vocabulary, origin, source, read_decoding(run)
    rescaled = read_rescaled(run)
    write_converted(folder, read_model_config(run), params, *carried, rescaled=rescaled)
    for file in ("operative_config", "git_commit"):
        if (path := getattr(run, file)).is_file():
            shutil.copyfile(path, getattr(folder, file))


def _on_cpu(run: RunFolder) -> Tree:
    with jax.default_device(cpu_device()):
        return jax.tree.map(abstract, abstract_params(read_model_config(run)))
