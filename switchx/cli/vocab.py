# SPDX-License-Identifier: Apache-2.0
"""`switchx vocab`: train a SentencePiece vocabulary on text files."""

import argparse

from switchx.cli import arguments as shared

# As `switchx.data.vocabularies` has it, which is slow to import; a test compares them.
SAMPLE_CHARACTERS = 1_500_000

DESCRIPTION = """\
Trains a SentencePiece unigram vocabulary that loses nothing of a text (spaces, line breaks,
any byte) and writes vocabulary.model and vocabulary.vocab.

  switchx vocab --input=notes.txt,books/ --size=8000 --output=vocabularies/mine

Use it in a gin file:

  from switchx.data import tokenizers
  VOCABULARY = @tokenizers.SentencePieceVocabulary()
  tokenizers.SentencePieceVocabulary.path = "vocabularies/mine/vocabulary.model"
"""


def add_command(commands) -> None:
    help_text = "train a SentencePiece vocabulary"
    parser = shared.add_command(commands, "vocab", run, help_text, DESCRIPTION)
    parser.add_argument(
        "--input",
        action="append",
        required=True,
        metavar="FILES",
        help="text files or folders (.txt, .jsonl, .gz), separated by commas; may be repeated",
    )
    parser.add_argument(
        "--size",
        type=int,
        required=True,
        metavar="N",
        help="pieces; 100 sentinels come on top when it is used",
    )
    shared.add_output(parser, "folder to write into", "DIR", required=True)
    parser.add_argument(
        "--sample_characters",
        type=int,
        default=SAMPLE_CHARACTERS,
        metavar="N",
        help="characters to train on, drawn evenly from all input (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    from switchx.data.vocabularies import train_sentencepiece

    inputs = [name for names in arguments.input for name in names.split(",") if name]
    path, num_pieces, num_characters, ratio = train_sentencepiece(
        inputs, arguments.size, arguments.output, arguments.sample_characters
    )
    print(
        f"{path}: {num_pieces} pieces, trained on {num_characters:,} characters, {ratio:.2f} "
        "characters per token"
    )
    return 0
