# SPDX-License-Identifier: Apache-2.0
"""Winograd schemas as T5 casts them: the text with a marked pronoun, and what it stands for.

Raffel et al. 2020 (arXiv:1910.10683), section 2.4: WSC and DPR ask which noun a pronoun means,
and T5 learns to name the noun, in WSC only from examples whose noun is the right one
(`wsc_simple`, `definite_pronoun_resolution_simple` of `t5.data.preprocessors`). In evaluation
all examples are read, and the noun that a model names is compared with the example's noun
(`same_referent`).
"""

import re
from collections.abc import Iterator

from switchx.data.corpora.raw_files import Row
from switchx.data.downstream.texts import TextExample, class_name
from switchx.fields import require

# Words that may stand before a noun and do not tell nouns apart.
_DETERMINERS = frozenset(
    "a an few her his each every many much my our some that the their these this those which "
    "whose your".split()
)
# Two texts of WSC whose pronoun is not the word that `span2_index` counts, with X in its place.
_MISCOUNTED = {
    "The boy continued to whip the pony , and eventually the pony threw him over. John laughed "
    'out quite loud. "Good for him," he said. ': (
        "The boy continued to whip the pony , and eventually the pony threw him over. John "
        'laughed out quite loud. "Good for X ," he said.'
    ),
    "When they had eventually calmed down a bit , and had gotten home, Mr. Farley put the "
    "magic pebble in an iron safe . Some day they might want to use it , but really for now, "
    "what more could they wish for?": (
        "When they had eventually calmed down a bit , and had gotten home, Mr. Farley put the "
        "magic pebble in an iron safe . Some day they might want to use X , but really for "
        "now, what more could they wish for?"
    ),
}


def wsc_train(row: Row) -> Iterator[TextExample]:
    """WSC for training: nothing if the pronoun does not mean the noun."""
    return (example for example in wsc_eval(row) if example.label == 1)


def wsc_eval(row: Row) -> Iterator[TextExample]:
    """WSC: `wsc: ... if *he* could ...` and the noun, whether it is the right one or not.

    Raises:
        ValueError: the pronoun is not the word that the row says.
    """
    inputs = _blanked(row).replace(" X ", f" *{row['span2_text']}* ")
    yield TextExample(
        f"wsc: {inputs}", row["span1_text"], str(row.get("idx", "")), label=row.get("label", 0)
    )


def definite_pronouns(row: Row) -> Iterator[TextExample]:
    """DPR: the first occurrence of the pronoun is marked, the target is the right candidate."""
    pronoun = re.escape(row["pronoun"])
    inputs = re.sub(rf" ({pronoun})( |\.|,)", r" *\1*\2", row["sentence"], count=1)
    yield TextExample(f"wsc: {inputs}", class_name(row["label"], row["candidates"]))


def same_referent(prediction: str, referent: str) -> int:
    """1 if a text names the noun, 0 if it names another, -1 if it names none.

    Case and determiners are ignored, and either may be a part of the other's words; a
    possessive is not such a part.
    """
    guessed, wanted = _without_determiners(prediction), _without_determiners(referent)
    if not guessed:
        return -1
    if ("'" in guessed) != ("'" in wanted):
        return 0
    words, others = set(guessed.split(" ")), set(wanted.split(" "))
    return int(words <= others or others <= words)


def fixed_spans(row: Row) -> Row:
    """A row of the published WSC with spans that occur in the text (TFDS's `wsc.fixed`).

    Some spans differ from the text in the case of their first letter, in a full stop at the end
    or in a line break; two name people whom the text does not name side by side, and are kept.
    """
    return row | {f"{span}_text": _fixed(row, span) for span in ("span1", "span2")}


def _fixed(row: Row, span: str) -> str:
    text, kept = row[f"{span}_text"], ("Kamenev and Zinoviev", "Kamenev, Zinoviev, and Stalin")
    if text in row["text"] or text in kept:
        return text
    word = row["text"].split()[row[f"{span}_index"]]
    first = text[0].lower() if word[0].islower() else text[0].upper()
    return (first + text[1:]).rstrip(".").replace("\n", " ")


def _blanked(row: Row) -> str:
    """The text with X for the pronoun."""
    if row["text"] in _MISCOUNTED:
        return _MISCOUNTED[row["text"]]
    words, index = row["text"].split(" "), row["span2_index"]
    found = words[index] if 0 < index < len(words) else None
    require(
        found == row["span2_text"],
        f"WSC: word {index} of {row['text'][:80]!r} is {found!r}, expected the pronoun "
        f"{row['span2_text']!r} after the first word; correct the row",
    )
    return " ".join([*words[:index], "X", *words[index + 1 :]])


def _without_determiners(text: str) -> str:
    words = text.strip().lower().split(" ")
    return " ".join(word for word in words if word not in _DETERMINERS)
