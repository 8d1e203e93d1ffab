# SPDX-License-Identifier: Apache-2.0
"""`switchx convert`: models of Hugging Face, PEFT and T5X into run folders, and back."""

import argparse
import contextlib
import dataclasses
import pathlib
import tempfile

from switchx.cli import arguments as shared
from switchx.fields import require
from switchx.shipped import folder_of

_NO_TOKENIZER = (
    "no tokenizer.json: texts of this model are token ids such as '12 5 7'; --vocabulary=FILE "
    "gives it one"
)
_IMPORTS = """\
from __gin__ import dynamic_registration
from switchx.models import config
"""
DESCRIPTION = """\
Converts models: T5, T5 1.1, mT5, UMT5, ByT5, Switch Transformers, Llama, Qwen2, Qwen3, OLMo2,
Mixtral, OLMoE, FlexOlmo, Qwen2-MoE, Qwen3-MoE, ERNIE-4.5-MoE, GLM-4-MoE and dots1 from and to
a folder of Hugging Face's transformers; Mistral, Granite-MoE and NLLB-MoE from such a folder
only; T5 and Switch also from a T5X checkpoint. Nothing is fetched and nothing in a checkpoint
is run; pytorch_model.bin is read without unpickling it.

  switchx convert --from=huggingface SRC DST   SRC has config.json and the weights
  switchx convert --to=huggingface SRC DST     SRC is a run folder or a converted model
  switchx convert --from=t5x SRC DST --gin_file=configs/models/switch_base_released.gin \\
    --vocabulary=spiece.model                  SRC is .../checkpoint_<step>
  switchx convert --from=peft SRC DST --base=DIR   SRC has LoRA adapters, DIR is their base
  switchx convert --to=peft SRC DST --base=NAME    SRC is a run of adapters

DST is a new folder. A converted model is read like a run folder: `switchx.load(DST)`, or to
fine-tune it:

  switchx train --gin_file=configs/runs/finetune.gin --gin.INIT_FROM=DST --model_dir=DIR
"""

BASE = {
    "--base=DIR": "with --from=peft: run folder that `switchx convert` wrote from the base "
    "model that the adapters were trained with; with --to=peft: the name or transformers "
    "folder by which PEFT finds the base"
}
FLAGS = {
    "--overflow=drop|dropless|identity": "with --from=huggingface, for Switch Transformers: "
    "what happens to a token whose expert is full. drop: as transformers 4.52 to 4.57, and "
    "from 5.19 on (default); dropless: as 5.0 to 5.17; identity: as up to 4.51",
    "--dtype=float32|bfloat16|float16": "dtype of the parameters in DST; default: float32 with "
    "--from=huggingface, what MODEL says with --from=t5x, that of SRC with --to",
    "--vocabulary=FILE": "with --from: the SentencePiece model, or the tokenizer.json, that "
    "belongs to SRC; `bytes` for UTF-8 bytes as ByT5 numbers them, `none` for token ids; "
    "default: SRC's spiece.model, else its tokenizer.json; bytes for a ByT5",
}


def add_command(commands) -> None:
    parser = shared.add_command(
        commands, "convert", run, "convert models of transformers and T5X", DESCRIPTION
    )
    shared.add_gin_arguments(parser, default="none; --from=t5x needs the model's")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from", dest="source", choices=["huggingface", "t5x", "peft"], help="what SRC is"
    )
    direction.add_argument(
        "--to", dest="target", choices=["huggingface", "peft"], help="what DST will be"
    )
    shared.add_flags(parser, BASE)
    shared.add_trust(parser)
    parser.add_argument("src", metavar="SRC", help="folder to read")
    parser.add_argument("dst", metavar="DST", help="folder to write")
    shared.add_flags(parser, FLAGS)
    shared.add_step(parser, "with --to: checkpoint to convert")


def run(arguments: argparse.Namespace) -> int:
    from switchx.progress import TerminalReporter

    _check(arguments)
    with TerminalReporter() as reporter:
        if arguments.target == "peft":
            _to_peft(arguments, reporter)
        elif arguments.source == "peft":
            _from_peft(arguments, reporter)
        elif arguments.target:
            _to_huggingface(arguments, reporter)
        elif arguments.source == "huggingface":
            _from_huggingface(arguments, reporter)
        else:
            _from_t5x(arguments, reporter)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuses options that would have no effect."""
    is_t5x, error = arguments.source == "t5x", arguments.parser.error
    if is_t5x and not arguments.gin_file:
        error(
            "--from=t5x needs the model's configuration, such as "
            "--gin_file=configs/models/switch_base_released.gin"
        )
    is_peft = "peft" in (arguments.source, arguments.target)
    if arguments.source == "peft" and not arguments.base:
        error("--from=peft needs --base=DIR, the run folder of its base")
    if arguments.base and not is_peft:
        error("--base is for --from=peft and --to=peft; leave it out")
    if is_peft and (arguments.dtype or arguments.vocabulary):
        error("--dtype and --vocabulary are the base's; leave them out")
    given = arguments.gin_file or arguments.gin_bindings or arguments.gin_search_paths
    if given and not is_t5x:
        error(
            "gin files, their paths and --gin.NAME=VALUE are for --from=t5x; a folder of "
            "transformers describes its model"
        )
    if arguments.overflow and arguments.source != "huggingface":
        error("--overflow is for --from=huggingface; leave it out")
    if arguments.vocabulary and arguments.target:
        error("--vocabulary is for --from; a run folder has its own")
    if arguments.step is not None and not arguments.target:
        error("--step is for --to; leave it out")


def _from_huggingface(arguments: argparse.Namespace, reporter) -> None:
    from switchx.interop.huggingface import read_checkpoint

    reporter.note(f"reading {arguments.src}")
    with _scratch(pathlib.Path(arguments.dst)) as scratch:
        checkpoint = read_checkpoint(
            arguments.src,
            overflow=arguments.overflow,
            dtype=arguments.dtype or "float32",
            scratch=scratch,
            vocabulary=arguments.vocabulary,
        )
        _write_read(arguments, reporter, checkpoint)


@contextlib.contextmanager
def _scratch(dst: pathlib.Path):
    """A folder beside DST, for a model that does not fit into memory; removed at the end."""
    parent = next(path for path in dst.expanduser().absolute().parents if path.is_dir())
    try:
        folder = tempfile.TemporaryDirectory(prefix=f".{dst.name}_", dir=parent)
    except OSError as error:
        raise ValueError(
            f"{dst} cannot be written ({error.strerror or error}); give a folder that this "
            "user may write"
        ) from error
    with folder as path:
        yield pathlib.Path(path)


def _write_read(arguments: argparse.Namespace, reporter, checkpoint) -> None:
    from switchx.inference.config import DecodingConfig

    least = checkpoint.decoding.get("min_new_tokens")
    if type(least) is int and least > DecodingConfig.max_new_tokens:  # a default of ours
        checkpoint.decoding.setdefault("max_new_tokens", least)
    try:
        DecodingConfig(**checkpoint.decoding)
    except (ValueError, TypeError) as error:
        file = pathlib.Path(arguments.src, "generation_config.json")
        raise ValueError(
            f"{file} says {checkpoint.decoding!r:.300}: {error}; correct the file, or remove it"
        ) from error
    for note in checkpoint.notes:
        reporter.note(note)
    file = arguments.vocabulary or (
        "bytes" if checkpoint.is_of_bytes else checkpoint.vocabulary
    )
    settings = checkpoint.special_ids, checkpoint.decoding, checkpoint.ids, checkpoint.rescaled
    _write(arguments, reporter, checkpoint.config, checkpoint.params, file, *settings)


def _from_t5x(arguments: argparse.Namespace, reporter) -> None:
    from switchx.gin_config import building
    from switchx.interop.t5x import read_checkpoint
    from switchx.models.config import ModelConfig
    from switchx.partitioning.mesh import MeshSpec
    from switchx.training.job import with_suited_dispatcher

    gin_files, bindings, paths = shared.gin_of(arguments)
    building.parse_files(gin_files, bindings, paths)
    if "MODEL" not in building.macro_names():  # a file of configs/models has parts alone
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "model.gin")
            includes = "".join(f"include {str(each)!r}\n" for each in gin_files)
            file.write_text(f"{_IMPORTS}{includes}MODEL = @config.ModelConfig()\n")
            building.parse_files([str(file)], bindings, paths)
    config = with_suited_dispatcher(building.build("MODEL", ModelConfig), MeshSpec())
    building.require_effect("MODEL", bindings)
    config = _in_dtype(config, arguments.dtype)
    reporter.note(f"reading {arguments.src}")
    with _scratch(pathlib.Path(arguments.dst)) as scratch:
        config, params = read_checkpoint(arguments.src, config, scratch)
        _write(arguments, reporter, config, params, arguments.vocabulary)


def _in_dtype(config, dtype: str | None):
    """The configuration with parameters in this dtype, or as it is."""
    precision = dataclasses.replace(config.precision, params=dtype or config.precision.params)
    return dataclasses.replace(config, precision=precision)


def _write(
    arguments,
    reporter,
    config,
    params,
    vocabulary_file,
    special_ids=(0, 1, 2),
    decoding=None,
    vocabulary=None,
    rescaled=None,
) -> None:
    from switchx.checkpoint.run_folder import RunFolder, write_converted
    from switchx.data.tokenizers import ByteVocabulary, TokenIdVocabulary
    from switchx.gin_config.writing import model_gin
    from switchx.interop.folder_tokenizer import folder_vocabulary
    from switchx.tree import num_elements
    from switchx.whole_folders import new_folder

    with contextlib.ExitStack() as stack:
        if vocabulary is not None:
            if isinstance(vocabulary, TokenIdVocabulary):
                reporter.note(_NO_TOKENIZER)
        elif vocabulary_file == "bytes":
            vocabulary = ByteVocabulary()
            require(
                special_ids == (0, 1, 2),
                f"{arguments.src}: padding, end and unknown are {special_ids}; expected "
                "(0, 1, 2), as bytes have it: correct config.json",
            )
        elif vocabulary_file not in (None, "none"):
            file = stack.enter_context(_model_file(pathlib.Path(vocabulary_file), special_ids))
            # Files beside a vocabulary that was named separately do not belong to it.
            named = pathlib.Path(vocabulary_file)
            beside = named if named.suffix == ".json" else None
            beside = beside if arguments.vocabulary else named.parent
            vocabulary = folder_vocabulary(file, beside, config.vocab_size, special_ids)
        else:
            vocabulary = TokenIdVocabulary(config.vocab_size, special_ids)
            reporter.note(
                "no vocabulary: texts of this model are token ids such as '12 5 7'; "
                "--vocabulary=FILE gives it a SentencePiece model"
            )
        folder = stack.enter_context(new_folder(arguments.dst))
        origin = f"{arguments.source}: {pathlib.Path(arguments.src).name}"
        run = RunFolder(folder)
        settings = {"decoding": decoding, "rescaled": rescaled}
        write_converted(run, config, params, vocabulary, origin, **settings)
        run.model_gin.write_text(model_gin(config), encoding="utf-8")
    print(f"{arguments.dst}: {num_elements(params):,} parameters; open it with switchx.load")


@contextlib.contextmanager
def _model_file(file: pathlib.Path, special_ids):
    """The file of a SentencePiece model: this one, or one made from a `tokenizer.json`."""
    if file.suffix != ".json":
        yield file
        return
    from switchx.interop.tokenizer_json import sentencepiece_model

    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder, file.name).with_suffix(".model")
        model.write_bytes(sentencepiece_model(file, special_ids))
        yield model


def _reads_as_t5(vocabulary) -> bool:
    """Whether T5's tokenizer can do what this SentencePiece model does.

    That tokenizer always puts a space before the first word, and has no single-byte pieces.
    """
    pieces = map(vocabulary.piece, range(vocabulary.num_pieces))
    has_space = vocabulary.encode("a") == vocabulary.encode(" a")
    return has_space and not any(piece.kind == "byte" for piece in pieces)


def _to_huggingface(arguments: argparse.Namespace, reporter) -> None:
    from switchx.checkpoint.restore import choose_step, stored_params
    from switchx.checkpoint.run_folder import RunFolder, read_decoding, read_model_config
    from switchx.data.vocabularies import load_vocabulary
    from switchx.interop.huggingface import write_decoder
    from switchx.whole_folders import new_folder

    source = RunFolder(folder_of(arguments.src))
    config = read_model_config(source)
    step = choose_step(source, arguments.step)
    vocabulary = load_vocabulary(source.root)
    reporter.note(f"reading {source.checkpoints / str(step)}")
    config, params = stored_params(source.path, step, config)
    config = _in_dtype(config, arguments.dtype)
    decoding = read_decoding(source)
    if config.is_encoder_decoder:
        notes = _write_t5(arguments, reporter, config, params, vocabulary, decoding)
    else:
        with new_folder(arguments.dst) as folder:
            notes = write_decoder(folder, config, params, vocabulary, decoding)
        notes += _notes_on_prompts(source, vocabulary)
    for note in notes:
        reporter.note(note)
    print(f"{arguments.dst}: written for transformers, from step {step}")


def _notes_on_prompts(source, vocabulary) -> list[str]:
    """What a decoder learnt about its prompts that transformers does not know."""
    from switchx.checkpoint.run_folder import read_config
    from switchx.data.tasks import TextFormat

    notes = []
    with contextlib.suppress(ValueError):  # an objective of a user's own is not imported
        learnt = read_config(source).get("source")
        text_format = TextFormat.of_training(learnt, is_encoder_decoder=False)
        if text_format.is_prompt_bidirectional:
            notes.append(
                "prompts of this run see themselves whole; transformers reads them "
                "causally and gives other logits: train with "
                "--gin.InputsToTargets.is_prefix_bidirectional=False"
            )
        if text_format.inputs_end_with_eos:
            notes.append(
                f"prompts of this run end with the id of eos, {vocabulary.eos_id}, which "
                "switchx puts behind them and a tokenizer of transformers does not: put it "
                "there"
            )
    return notes


def _write_t5(arguments, reporter, config, params, vocabulary, decoding) -> list[str]:
    from switchx.data.tokenizers import SentencePieceVocabulary
    from switchx.interop.huggingface import write_checkpoint
    from switchx.whole_folders import new_folder

    file, num_sentinels, added = None, vocabulary.num_sentinels, ()
    if isinstance(vocabulary, SentencePieceVocabulary):
        file, added = pathlib.Path(vocabulary.path), vocabulary.added_tokens
        if not _reads_as_t5(vocabulary):
            reporter.note(
                "transformers' T5Tokenizer gives other ids for this vocabulary: it puts a "
                "space before a text and knows no bytes; tokenize with SentencePiece or switchx"
            )
    else:
        reporter.note(
            f"{arguments.src} has no SentencePiece model: {arguments.dst} has no tokenizer"
        )
    with new_folder(arguments.dst) as folder:
        return write_checkpoint(
            folder,
            config,
            params,
            file,
            num_sentinels=num_sentinels,
            added_tokens=added,
            special_ids=getattr(vocabulary, "special_ids", (0, 1, 2)),
            decoding=decoding,
        )


def _from_peft(arguments: argparse.Namespace, reporter) -> None:
    from switchx.checkpoint import run_folder
    from switchx.checkpoint.adapter_run import AdapterRecord, require_merged
    from switchx.checkpoint.restore import checkpoint_fingerprint, choose_step
    from switchx.data.vocabularies import load_vocabulary
    from switchx.interop.peft import is_made_for, named_base, read_adapters
    from switchx.models.adapters import abstract_adapters
    from switchx.models.params import abstract_params
    from switchx.whole_folders import new_folder

    base = run_folder.RunFolder(arguments.base)
    require_merged(base, "--base")
    step, vocabulary = choose_step(base), load_vocabulary(base.root)
    config = dataclasses.replace(run_folder.read_model_config(base), scan_layers=False)
    of_base = {"base": str(base.where), "step": step}  # found from any directory
    rescaled = run_folder.read_rescaled(base)
    is_named = is_made_for(arguments.src, base.path)
    require(
        rescaled is None or is_named,
        f"--base={arguments.base} has the factors of {rescaled} multiplied into its weights, "
        f"and adapters of {rescaled} do not fit these; merge them with PEFT and convert the "
        "whole model. For adapters of what --to=huggingface wrote, convert that and give it",
    )
    spec, adapters, notes = read_adapters(arguments.src, config, **of_base)
    for note in notes:
        reporter.note(note)
    named, about_base = named_base(arguments.src), run_folder.read_config(base)
    origin = about_base.get("origin", "a run").rpartition(": ")[2]
    if named and not is_named and pathlib.PurePath(named).name != origin:
        reporter.note(
            f"the adapters name {named!r} as their base, and --base={arguments.base} is of "
            f"{origin!r}: only the same weights make the model that was trained"
        )
    source = about_base.get("source")
    rest = f"peft: {pathlib.Path(arguments.src).name}", source, run_folder.read_decoding(base)
    shapes = abstract_adapters(abstract_params(config), spec)
    with new_folder(arguments.dst) as folder:
        run = run_folder.RunFolder(folder)
        written = config, adapters, vocabulary, *rest
        run_folder.write_converted(run, *written, shapes=shapes)
        AdapterRecord(spec, checkpoint_fingerprint(base, step, vocabulary)).write(run)
    print(f"{arguments.dst}: adapters beside {base.path}; open it with switchx.load")


def _to_peft(arguments: argparse.Namespace, reporter) -> None:
    from switchx.checkpoint.adapter_run import AdapterRecord
    from switchx.checkpoint.items import read_items
    from switchx.checkpoint.restore import choose_step
    from switchx.checkpoint.run_folder import RunFolder, read_model_config, read_rescaled
    from switchx.data.vocabularies import load_vocabulary
    from switchx.interop.peft import write_adapters
    from switchx.models.unroll import unrolled
    from switchx.object_store import read_json_object
    from switchx.whole_folders import new_folder

    source = RunFolder(folder_of(arguments.src))
    model = read_model_config(source)  # refuses what is no run
    record = AdapterRecord.read(source)
    require(
        record is not None,
        f"{arguments.src} has no adapters; give a run of configs/runs/finetune_lora.gin, or "
        "--to=huggingface for a whole model",
    )
    path = source.checkpoints / str(choose_step(source, arguments.step))
    adapters = read_items(path, {"params": None})["params"]
    config, adapters = unrolled(model, adapters)
    if record.spec.bits is not None:
        reporter.note(
            f"trained beside experts of {record.spec.bits} bits: beside others, such as those "
            "of the base in its own dtype, the model is another one"
        )
    if not config.is_encoder_decoder:
        for note in _notes_on_prompts(source, load_vocabulary(source.root)):
            reporter.note(note)
    base, rescaled = arguments.base or str(record.spec.base), None
    if RunFolder(record.spec.base).config.is_file():
        rescaled = read_rescaled(source)
    else:
        reporter.note(
            f"{record.spec.base} is not there: if it was converted from a Granite model, these "
            "adapters fit what --to=huggingface writes of it, and not Granite's own weights"
        )
    described = pathlib.Path(base, "config.json")
    kind = read_json_object(described).get("model_type") if described.is_file() else None
    require(
        rescaled is None or not arguments.base or kind not in (None, rescaled),
        f"--base={base}: these adapters were trained beside weights that have the factors of "
        f"{rescaled} multiplied into them, and do not fit its own; give what "
        "--to=huggingface writes of the base",
    )
    if not arguments.base:
        reporter.note(
            f"adapter_config.json names {base} as the base, which PEFT cannot open by itself; "
            "name the model of transformers: --base=NAME"
        )
    with new_folder(arguments.dst) as folder:
        write_adapters(folder, config, adapters, record.spec, base)
    print(f"{arguments.dst}: written for PEFT, from {path}")
