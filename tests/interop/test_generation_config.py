# SPDX-License-Identifier: Apache-2.0
"""`generation_config.json`: the texts of transformers with the same file, and what is said."""

import json

import pytest

import switchx
from switchx.cli.main import main
from switchx.data.special_ids import OURS, their_ids
from switchx.fields import FieldError
from switchx.inference.config import DecodingConfig, with_defaults
from switchx.interop import huggingface
from switchx.interop.generation_config import decoding_defaults, write_generation
from tests.data.refusals import refused
from tests.interop.decoder_models import theirs
from tests.interop.folders import change_config, huggingface_folder
from tests.interop.transformers_models import SIZES, build

IDS = {"pad_token_id": 1, "eos_token_id": [2, 5], "decoder_start_token_id": 0}
MADLAD = (1, 2, 0)
FILES = {
    "lengths": {"max_length": 9, "min_length": 6, "suppress_tokens": [1, 7]},
    "beams": {
        "max_new_tokens": 10, "num_beams": 3, "length_penalty": 0.6, "early_stopping": True,
        "no_repeat_ngram_size": 2, "num_return_sequences": 2, "suppress_tokens": [1],
    },
    # A start that is no padding is another token to the penalty.
    "forced": {
        "forced_bos_token_id": 11, "repetition_penalty": 1.7, "max_length": 12,
        "suppress_tokens": [0, 1],
    },
}  # fmt: skip


def defaults(**values):
    return decoding_defaults(values, MADLAD, 24, "file")


def test_what_a_file_says_in_our_names_and_back():
    values = FILES["beams"] | {"eos_token_id": [2, 5, 1], "forced_bos_token_id": 0}
    found, notes = defaults(**values, use_cache=True)
    assert not notes
    assert found["beam_size"] == 3
    assert (found["other_eos_ids"], found["forced_prefix"], found["suppressed_ids"]) == (
        ([5, 0], [2], [0])
    )
    assert write_generation(found, MADLAD, 0) == IDS | values
    sampled, _ = defaults(do_sample=True, top_k=0, top_p=0.9)
    assert sampled == {"temperature": 1.0, "top_k": None, "top_p": 0.9}
    again = write_generation(sampled, MADLAD, 0)
    assert (again["do_sample"], again["top_k"]) == (True, 0)


def test_what_counts_the_prompt_is_named_and_not_used_where_no_encoder_reads_it():
    """transformers: max_length=12 of a prompt of 6 tokens leaves 6."""
    values = {"max_length": 4096, "min_length": 3, "forced_bos_token_id": 7, "num_beams": 2}
    found, (note,) = decoding_defaults(values, OURS, 24, "file", has_encoder=False)
    assert found == {"beam_size": 2}
    assert "not used: max_length=4096, min_length=3, forced_bos_token_id=7;" in note
    values = {"max_length": 4096, "min_length": 0, "max_new_tokens": 5}
    assert decoding_defaults(values, OURS, 24, "file", has_encoder=False) == (
        {"max_new_tokens": 5},
        [],
    )


@pytest.mark.hf
def test_their_max_length_depends_on_the_other_prompts_of_a_batch():
    """Why it is not used: what docs/checkpoints_of_others.md says of it."""
    import torch

    model, said = theirs("llama"), dict(max_length=8, eos_token_id=None, do_sample=False)
    alone = model.generate(torch.tensor([[5, 9]]), **said)
    rows = torch.tensor([[0, 0, 0, 5, 9], [5, 9, 11, 4, 7]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    beside = model.generate(rows, attention_mask=mask, pad_token_id=0, **said)
    assert alone[0, 2:].shape == (6,) and beside[0, 5:].shape == (3,)
    assert alone[0, 2:5].tolist() == beside[0, 5:].tolist()


@pytest.mark.parametrize(("said", "end", "others"), [([9, 1], 1, [9]), ([9, 8], 9, [8])])
def test_the_end_of_a_text_that_is_read_is_that_of_config_json(tmp_path, said, end, others):
    """Any of several ends an output; the tokenizer puts one behind an input."""
    folder, _ = huggingface_folder(tmp_path)
    change_config(folder, eos_token_id=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    read = huggingface.read_checkpoint(folder)
    assert read.special_ids[1] == end
    ours = {their: our for our, their in their_ids(read.special_ids).items()}
    assert read.decoding["other_eos_ids"] == [ours.get(i, i) for i in others]
    assert any("config.json ends a text with 1" in note for note in read.notes) == (end != 1)


def test_what_is_not_used_is_said_and_who_asks_chooses_the_way():
    unused = {"bad_words_ids": [[3]], "penalty_alpha": 0.5, "forced_eos_token_id": 1}
    (note,) = defaults(**unused, typical_p=1.0, diversity_penalty=0.0, top_k=50)[1]
    assert note.startswith("file: not used: ")
    assert all(f"{name}={value!r}" in note for name, value in unused.items())
    assert "typical_p" not in note and "top_k" not in note
    assert "do_sample=True" in defaults(do_sample=True, num_beams=2)[1][0]
    found, (note,) = defaults(temperature=0.5, top_p=1.0, do_sample=False)
    assert found == defaults()[0] and "temperature=0.5 without do_sample=True: neither" in note
    found, (note,) = defaults(forced_bos_token_id=MADLAD[0])
    assert "forced_prefix" not in found and f"forced_bos_token_id={MADLAD[0]}" in note
    of_folder = {"beam_size": 4, "num_return_sequences": 2, "repetition_penalty": 1.2}
    for asked in ({"temperature": 0.7}, {"beam_size": 1}):
        assert with_defaults(of_folder, asked) == {"repetition_penalty": 1.2} | asked
    assert DecodingConfig(**with_defaults(of_folder, {"max_new_tokens": 3})).beam_size == 4
    with pytest.raises(FieldError, match="forced_prefix"):
        DecodingConfig(forced_prefix=[5], other_eos_ids=[5])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"suppress_tokens": [24]}, "file: the tokens [24] are not all of 0 to 23"),
        ({"forced_bos_token_id": "x"}, "file: the tokens ['x'] are not all of 0 to 23"),
        ({"num_beams": 0}, "DecodingConfig.beam_size=0"),
        ({"eos_token_id": [2, 5], "forced_bos_token_id": 5}, "id 5 ends an output"),
    ],
)
def test_what_cannot_be_is_refused(values, said):
    with refused(said):
        DecodingConfig(**defaults(**values)[0])


@pytest.mark.hf
@pytest.mark.parametrize("name", FILES)
def test_the_texts_of_transformers_with_the_same_file(in_a_folder, one_device, name, capsys):
    """Of MADLAD-400's ids, with two ends; Python, the command and a quantized copy alike."""
    import torch

    special = {"pad_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    theirs = build("T5", SIZES | special | {"feed_forward_proj": "gated-gelu"})
    with torch.no_grad():
        theirs.lm_head.weight *= 3.0
    theirs.generation_config.update(**IDS, **FILES[name])
    theirs.save_pretrained("theirs")
    assert main(["convert", "--from=huggingface", "theirs", "ours"]) == 0
    model = switchx.load("ours")
    inputs = [[8, 9, 3, 14, 2], [7, 7, 20, 4, 2], [11, 0, 18, 6, 2]]
    number = model.decoding.get("num_return_sequences", 1)
    for tokens in inputs:
        with torch.no_grad():
            want = theirs.generate(torch.tensor([tokens]))[:, 1:].tolist()
        prompt = model.vocabulary.encode(" ".join(map(str, tokens)))
        (got,) = model.generate([prompt])
        for row, said in zip(want, got if number > 1 else [got], strict=True):
            end = next((i for i, token in enumerate(row) if token in (2, 5)), len(row))
            assert model.vocabulary.decode(said) == " ".join(map(str, row[:end]))
    (in_a_folder / "in.txt").write_text(" ".join(map(str, inputs[-1][:-1])) + "\n")
    capsys.readouterr()
    assert main(["generate", "--model_dir=ours", "--input=in.txt"]) == 0
    texts = [model.vocabulary.decode(each) for each in (got if number > 1 else [got])]
    assert capsys.readouterr().out.strip("\n").split("\t") == texts
    assert main(["generate", "--model_dir=ours", "--input=in.txt", "--max_new_tokens=2",
                 "--min_new_tokens=0", "--beam_size=1"]) == 0  # fmt: skip
    assert len(capsys.readouterr().out.split()) <= 2
    # A longest text of ours, which no file gave, makes no file wrong.
    (in_a_folder / "theirs/generation_config.json").write_text('{"min_new_tokens": 100}')
    assert main(["convert", "--from=huggingface", "theirs", "long"]) == 0
    assert switchx.load("long").decoding == {"min_new_tokens": 100, "max_new_tokens": 100}
