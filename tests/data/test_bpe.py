# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of a `tokenizer.json`, against transformers' tokenizers of the same files."""

import itertools
import json
import pickle
import sys

import pytest

from switchx.data.bpe import CARRIED, BpeVocabulary, read_bpe
from switchx.data.token_classes import token_classes
from switchx.data.vocabularies import load_vocabulary, read_or_trained, save_vocabulary
from tests.data.refusals import refused
from tests.data.tokenizer_files import FORMS, TEXTS, tokenizer_folder

NOT_READ = '{"model": {"type": "BPE", "vocab": [], "merges": 3}}'


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(NOT_READ)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused(f"{tmp_path}/tokenizer.json needs <any>: pip install 'switchx[bpe]'"):
        _ = read_or_trained(str(tmp_path / "tokenizer.json")).size
    with refused("pad_id=3 is one of eos_ids=(7, 3): an end would be cut off as padding<any>"):
        BpeVocabulary(path="tokenizer.json", pad_id=3, eos_ids=(7, 3))
    with refused("vocabulary no/tokenizer.json cannot be read: <any>"):
        BpeVocabulary(path="no/tokenizer.json").fingerprint()


@pytest.fixture
def library():
    return pytest.importorskip("tokenizers", reason="needs pip install 'switchx[bpe]'")


@pytest.fixture
def theirs(library):
    """transformers' tokenizer of a folder's file."""
    transformers = pytest.importorskip("transformers")

    def read(folder):
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json")
        )

    return read


def as_strings(values: dict) -> None:
    values["model"]["merges"] = list(map(" ".join, values["model"]["merges"]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", [lambda values: None, as_strings], ids=["pairs", "strings"])
def test_ids_and_texts_are_those_of_transformers(tmp_path, theirs, form, change):
    folder = tokenizer_folder(tmp_path / form, form, change)
    vocabulary, oracle = read_bpe(folder), theirs(folder)
    assert vocabulary.size == max(oracle.get_vocab().values()) + 1
    ends = oracle.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert vocabulary.eos_ids == tuple(ends) and vocabulary.pad_id is None
    started = oracle("a")["input_ids"][:1] if form in FORMS[2:] else [None]
    assert [vocabulary.start_id] == started
    for text in TEXTS:
        ids = vocabulary.encode(text)
        options = {"add_special_tokens": False, "split_special_tokens": True}
        assert ids == oracle(text, **options)["input_ids"]
        assert not set(ids) & vocabulary.silent_ids
        assert vocabulary.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False)
        assert vocabulary.decode([*ids, ends[0]]) == vocabulary.decode(ids)
    assert pickle.loads(pickle.dumps(vocabulary)).encode(TEXTS[3]) == vocabulary.encode(
        TEXTS[3]
    )
    for token_id in set(range(vocabulary.size)) - vocabulary.silent_ids:
        said = oracle.decode([token_id], clean_up_tokenization_spaces=False)
        assert vocabulary.decode([token_id]) == said
        if (piece := vocabulary.piece(token_id)).kind == "text" and said.strip():
            assert piece.text.strip() == said.strip()
    assert vocabulary.decode([vocabulary.size, 1 << 40]) == " \u2047 " * 2
    names = token_classes(vocabulary).names
    assert {"byte", "special", "word start"} <= set(names)


@pytest.mark.parametrize("form", ["llama_2", "mixtral"])
def test_of_bytes_that_are_no_text_the_rest_stays(tmp_path, library, form):
    """A longer answer begins with the text of a shorter one, but for half a character."""
    vocabulary = read_bpe(tokenizer_folder(tmp_path / form, form))
    euro, whole = vocabulary.encode("\u20ac"), vocabulary.encode("a\U0001f680\U0001f680b")
    assert len(euro) > 3, "bytes, behind the space that a text begins with"
    broken = [*euro, vocabulary.encode("\U0001f680")[1], *vocabulary.encode("hi")]
    for ids in (broken, whole):
        texts = [vocabulary.decode(ids[:n]) for n in range(len(ids) + 1)]
        for shorter, longer in itertools.pairwise(texts):
            assert longer.startswith(shorter.rstrip("\ufffd"))
    assert vocabulary.decode(broken).startswith("\u20ac\ufffd")
    assert vocabulary.decode(whole) == "a\U0001f680\U0001f680b"


def test_added_tokens_that_the_file_has_not_are_named(tmp_path, library):
    """transformers adds them where it reads the folder, and has other ids of a text."""
    folder = tokenizer_folder(tmp_path / "theirs", "qwen")
    size = read_bpe(folder).size
    own = json.loads((folder / "tokenizer_config.json").read_text())
    there = {"0": {"content": read_bpe(folder)._name(0)}}
    for added, others, said in (
        (there, {}, None),
        (there | {str(size): {"content": "<tool>"}}, {}, f"'<tool>' ({size})"),
        ({}, {"<|im_start|>": 3}, "'<|im_start|>' (3)"),
        ({"x": {}}, {}, "is damaged"),
    ):
        values = own | {"added_tokens_decoder": added}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
        (folder / "added_tokens.json").write_text(json.dumps(others))
        if said is None:
            assert read_bpe(folder).size == size
            continue
        with refused(f"<any>{said}<any>"):
            read_bpe(folder)


def test_the_models_own_ids_go_before_those_beside_another_tokenizer(tmp_path, library):
    """`switchx convert --vocabulary=FILE`: the model ends where it was trained to."""
    folder = tokenizer_folder(tmp_path / "other", "qwen")
    generation, config = {"eos_token_id": [5, 6]}, {"eos_token_id": 6, "pad_token_id": 7}
    vocabulary = read_bpe(folder, generation, config)
    assert (vocabulary.eos_ids, vocabulary.pad_id) == ((6, 5), 7)
    assert read_bpe(folder, {}, {}).eos_ids != vocabulary.eos_ids  # of tokenizer_config.json


def test_special_ids_come_from_a_text_that_asks_for_them(tmp_path, theirs):
    folder = tokenizer_folder(tmp_path / "theirs", "qwen")
    vocabulary, text = read_bpe(folder), "<|im_start|>user\n<|im_end|>"
    want = theirs(folder)(text, add_special_tokens=False)["input_ids"]
    assert vocabulary.encode_special(text) == want != vocabulary.encode(text)
    template = "{{ raise_exception('not run') }}\n"
    assert vocabulary.chat_template == template
    (folder / "chat_template.jinja").unlink()
    with refused(f"{folder} has no chat template, neither <any>"):
        _ = vocabulary.chat_template
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    for there in (template, named):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": there}))
        assert vocabulary.chat_template == template


def test_special_tokens_may_be_named_in_their_own_file(tmp_path, theirs):
    """What the tokenizer puts before a text is the start, whatever `add_bos_token` says."""
    folder = tokenizer_folder(tmp_path / "theirs", "llama_2")
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "a_token": "b"}')
    special = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    vocabulary, tokenizer = read_bpe(folder), theirs(folder)
    want = tokenizer("hello")["input_ids"]
    assert [vocabulary.start_id, *vocabulary.encode("hello")] == want
    assert vocabulary.eos_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert vocabulary.special_texts == dict(
        bos_token="<s>", eos_token="<|im_end|>", a_token="b"
    )


def test_the_file_is_kept_byte_for_byte_with_what_stands_beside_it(tmp_path, library):
    folder = tokenizer_folder(tmp_path / "theirs", "qwen")
    vocabulary = read_or_trained(str(folder / "tokenizer.json"))
    for directory in (tmp_path / "run", tmp_path / "again"):
        directory.mkdir()
        save_vocabulary(vocabulary, directory)
        vocabulary = load_vocabulary(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (directory / name).read_bytes() == (folder / name).read_bytes()
    assert not (directory / "generation_config.json").exists() and len(CARRIED) == 3
    assert vocabulary.encode(TEXTS[0]) == read_bpe(folder).encode(TEXTS[0])
    description = json.loads((directory / "vocabulary.json").read_text())
    assert description == {
        "kind": "bpe", "fingerprint": read_bpe(folder).fingerprint(), "pad_id": None,
        "eos_ids": list(vocabulary.eos_ids), "start_id": None,
        "named_pad": read_bpe(folder).named_pad,
    }  # fmt: skip
    (directory / "special_tokens_map.json").symlink_to("/etc/passwd")
    with refused(f"{directory}/special_tokens_map.json leads out of the folder"):
        load_vocabulary(directory)
    (directory / "special_tokens_map.json").unlink()
    with (directory / "tokenizer.json").open("ab") as file:
        file.write(b"\n")
    with refused("<any>has the fingerprint <any>; restore tokenizer.json from<any>"):
        load_vocabulary(directory)


EMPTY = dict.fromkeys(("generation_config.json", "tokenizer_config.json"), "{}")


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"tokenizer.json": NOT_READ},
            "no tokenizer.json that tokenizers <any> reads: <any>",
        ),
        ({"tokenizer.json": "version https://git-lfs"}, "is a pointer of Git LFS <any>"),
        ({"tokenizer_config.json": "[" * 999}, "cannot be read: <any>; restore the file"),
        (
            {"generation_config.json": '{"eos_token_id": [-1]}'},
            "eos_token_id=[-1]; expected",
        ),
        (
            {"generation_config.json": '{"eos_token_id": 9999}'},
            "no token has the special id",
        ),
        (EMPTY, "no file beside tokenizer.json names the end"),
        (
            EMPTY | {"tokenizer_config.json": '{"eos_token": "no"}'},
            "'no' is no token of",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, library, files, message):
    folder = tokenizer_folder(tmp_path / "theirs", "qwen")
    for name, content in files.items():
        (folder / name).write_text(content)
    with refused(f"<any>{message}<any>"):
        _ = read_bpe(folder).size


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dropout": 0.5}, "model.dropout=0.5 merges at random; set it to null"),
        (
            {"type": "WordLevel", "unk_token": "!"},
            "model.type is WordLevel, expected BPE",
        ),
    ],
)
def test_other_models_are_refused(tmp_path, library, change, message):
    folder = tokenizer_folder(
        tmp_path / "theirs", "qwen", lambda values: values["model"].update(change)
    )
    with refused(f"{folder}/tokenizer.json: {message}"):
        read_bpe(folder)
