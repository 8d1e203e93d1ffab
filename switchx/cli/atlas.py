# SPDX-License-Identifier: Apache-2.0
"""`switchx atlas`: what the experts of a model do with labelled texts, on one page."""

import argparse
import math
import pathlib

from switchx.cli import arguments as shared
from switchx.fields import json_text, require
from switchx.shipped import TEXTS, folder_of

DESCRIPTION = """\
Analyses any sparse model: which experts take which texts, tokens and labels, and how the model
does without each of them. Writes one HTML page that needs no other file and no network:

  switchx atlas tiny --output=atlas              the model and the texts that ship
  switchx atlas runs/tiny --input code.txt prose.txt --output=atlas
  switchx atlas runs/tiny --input=trec.tsv --text_column=question --label_column=kind \\
    --output=atlas
  switchx atlas runs/tiny --input code.txt prose.txt --output=atlas --against=runs/tiny_int4

The label of a text file is its name; the label of a row of a table (.tsv, .csv, .jsonl,
.parquet) is in --label_column, or else the file's name. Labels are permuted among texts for
p-values, so give many texts: text files are cut at paragraphs. MODEL is a run folder, or what
`switchx quantize` or `switchx convert` wrote.

The folder gets atlas.html, picture.svg (drops by capacity factor, knock-outs by label),
tables/MODEL/*.parquet, and record_MODEL.parquet, the record of routing (docs/records.md).
"""

INPUTS = {
    "--text_column=NAME": "column that holds the text",
    "--label_column=NAME": "column that holds the label; default: the label is the file's name",
    "--target_column=NAME": "column that holds what the decoder is to write, as in translation",
    "--against=MODEL": (shared.model_folder, "second model to show beside MODEL"),
}
MEASURES = {
    "--knockouts=N": (
        lambda text: 0 if text == "0" else shared.positive(text),
        "maximum number of experts to remove, one at a time: those that take most more of a "
        "label, and randomly drawn ones; 0 removes none",
    ),
    "--knockout_texts=N": "texts of each label that are scored without the removed expert",
    "--max_tokens=N": "tokens of a row; longer texts take several rows",
    "--min_tokens=N": "fewest tokens that a label may have",
    "--batch_size=N": "rows processed at once",
    "--capacity=dropless|trained": "capacity of experts: dropless drops no token; trained "
    "drops as evaluation does",
    "--factors=X,X": "capacity factors at which drops are measured, one pass each",
    "--seed=N": (int, "seed of masked spans, permutations and draws"),
}
DEFAULTS = {
    "knockouts": 256,
    "knockout_texts": 64,
    "max_tokens": 512,
    "min_tokens": 100,
    "batch_size": 32,
    "factors": [0.5, 1.0, 1.5, 2.0],
    "seed": 0,
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "atlas", run, "what a model's experts do with texts", DESCRIPTION
    )
    parser.add_argument(
        "model_dir",
        type=shared.model_folder,
        metavar="MODEL",
        help="folder, or `tiny`, the model that ships with switchx; nothing is written there",
    )
    shared.add_trust(parser)
    parser.add_argument(
        "--input",
        action="extend",
        nargs="+",
        type=shared.not_empty,
        metavar="TEXTS",
        help="files, or folders of files; default for `tiny`: the texts that ship with it",
    )
    shared.add_output(parser, "folder to write; must be new or empty", "DIR", required=True)
    shared.add_flags(parser, INPUTS)
    parser.set_defaults(text_column="text")
    shared.add_step(parser, "checkpoint of a run folder")
    second = {"--against_step=N": "checkpoint of the second model"}
    second["--against_task=NAME"] = "task of the second model, if its experts are divided"
    shared.add_flags(parser, second)
    shared.add_task(parser)
    shared.add_flags(parser, MEASURES, **DEFAULTS, capacity="dropless")
    shared.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from switchx.progress import TerminalReporter

    with TerminalReporter(unit="item") as reporter:
        reporter.note("loading JAX and the model")
        report = _write(arguments, reporter)
    print(json_text(report) if arguments.json else "\n".join(_lines(report)))
    return 0


def _lines(report: dict):
    """The page; each label's loss, and what its specialist's removal changes."""
    yield report["page"]
    for model in report["models"]:
        for each in model["labels"]:
            line = f"{model['name']}, {each['label']}: loss {each['loss']:.3f} nats a token"
            if math.isfinite(each.get("change", math.nan)):
                line += f", without {each['layer']}: {each['expert']} {each['change']:+.4f}"
                low, high = each["interval"]
                line += f" ({low:+.4f} to {high:+.4f})" * math.isfinite(low)
            yield line


def _write(arguments: argparse.Namespace, reporter) -> dict:
    from switchx import api
    from switchx.data.labelled_texts import read_labelled_texts
    from switchx.inference.artifact import is_artifact
    from switchx.routing_atlas import make_atlas, write_page
    from switchx.training.compilation_cache import compiled_programs_kept
    from switchx.whole_folders import new_folder, require_free

    def chosen(*names: str) -> dict:
        return {name: getattr(arguments, name) for name in names}

    output = require_free(arguments.output)
    columns = chosen("text_column", "label_column", "target_column")
    inputs = arguments.input or [str(TEXTS)] * (arguments.model_dir == str(folder_of("tiny")))
    require(inputs, "--input is missing (files, folders); texts ship with `tiny` alone")
    texts = read_labelled_texts(inputs, **columns)
    reporter.note(str(texts.account))
    folders = [(arguments.model_dir, arguments.step, arguments.task)]
    if arguments.against is not None:
        folders.append((arguments.against, arguments.against_step, arguments.against_task))
    atlases = []
    with new_folder(output) as folder, compiled_programs_kept(None, reporter.note):
        for name, (model_dir, step, task) in zip(_names(folders), folders, strict=True):
            atlas = make_atlas(
                api.load(model_dir, step, task=task),
                texts,
                folder,
                name=name,
                run_folder=None if is_artifact(model_dir) else model_dir,
                dropless=arguments.capacity == "dropless",
                reporter=reporter,
                **chosen(*DEFAULTS),
            )
            atlases.append(atlas)
        report = write_page(folder / "atlas.html", atlases)
    return {"command": "atlas", "page": str(output / "atlas.html")} | report


def _names(folders: list[tuple]) -> list[str]:
    """Names of the models: those of their folders, plus the step where these are equal."""
    names = [pathlib.Path(folder).expanduser().absolute().name for folder, *_ in folders]
    if len(set(names)) < len(names):
        names[1] += f"_{folders[1][1]}" if folders[1][1] is not None else "_against"
    return names
