# SPDX-License-Identifier: Apache-2.0
"""`switchx vocab`: train a SentencePiece vocabulary on text files."""

import argparse
import pathlib

from switchx.cli import arguments as shared
from switchx.fields import require

# Equals that of `switchx.data.vocabulary_training`, slow to import; a test compares them.
SAMPLE_CHARACTERS = 1_500_000

DESCRIPTION = """\
Trains a SentencePiece unigram vocabulary that loses nothing of a text (spaces, line breaks,
any byte) and writes vocabulary.model and vocabulary.vocab.

  switchx vocab --input=notes.txt,books/ --size=8000 --output=vocabularies/mine

For several languages, give one --input per language, and --temperature or --rates to say how
much of each is read; mT5 uses the temperature 1/0.3:

  switchx vocab --input=en.txt --input=tr.txt --temperature=3.33 --size=8000 --output=DIR

Train with it; the model gets the rows that it needs (VOCAB_SIZE):

  switchx train --gin_file=configs/runs/pretrain_tiny.gin \\
    --gin.VOCABULARY_FILE=vocabularies/mine --model_dir=DIR
"""

FLAGS = {
    "--text_column=NAME": "key or column that holds the text, like the macro TEXT_COLUMN "
    "(default: text, or inputs and targets)",
    "--size=N": (int, "number of pieces; 100 sentinels are added when it is used"),
}
SAMPLE = {
    "--sample_characters=N": (int, "most characters to train on, drawn evenly from all input"),
    "--temperature=T": (
        float,
        "each --input is a language, drawn at the rate (its characters)^(1/T): 1 is "
        "proportional, a larger one nearer to equal",
    ),
    "--rates=R,..": "rate of each --input, in their order, such as 0.7,0.3",
}


def add_command(commands) -> None:
    help_text = "train a SentencePiece vocabulary"
    parser = shared.add_command(commands, "vocab", run, help_text, DESCRIPTION)
    parser.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="FILES",
        help="text files or folders (.txt, .jsonl, packed or not, .parquet, .arrow), separated "
        "by commas; may be repeated",
    )
    shared.add_flags(parser, FLAGS, required="size")
    shared.add_output(parser, "folder to write into", "DIR", required=True)
    shared.add_flags(parser, SAMPLE, sample_characters=SAMPLE_CHARACTERS)


def run(arguments: argparse.Namespace) -> int:
    from switchx.data.vocabulary_training import MODEL_FILE, train_sentencepiece

    inputs = [[name for name in names.split(",") if name] for names in arguments.input]
    if (rates := _rates(arguments)) is None:
        inputs = [name for names in inputs for name in names]
    columns = arguments.text_column and (arguments.text_column,)
    target = pathlib.Path(arguments.output, MODEL_FILE).expanduser()
    require(
        not target.exists(),
        f"{target} is there, and runs may read it; give another --output, or remove it",
    )
    path, num_pieces, num_characters, ratio = train_sentencepiece(
        inputs, arguments.size, arguments.output, arguments.sample_characters, rates, columns
    )
    print(
        f"{path}: {num_pieces} pieces, trained on {num_characters:,} characters, {ratio:.2f} "
        "characters per token"
    )
    return 0


def _rates(arguments: argparse.Namespace):
    """Rates of the inputs as languages; None where they are one text."""
    from switchx.data.mixtures import ProportionalRates

    if arguments.rates is not None and arguments.temperature is not None:
        raise ValueError("--rates and --temperature both say how much is read; give one")
    if arguments.temperature is not None:
        return ProportionalRates(arguments.temperature)
    if arguments.rates is None:
        return None
    try:
        return tuple(map(float, arguments.rates.split(",")))
    except ValueError as error:
        raise ValueError(
            f"--rates={arguments.rates!r}; use numbers separated by commas, such as 0.7,0.3"
        ) from error
