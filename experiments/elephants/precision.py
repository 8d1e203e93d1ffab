# SPDX-License-Identifier: Apache-2.0
"""The trained model with experts of float32, int8 and int4, what names it, what it reads."""

import argparse
import dataclasses
import pathlib

import jax

import switchx
from experiments.elephants.sections import RESULTS
from switchx.api import Model
from switchx.data.evaluation import evaluation_examples
from switchx.data.features import EncoderDecoderFeatures
from switchx.data.mixtures import multi30k_directions
from switchx.generated_evaluation import Questions, ask
from switchx.inference.quantize import native, quantize_experts

# By the paper's range, the largest weight is the largest integer; int4's default has the least
# squared error.
PRECISIONS = {
    "float32": None,
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "int4, range": {"bits": 4, "method": "absmax"},
}
TEST = "test_2016_flickr"


def with_experts(model: Model, precision: str) -> Model:
    """As `switchx quantize` makes it, all but the experts' matrices as they were."""
    asked = PRECISIONS[precision]
    if asked is None:
        return model
    config, params, _, _ = quantize_experts(model.config, model.params, **asked)
    return dataclasses.replace(model, config=config, params=native(params))


def arguments_parser(description: str) -> argparse.ArgumentParser:
    """Of a script that measures a run's model, with what each of them asks for."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_dir", required=True, help="run folder of `switchx train`")
    parser.add_argument("--step", help="of its checkpoints, or best; default: the newest")
    parser.add_argument("--data_dir", help="folder of Multi30K's files, as DATA_DIR in gin")
    parser.add_argument(
        "--output", type=pathlib.Path, required=True, help="folder for what has been measured"
    )
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    return parser


def open_model(model_dir: str, step: str | None, output: pathlib.Path) -> Model:
    """The run's model; what is compiled for it is kept in `output` for the next time."""
    jax.config.update("jax_compilation_cache_dir", str(output.absolute() / "compiled"))
    return switchx.load(model_dir, int(step) if step and step.isdecimal() else step)


def read_sentences(
    model: Model, direction: str, data_dir: str | None, sentences: int | None
) -> Questions:
    """The first sentences of the 2016 test set, or all, in a direction such as `en_de`."""
    tasks = {task.name: task for task in multi30k_directions(model.vocabulary).tasks}
    name = f"multi30k_{direction}"
    if name not in tasks:
        known = ", ".join(each.removeprefix("multi30k_") for each in tasks)
        raise ValueError(f"there is no direction {direction!r}; use some of {known}")
    # No task here cuts its inputs, so that lengths of training do not matter.
    unused = EncoderDecoderFeatures(1, 1)
    return ask(model, evaluation_examples(tasks[name], TEST, unused, data_dir, sentences))
