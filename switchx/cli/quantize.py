# SPDX-License-Identifier: Apache-2.0
"""`switchx quantize`: a trained model with experts of 8 or 4 bits, as a folder to load."""

import argparse
import dataclasses
from typing import Any

from switchx.cli import arguments as shared
from switchx.fields import json_text
from switchx.whole_folders import git_commit, require_free

DESCRIPTION = """\
Writes a model whose experts' matrices are int8, int4 or float8_e4m3fn, with one scale for each
output feature of each expert, and everything else as it was or in another dtype:

  switchx quantize --model_dir=runs/tiny --output=runs/tiny_int4 --bits=4 --rest=bfloat16
  switchx quantize --model_dir=runs/tiny --output=runs/tiny_fp8 --bits=8 --dtype=float8_e4m3fn

Normally distributed weights are off by 0.9% in int8 and by 2.7% in float8; for weights with
outliers float8 can be better, and a tpu7x multiplies it faster (docs/kernels.md).

The folder holds the weights (safetensors), the vocabulary, and artifact.json: what the model
is, where it comes from, and a SHA-256 of every file, which loading compares. `switchx
generate`, `switchx score` and `switchx.load` read it like a run folder.

It prints the share of the experts' bytes that is quantized, bytes before and after, and the
error of every matrix: its root mean squared error over its root mean square.
"""
METHODS = ("absmax", "ft", "mse")
FLAGS = {
    "--bits=4|8": (int, "bits of each weight"),
    "--dtype=int8|int4|float8_e4m3fn": "dtype of weights; default: int8 or int4, by --bits",
    f"--method={'|'.join(METHODS)}": "how scales are chosen: by the largest weight (absmax), "
    "as FasterTransformer does (ft), or for least squared error (mse); default: mse with 4 "
    "bits, absmax with 8",
    "--group_size=N": (int, "inputs of an expert that share a scale; default: all"),
    "--rest=bfloat16|float32": "dtype of all other parameters, except routers'; default: as "
    "they are",
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "quantize", run, "make a model's experts int8, int4 or float8", DESCRIPTION
    )
    shared.add_model_dir(parser, "run folder of `switchx train`; nothing is written there")
    shared.add_output(parser, "folder to write; must be new or empty", "DIR", required=True)
    shared.add_flags(parser, FLAGS, required="bits")
    shared.add_step(parser, "checkpoint to quantize")
    shared.add_task(parser)
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx import api
    from switchx.inference.artifact import is_artifact, write_artifact
    from switchx.inference.quantize import quantize_experts
    from switchx.models.config import require_one_task

    output = require_free(arguments.output)
    if is_artifact(arguments.model_dir):
        raise ValueError(
            f"{arguments.model_dir} is quantized already; give the run folder it was made from"
        )
    model = api.load(arguments.model_dir, arguments.step, task=arguments.task)
    require_one_task(model.config)
    config, params, matrices, sizes = quantize_experts(
        model.config,
        model.params,
        bits=arguments.bits,
        method=arguments.method,
        group_size=arguments.group_size,
        dtype=arguments.dtype,
        rest=arguments.rest,
    )
    provenance = _provenance(arguments, model)
    num_bytes = write_artifact(output, config, params, provenance, model.save_vocabulary)
    report = {
        "command": "quantize",
        "output": str(output),
        "about": provenance,
        "share_of_expert_bytes_quantized": sizes.quantized / sizes.experts,
        "share_of_bytes_in_experts": sizes.experts / sizes.before,
        "bytes_before": sizes.before,
        "bytes_after": sizes.after,
        "bytes_of_files": num_bytes,
        "matrices": [dataclasses.asdict(each) for each in matrices],
    }
    print(json_text(report) if arguments.json else _text(report))
    return 0


def _provenance(arguments: argparse.Namespace, model) -> dict[str, Any]:
    """Where the artifact comes from, and what is needed to read texts with it."""
    import jax
    import safetensors

    method = arguments.method or ("mse" if arguments.bits == 4 else "absmax")
    return {
        "source": arguments.model_dir,
        "source_fingerprint": model.fingerprint,
        "step": model.step,
        "bits": arguments.bits,
        "dtype": arguments.dtype or f"int{arguments.bits}",
        "method": method,
        "group_size": arguments.group_size,
        "rest": arguments.rest,
        "text_format": dataclasses.asdict(model.text_format),
        "decoding": model.decoding,
        "versions": {
            "switchx": git_commit(),
            "jax": jax.__version__,
            "safetensors": safetensors.__version__,
        },
    }


def _text(report: dict[str, Any]) -> str:
    rows = [("matrix", "error", "of the worst expert")]
    for each in report["matrices"]:
        rows.append((each["name"], f"{each['error']:.4f}", f"{each['worst_error']:.4f}"))
    width = max(len(name) for name, *_ in rows)
    before, after = report["bytes_before"], report["bytes_after"]
    lines = [f"{name:<{width}}  {error:<6}  {worst}" for name, error, worst in rows]
    lines += [
        f"{report['share_of_expert_bytes_quantized']:.1%} of the experts' bytes are quantized; "
        f"experts are {report['share_of_bytes_in_experts']:.1%} of the model",
        f"{before:,} bytes before, {after:,} after: {before / after:.2f} times less",
        f"{report['output']}: {report['bytes_of_files']:,} bytes of files",
    ]
    return "\n".join(lines)
