# SPDX-License-Identifier: Apache-2.0
"""A vocabulary in a run folder: `vocabulary.json`, for SentencePiece also its model.

The folder then says alone what its token ids mean. Nothing in it names a path.
"""

import json
from pathlib import Path

from switchx.data.corpus_vocabulary import CorpusVocabulary
from switchx.data.data_dir import write_atomically
from switchx.data.token_ids import TokenIdVocabulary
from switchx.data.tokenizers import ByteVocabulary, SentencePieceVocabulary, Vocabulary
from switchx.data.vocabulary_training import MODEL_FILE

DESCRIPTION_FILE = "vocabulary.json"

# Kind -> the numbers that describe it.
_NUMBERS = {
    "sentencepiece": ("num_sentinels", "pad_to_multiple_of"),
    "bytes": ("num_sentinels",),
    "token_ids": ("size",),
}


def save_vocabulary(
    vocabulary: SentencePieceVocabulary | ByteVocabulary | TokenIdVocabulary | CorpusVocabulary,
    directory: str | Path,
) -> None:
    """Writes what `load_vocabulary` needs, the description last, each file whole or not."""
    directory = Path(directory)
    if isinstance(vocabulary, CorpusVocabulary):
        vocabulary = vocabulary.resolved
    kind = "token_ids" if isinstance(vocabulary, TokenIdVocabulary) else "bytes"
    if isinstance(vocabulary, SentencePieceVocabulary):
        kind = "sentencepiece"
        model = Path(vocabulary.path).expanduser().read_bytes()
        write_atomically(directory / MODEL_FILE, model)
    description = {"kind": kind, "fingerprint": vocabulary.fingerprint()}
    description |= {name: getattr(vocabulary, name) for name in _NUMBERS[kind]}
    write_atomically(directory / DESCRIPTION_FILE, json.dumps(description, indent=2).encode())


def load_vocabulary(directory: str | Path) -> Vocabulary:
    """Reads what `save_vocabulary` wrote.

    Raises:
        ValueError: there is none, it is not of the form that is written (a path in it, say),
            the model lies outside the folder, or the fingerprint is another one.
    """
    file = Path(directory) / DESCRIPTION_FILE
    try:
        description = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no vocabulary can be read from {directory}: {error}; name a run folder, or save "
            "one there"
        ) from error
    kind = description.get("kind") if isinstance(description, dict) else None
    names = _NUMBERS.get(kind, ()) if isinstance(kind, str) else ()
    numbers = {name: description.get(name) for name in names}
    is_known = names and set(description) == {"kind", "fingerprint", *names}
    if not is_known or any(type(number) is not int for number in numbers.values()):
        raise ValueError(
            f"{file} does not describe a vocabulary: expected kind sentencepiece, bytes or "
            f"token_ids, fingerprint and whole numbers, got {description!r}; restore the file"
        )
    if kind == "sentencepiece":
        vocabulary = _load_model(Path(directory), numbers)
    else:
        vocabulary = {"bytes": ByteVocabulary, "token_ids": TokenIdVocabulary}[kind](**numbers)
    if vocabulary.fingerprint() != description["fingerprint"]:
        raise ValueError(
            f"the vocabulary in {directory} has the fingerprint {vocabulary.fingerprint()}, "
            f"its description says {description['fingerprint']}; restore {MODEL_FILE} from "
            "where the run was trained"
        )
    return vocabulary


def _load_model(directory: Path, numbers: dict[str, int]) -> SentencePieceVocabulary:
    model = directory / MODEL_FILE
    if model.resolve().parent != directory.resolve():
        raise ValueError(
            f"{model} leads out of the folder, to {model.resolve()}; put the file itself there"
        )
    return SentencePieceVocabulary(str(model), **numbers)
