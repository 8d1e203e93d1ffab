# SPDX-License-Identifier: Apache-2.0
"""Which books, kinds of words and languages the experts are for, on held-out text.

    make experiments EXPERIMENT=routing_statistics DATA=FOLDER

Books and kinds of words: the 16 experts of the second rung of experiments/switch_vs_dense.
Languages: a model that is trained here. A token's expert and its label are compared by their
mutual information, as a share of the label's entropy: 0 tells nothing of it, 1 all.

Dims: N Switch layers, T tokens, S experts selected by a token, E experts, V vocabulary
"""

import dataclasses
import json
import pathlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import switchx
from experiments.experiment import ENGLISH, run_name
from experiments.measured import Interval
from experiments.multilingual.run import LANGUAGES
from experiments.pretrained import pretrained
from experiments.study import Study, main
from experiments.switch_vs_dense.run import SEEDS
from switchx.analysis.plots import class_figure, write_svg
from switchx.analysis.report import Section
from switchx.analysis.routing import class_counts, information, rows_to_shares
from switchx.data.corpora.text_files import TextFiles
from switchx.data.token_classes import token_classes
from switchx.data.tokenizers import PAD_ID, Vocabulary

MODEL = "16 experts, R1"  # of experiments/switch_vs_dense
BOOKS = ENGLISH
LANGUAGE_MODEL = "14_languages_seed0"
LANGUAGE_STEPS = 300
# Of each book or language, at most: documents, rows of a document, tokens of a row as trained.
DOCUMENTS, ROWS, LENGTH = 8, 4, 128
PERMUTATIONS = 200
# Words that are nearly always of one part of speech.
PARTS_OF_SPEECH = {
    "determiner": "the a an every each these those",
    "preposition": "of in on at from with by into between during through among without",
    "pronoun": "he she it they we you i them him us me who his its their our your my",
    "conjunction": "and or but because if although while whereas",
    "auxiliary": "is are was were be been am has have had can could will would may might must",
}
FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Sample:
    """Tokens of held-out text, and where the Switch layers send them.

    Attributes:
        layers: names of the Switch layers.
        expert_NTS: experts chosen, without drops.
        token_T, document_T: id, and number of the document.
        source_D: of every document: number of its book or language.
    """

    layers: list[str]
    num_experts: int
    expert_NTS: np.ndarray
    token_T: np.ndarray
    document_T: np.ndarray
    source_D: np.ndarray


def read_sample(model: switchx.Model, files: Sequence[pathlib.Path], documents: int) -> Sample:
    """The first held-out documents of every file, those that training held out."""
    kept = []
    writer = types.SimpleNamespace(add=lambda number, parts, *_: kept.append(parts["decoder"]))
    scorer = model.scorer(record=writer)
    experts = []
    tokens = []
    numbers = []
    sources = []
    for source, file in enumerate(files):
        corpus = TextFiles(path=str(file)).open("validation", None)
        for record in range(min(documents, len(corpus.records))):
            ids = model.vocabulary.encode(corpus[record]["text"])[: ROWS * LENGTH]
            for first in range(0, len(ids), LENGTH):
                row = list(ids[first : first + LENGTH])
                list(scorer([([], [*row, PAD_ID])]))  # its last token is read, too
                experts.append(kept.pop().expert_NBLS[:, 0, 1 : 1 + len(row)].astype(int))
                tokens += row
                numbers += [len(sources)] * len(row)
            sources.append(source)
    return Sample(
        model.config.sparse_layers_by_stack["decoder"],
        model.config.switch.num_experts,
        np.concatenate(experts, axis=1),
        np.array(tokens),
        np.array(numbers),
        np.array(sources),
    )


def word_kinds(vocabulary: Vocabulary) -> tuple[list[str], np.ndarray]:
    """Names of kinds, and the kind of every id: closed classes of words, else token classes."""
    classes = token_classes(vocabulary)
    names = [*PARTS_OF_SPEECH, *classes.names]
    of_word = {word: kind for kind, words in PARTS_OF_SPEECH.items() for word in words.split()}
    kind_V = classes.class_V.astype(int) + len(PARTS_OF_SPEECH)
    for token in range(vocabulary.size):
        word = vocabulary.piece(token).text
        if classes.names[classes.class_V[token]] == "word start":
            kind = of_word.get(word.strip().lower())
            kind_V[token] = kind_V[token] if kind is None else names.index(kind)
    return names, kind_V


def told(expert_TS: np.ndarray, label_T: np.ndarray, num_experts: int, num: int) -> float:
    """I(expert; label) / H(label)."""
    found = information(class_counts(expert_TS, label_T, num_experts, num))
    return found.mutual / found.columns


def within_tokens(expert_TS: np.ndarray, token_T: np.ndarray, rng) -> np.ndarray:
    """Experts permuted among the places of the same token id: what its context did is lost."""
    order_T = np.lexsort((rng.random(len(token_T)), token_T))
    permuted_TS = np.empty_like(expert_TS)
    permuted_TS[np.argsort(token_T, kind="stable")] = expert_TS[order_T]
    return permuted_TS


def beyond(value: float, permuted: Sequence[float]) -> Interval:
    """A value less what permutations give: less their mean, and 97.5% and 2.5% of them."""
    low, high = np.percentile(permuted, (2.5, 97.5))
    return Interval(value - float(np.mean(permuted)), value - float(high), value - float(low))


def compared(
    sample: Sample,
    names: Sequence[str],
    label_T: np.ndarray,
    permuted_labels: Callable[[Any], np.ndarray],
    has_context: bool,
) -> list[dict[str, Any]]:
    """Of every Switch layer: what its experts tell of the label, and a table of counts.

    Args:
        permuted_labels: rng -> labels of the tokens as chance would have them.
        has_context: the label is not decided by the token itself.
    """
    rng, E = np.random.default_rng(0), sample.num_experts
    found = []
    for layer, expert_TS in zip(sample.layers, sample.expert_NTS, strict=True):
        value = told(expert_TS, label_T, E, len(names))
        chance = [
            told(expert_TS, permuted_labels(rng), E, len(names)) for _ in range(PERMUTATIONS)
        ]
        of_words = [
            told(within_tokens(expert_TS, sample.token_T, rng), label_T, E, len(names))
            for _ in range(PERMUTATIONS * has_context)
        ]
        context = dataclasses.asdict(beyond(value, of_words)) if has_context else None
        found.append(
            {
                "layer": layer,
                "told": value,
                "chance": float(np.mean(chance)),
                "over chance": dataclasses.asdict(beyond(value, chance)),
                "over the tokens alone": context,
                "counts": class_counts(expert_TS, label_T, E, len(names)).tolist(),
            }
        )
    return found


def of_sources(sample: Sample, names: Sequence[str]) -> dict[str, Any]:
    """Books or languages. By chance: whole documents change their label with each other."""

    def permuted(rng):
        return rng.permutation(sample.source_D)[sample.document_T]

    label_T = sample.source_D[sample.document_T]
    return {"names": names, "layers": compared(sample, names, label_T, permuted, True)}


def of_kinds(sample: Sample, vocabulary: Vocabulary) -> dict[str, Any]:
    """Kinds of words. By chance: the token ids change their kind with each other."""
    names, kind_V = word_kinds(vocabulary)
    ids, index_T = np.unique(sample.token_T, return_inverse=True)
    kinds = np.unique(kind_V[ids])  # those that occur
    kind_I = np.searchsorted(kinds, kind_V[ids])

    def permuted(rng):
        return rng.permutation(kind_I)[index_T]

    names = [names[kind] for kind in kinds]
    return {"names": names, "layers": compared(sample, names, kind_I[index_T], permuted, False)}


def read_books(study: Study, documents: int) -> dict[str, dict]:
    """By the pretrained experts: books and reviews, and kinds of words, each as `compared`."""
    files = study.files(*BOOKS)
    model = switchx.load(pretrained(study, pretrained_name(study)).root)
    sample = read_sample(model, list(files.values()), documents)
    names = [pathlib.PurePath(name).name.partition(".")[0] for name in files]
    return {
        "book": of_sources(sample, [name.replace("_", " ") for name in names]),
        "kind of word": of_kinds(sample, model.vocabulary),
    }


def read_languages(study: Study, documents: int) -> dict[str, dict]:
    """By the experts that were trained on 14 languages."""
    model = switchx.load(study.runs / LANGUAGE_MODEL)
    files = [study.data / f"python_docs/{name}.txt.gz" for name in LANGUAGES]
    return {"language": of_sources(read_sample(model, files, documents), LANGUAGES)}


def pretrained_name(study: Study) -> str:
    return run_name(MODEL, 0 if study.is_quick else SEEDS[0])


def row_of(label: str, names: Sequence[str], layer: dict) -> dict[str, Any]:
    return {
        "label": f"{label}, one of {len(names)}",
        "layer": layer["layer"],
        "told by the expert": layer["told"],
        "by chance": layer["chance"],
        "over chance (range)": layer["over chance"],
        "over the tokens alone (range)": layer["over the tokens alone"],
    }


def section(results: dict[str, Any] | None = None) -> Section:
    """What results.json says, as a map a label and layer, for the notebook and the page."""
    if results is None:
        results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    shares = []
    names = []
    titles = []
    for label, found in results["labels"].items():
        for layer in found["layers"]:
            counts = np.array(layer["counts"])
            # Experts of the same label stand together.
            order = np.argsort(np.argmax(rows_to_shares(counts.T), axis=0), kind="stable")
            counts = np.c_[counts, counts.sum(axis=1)][order]
            shares.append(rows_to_shares(counts.T).T)
            names.append([*found["names"], "all"])
            titles.append(f"{label}, {layer['layer']}, experts sorted")
    return Section(
        "What experts are for",
        "Of the tokens of a book, a kind of word or a language, the percentage that each "
        "expert gets; the last column is its load. Experts are sorted by the label of which "
        "they get the largest share.",
        [class_figure(shares, names, titles)],
    )


def judge(results: dict[str, Any]) -> dict[str, Any]:
    """Reported, of the labels that have been measured."""
    labels = results["labels"]
    rows = [
        row_of(label, found["names"], layer)
        for label, found in labels.items()
        for layer in found["layers"]
    ]
    last = {label: found["layers"][-1] for label, found in labels.items()}
    text = ", ".join(
        f"{each['told']:.1%} of its {label} (by chance {each['chance']:.1%})"
        for label, each in last.items()
    )
    return {
        "verdict": "reported",
        "because": f"In the last layer a token's expert tells {text}.",
        "effect": last["book"]["over chance"],
        "effect_of": "share of a token's book that its expert tells, over chance; range of 95% "
        "of permutations",
        "tables": [{"title": "", "rows": rows}],
    }


def run(study: Study) -> None:
    cells, files = study.cells(), study.files(*BOOKS, "python_docs/*.txt.gz")
    documents = 2 if study.is_quick else DOCUMENTS
    settings = {"documents": documents, "rows": ROWS, "permutations": PERMUTATIONS}
    books = {"labels": "books", "model": f"<pretrained {pretrained_name(study)}>"} | settings
    labels = cells.get(books, lambda: read_books(study, documents))
    bindings = [
        "FOLDER='<data>/python_docs'", f"LANGUAGES={LANGUAGES}", "EVAL_EVERY=150",
        f"TRAIN_STEPS={LANGUAGE_STEPS}", f"CHECKPOINT_EVERY={LANGUAGE_STEPS}",
    ]  # fmt: skip
    study.train(cells, LANGUAGE_MODEL, ["configs/runs/pretrain_languages.gin"], bindings)
    labels |= cells.get(
        {"labels": "languages"} | settings, lambda: read_languages(study, documents)
    )
    results = study.publish(cells, files, judge, seeds=[0], labels=labels)
    if study.is_published:
        write_svg(section(results).figures[0], FOLDER / "experts.svg")


if __name__ == "__main__":
    main(__file__, __doc__, run)
