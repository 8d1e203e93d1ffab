# SPDX-License-Identifier: Apache-2.0
"""The rules of the prepared texts: OpenStax, movie reviews, e-books, Python's documentation.

`experiments/prepare_data.py` gives them checkouts and writes what they make. Texts are lists of
paragraphs. The rules are those that the published results were made with, oddities included:
whoever changes one has other hashes, and results that compare only roughly.
"""

import errno
import hashlib
import html
import itertools
import os
import pathlib
import re
import zipfile
from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

# Of the glossaries' questions.
SPLITS = ("train", "validation", "test")

# Patterns and what takes their place, one after the other.
Rules = list[tuple[re.Pattern[str], str]]


def rules(*pairs: tuple[str, str]) -> Rules:
    return [(re.compile(pattern, re.MULTILINE), new) for pattern, new in pairs]


def applied(these: Rules, text: str) -> str:
    for pattern, new in these:
        text = pattern.sub(new, text)
    return text


def read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def need(folders: Iterable[pathlib.Path], pattern: str) -> None:
    """FileNotFoundError, before any work, where one has no such file."""
    for folder in folders:
        if not any(folder.glob(pattern)):
            path = str(folder / pattern)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


# Movie reviews


def movie_reviews(corpus: pathlib.Path) -> Iterator[str]:
    """Each review as one line; the negative ones first, as the corpus sorts them."""
    with zipfile.ZipFile(corpus) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".txt"):
                yield " ".join(archive.read(name).decode().split())


# Standard Ebooks

_OPF = "{http://www.idpf.org/2007/opf}"
_XHTML = "{http://www.w3.org/1999/xhtml}"
_KIND = "{http://www.idpf.org/2007/ops}type"
_WORD_JOINER = "\u2060"


def ebook(folder: pathlib.Path) -> Iterator[str]:
    """The paragraphs of a book, each on one line, titles of chapters among them; notes, their
    marks, and what stands before and after the book are left out."""
    package = folder / "src/epub/content.opf"
    root = ElementTree.parse(package).getroot()
    pages = {item.get("id"): item.get("href") for item in root.iter(f"{_OPF}item")}
    for item in root.iter(f"{_OPF}itemref"):
        page = package.parent / pages[item.get("idref")]
        body = ElementTree.parse(page).getroot().find(f"{_XHTML}body")
        if "bodymatter" in body.get(_KIND, "").split():
            lines = (" ".join(text_of(each).split()) for each in body.iter(f"{_XHTML}p"))
            yield from filter(None, lines)


def text_of(element: ElementTree.Element) -> str:
    """All text of an element but marks of notes."""
    if element.get(_KIND) == "noteref":
        return ""
    inner = "".join(text_of(child) + (child.tail or "") for child in element)
    return ((element.text or "") + inner).replace(_WORD_JOINER, "")


# OpenStax


def book(folder: pathlib.Path) -> Iterator[str]:
    for page in pages(folder):
        yield from page_prose(page)


def pages(folder: pathlib.Path) -> Iterator[str]:
    """The Markdown of a book's pages, in the order of its table of contents."""
    for name in re.findall(r"\]\((contents/[^)]*\.md)\)", read(folder / "SUMMARY.md")):
        yield read(folder / name)


def page_prose(page: str) -> list[str]:
    """A page's title and paragraphs; nothing of a page that is hardly more than tables."""
    title, body = re.match(r'(?s)---\ntitle: "(.*?)"\n.*?\n---\n(.*)', page).groups()
    if title in ("Preface", "Further Reading"):
        return []
    text = prose(outside_and_inside(body, "exercise", "glossary")[0])
    return [html.unescape(title), *text] if sum(map(len, text)) >= 200 else []


def outside_and_inside(text: str, *types: str) -> tuple[str, str]:
    """What is outside and what inside all <div data-type=...> of these types."""
    start = re.compile(rf'<div\b[^>]*data-type="(?:{"|".join(types)})"')
    parts, depth, position = ([], []), 0, 0
    for tag in re.finditer(r"<div\b[^>]*>|</div>", text):
        if depth or start.match(tag.group()):
            if depth == 0 or (depth == 1 and tag.group() == "</div>"):
                parts[depth].append(text[position : tag.start()])
                position = tag.end()
            depth += -1 if tag.group() == "</div>" else 1
    parts[depth > 0].append(text[position:])
    return "".join(parts[0]), "\n\n".join(parts[1])


_BEFORE_ENTITIES = rules(
    (r"(?s)<!--.*?-->", ""),
    (r"(?s)<table\b.*?</(?:table|span)>", ""),  # tables; of those with a title, that
    (r"(?s)<math\b.*?</math>", " "),
    (r"^ *!\[.*$", ""),  # images on a line, and within one
    (r'!\[(?:[^\]\\]|\\.)*\]\([^")]*(?:"[^"]*")?\)', ""),
    (r"\[\\\[link\\\]\]\([^)]*\)", "the figure"),
    (r"^ *\[\d+\]: .*$", ""),  # addresses of links
    (r"\{:[^}]*\}", ""),  # kramdown's attributes
    (r"<[^>]*>", ""),
    (r"\[((?:[^\]\\]|\\.)*)\](?:\([^)]*\)|\[\d+\])", r"\1"),  # links
)
_AFTER_ENTITIES = rules(
    (r"^[ \t]*\|.*$", ""),  # rows of tables
    (
        r"^#+ *(?:(?:Art Connection|Conceptual Question|Critical Thinking Question"
        r"|Interactive Link Question|Review Question)s?"
        r"|(?:Bringing It Together|Chemistry End of Chapter Exercises|Exercises"
        r"|Free Response|Homework|Practice|References) *|Problem.*)$",
        "",
    ),  # headings of what is left out
    (r"(?<!\w)\*+(?=\S)|(?<=\S)\*+(?!\w)", ""),  # emphasis
    (r"\\+([][\\`*_{}()#+.!|<>:~\"'$=^&-])", r"\1"),  # escapes
)


def prose(markdown: str) -> list[str]:
    """Plain paragraphs; a list that starts one keeps its lines."""
    text = applied(_AFTER_ENTITIES, html.unescape(applied(_BEFORE_ENTITIES, markdown)))
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        lines = [re.sub(r"[ \t\xa0]+", " ", line).strip() for line in block.strip().split("\n")]
        lines = [line for line in lines if line not in ("", "^")]
        if any(map(str.isalpha, "".join(lines))):
            lines[0] = re.sub(r"^#+ *", "", lines[0])
            is_list = re.match(r"(?:\*|\d+\.) ", lines[0])
            paragraphs.append(("\n" if is_list else " ").join(lines))
    return paragraphs


# Questions on OpenStax


def glossary(books: dict[str, pathlib.Path]) -> dict[str, list[dict[str, str]]]:
    """The definitions of all books: split by a hash of the term, sorted by one of the text."""
    need(books.values(), "SUMMARY.md")
    splits = {split: [] for split in SPLITS}
    seen = set()
    for name, folder in books.items():
        for term, definition in itertools.chain.from_iterable(map(definitions, pages(folder))):
            key = words(term).strip(), words(definition)
            if key in seen or f" {key[0]} " in f" {key[1]} ":
                continue
            seen.add(key)
            percent = hashed(key[0]) % 100
            split = "test" if percent < 8 else "validation" if percent < 16 else "train"
            splits[split].append({"inputs": definition, "targets": term, "book": name})
    for questions in splits.values():
        questions.sort(key=lambda question: hashed(question["inputs"] + question["targets"]))
    return splits


# term, newline, colon, definition: up to a line with ^ or a blank one before the next term.
_ENTRY = re.compile(r"^([^:#^]+?)\n+: (.*?)(?=\n\^|\n\s*\n[^\s:]|\Z)", re.MULTILINE | re.DOTALL)


def definitions(page: str) -> Iterator[tuple[str, str]]:
    """Terms of at most four words, and what they mean in 12 to 400 characters."""
    text = outside_and_inside(page, "glossary")[1]
    text = re.sub(r"\s*\{:[^}]*\}", "", text)
    text = re.sub(r"(?s)<math\b.*?</math>", " ", text)
    for entry in _ENTRY.finditer(text):
        if "\\:" in entry[2]:
            continue  # an escaped colon, that of a definition itself (one entry)
        term, definition = (" ".join(" ".join(prose(part)).split()) for part in entry.groups())
        term = re.sub(r"\s*\([^)]*\)", "", term).strip()
        formulas = re.search(r"[$<>{|}\\]", term + definition)
        if 12 <= len(definition) <= 400 and len(term.split()) <= 4 and not formulas:
            yield term, definition


def words(text: str) -> str:
    return re.sub("[^a-z0-9]+", " ", text.lower())


def hashed(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


# Python's documentation

# Of these languages, all that there is; of the others, some pages, the same where translated.
_WHOLE = ("id", "it", "pl", "ro", "tr", "zh_tw")
# The English text is what was translated into one of these.
_ENGLISH = ("es", "uk", "zh_cn", "ko")

Message = tuple[str, str, str]  # page, English, translation


def python_docs(languages: dict[str, pathlib.Path]) -> dict[str, list[str]]:
    """Every language's translations, and the English of some of them without repetition."""
    need(languages.values(), "**/*.po")
    messages = {name: list(translated(folder)) for name, folder in languages.items()}
    chosen = selected({page for name in _ENGLISH for page, _, _ in messages[name]})
    english = {page: {} for page in sorted(chosen)}
    for name in _ENGLISH:
        for page, text, _ in messages[name]:
            if page in chosen:
                english[page][text] = None  # in a dict, for its order
    texts = {"en": list(itertools.chain.from_iterable(english.values()))}
    for name in languages:
        texts[name] = [
            text for page, _, text in messages[name] if name in _WHOLE or page in chosen
        ]
    return texts


_EVERY_PAGE = ("faq", "glossary.po", "howto", "installing", "reference", "tutorial", "using")
_EVERY_THIRD_PAGE = ("c-api", "extending", "library")


def selected(names: Iterable[str]) -> set[str]:
    """All pages of the introductory parts, every third one of the references."""

    def within(folders: tuple[str, ...]) -> list[str]:
        return sorted(name for name in names if name.split("/")[0] in folders)

    return {*within(_EVERY_PAGE), *within(_EVERY_THIRD_PAGE)[::3]}


_RST = rules(
    (r":[\w:+-]+:`([^`<]+?)\s*<[^`>]*>`", r"\1"),  # :role:`text <target>`
    (r":[\w:+-]+:`[~!]?([^`<]+?)\s*`", r"\1"),
    (r"`([^`<]+?)\s*<[^`>]*>`__?", r"\1"),  # links
    (r"``([^`]+)``", r"\1"),
    (r"`([^`]+)`_?", r"\1"),
    (r"(\*\*?)([^*]+)\1", r"\2"),  # emphasis
    (r"\|\w+\|", ""),  # substitutions
    (r"\\ ", ""),  # a space that is none
    (r"::", ":"),
    (r"\s+", " "),
)


def translated(folder: pathlib.Path) -> Iterator[Message]:
    """Messages of at least 20 characters that the translation changes, fuzzy ones left out."""
    for path in sorted(folder.rglob("*.po")):
        for source, target in po_messages(read(path)):
            english, text = (applied(_RST, each).strip() for each in (source, target))
            if text and len(english) >= 20 and text != english:
                yield str(path.relative_to(folder)), english, text


def po_messages(text: str) -> Iterator[tuple[str, str]]:
    """The msgid and msgstr of each entry of a .po file that is not marked as fuzzy."""
    strings = r'((?:".*"\n)+)', r'((?:".*"\n?)+)'
    entry = re.compile(rf"^msgid {strings[0]}msgstr {strings[1]}", re.MULTILINE)
    for block in re.split(r"\n[ \t]*\n", text):
        found = entry.search(block)
        if found and not re.search(r"^#,.*fuzzy", block, re.MULTILINE):
            yield unquoted(found[1]), unquoted(found[2])


def unquoted(strings: str) -> str:
    joined = "".join(line.strip()[1:-1] for line in strings.strip().split("\n"))
    escapes = {"n": "\n", "t": "\t"}
    return re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), joined)
