# SPDX-License-Identifier: Apache-2.0
"""Every family that `switchx convert` reads, through the commands, and back."""

import json
import shutil

import jax
import numpy as np
import pytest
import sentencepiece

import switchx
from switchx.cli.main import main
from switchx.data.special_ids import in_our_order
from switchx.data.vocabularies import load_vocabulary
from switchx.data.vocabulary_training import train_sentencepiece
from switchx.interop.huggingface import read_checkpoint
from tests.data.words import sentences
from tests.interop.transformers_models import NLLB_SIZES, SIZES, build, build_nllb

ROWS = 512
SPARSE = dict(
    num_experts=4, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, expert_capacity=64
)
OTHERS = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
FAMILIES = {
    "t5": ("T5", {}),
    "t5_1_1": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {"tie_word_embeddings": False}),
    "umt5": ("UMT5", {}),
    "byt5": ("T5", {"vocab_size": 384, "feed_forward_proj": "gated-gelu"}),
    "switch": ("SwitchTransformers", SPARSE),
    "nllb_moe": (None, {"encoder_layers": 2, "decoder_layers": 2}),
    # MADLAD-400's and Pile-T5's special ids.
    "madlad": (
        "T5",
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} | OTHERS,
    ),
    "pile_t5": ("UMT5", OTHERS | {"pad_token_id": 0}),
}
SPECIAL = {"madlad": (1, 2, 0), "pile_t5": (0, 2, 0)}
RESHAPES = {
    "nllb_moe": ["--experts=10"],
    "switch": ["--experts=2 --reduce=drop", "--experts=8 --upcycle=copies"],
}
TRAIN = (
    "TRAIN_STEPS=1",
    "NUM_MICROBATCHES=2",
    "TEXT_EVALUATION=None",
    "BATCH_SIZE=8",
    "INPUTS_LENGTH=32",
    "TARGETS_LENGTH=32",
    "EVAL_EVERY=1",
    "TrainingJob.eval_batches=1",
)


def run(*options) -> None:
    assert main(list(map(str, options))) == 0, options


def their_model(name: str):
    family, changes = FAMILIES[name]
    if family is None:
        return build_nllb(**NLLB_SIZES | {"vocab_size": ROWS} | changes)
    sizes = SIZES | {"vocab_size": ROWS, "num_layers": 2, "num_decoder_layers": 2}
    return build(family, sizes | changes)


def write_tokenizer(name: str, folder) -> None:
    if name == "byt5":
        tokenizer = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
    elif name == "nllb_moe":
        return
    else:
        (folder / "text.txt").write_text("".join(sentences(400)))
        if name in SPECIAL:
            kind = "bpe" if name == "pile_t5" else "unigram"
            sentencepiece.SentencePieceTrainer.train(
                **dict(input=folder / "text.txt", model_prefix=folder / "spiece"),
                **dict(vocab_size=380, model_type=kind, byte_fallback=kind == "bpe"),
                **dict(unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2),
            )
        else:
            train_sentencepiece([str(folder / "text.txt")], 400, str(folder))
            shutil.move(folder / "vocabulary.model", folder / "spiece.model")
        tokenizer = {"tokenizer_class": "T5Tokenizer", "extra_ids": 100}
        if name == "mt5":
            tokenizer["extra_ids"] = 0
            (folder / "added_tokens.json").write_text('{"<sep>": 402, "<extra_id_0>": 401}')
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def their_logits(model, source_BM, target_BL):
    import torch

    with torch.no_grad():
        return model(
            input_ids=torch.tensor(source_BM), decoder_input_ids=torch.tensor(target_BL)
        ).logits.numpy()


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_from_transformers_through_all_commands_and_back(in_a_folder, one_device, capsys, name):
    import torch
    import transformers

    theirs = their_model(name)
    pad = theirs.config.pad_token_id
    # A start that is not padding has no row of its own for padding that is written.
    theirs.generation_config.update(max_length=12, suppress_tokens=[pad])
    theirs.save_pretrained("theirs")
    write_tokenizer(name, in_a_folder / "theirs")
    run("convert", "--from=huggingface", "theirs", "ours")
    model = switchx.load("ours")
    is_nllb = name == "nllb_moe"
    rng = np.random.default_rng(0)
    source_BM, target_BL = rng.integers(4, 300, (2, 3, 7))
    target_BL[:, 0] = 0
    logits_BLV = np.asarray(model.logits(source_BM, target_BL))
    if not is_nllb:  # test_nllb_moe.py compares those of its own ids and experts
        special_ids = SPECIAL.get(name, (0, 1, 2))
        want_BLV = their_logits(theirs, source_BM, target_BL)
        ordered_BLV = in_our_order(want_BLV, 2, special_ids)
        assert abs(logits_BLV - ordered_BLV).max() <= 1e-5 * abs(want_BLV).max()
        theirs_V = in_our_order(np.arange(model.config.vocab_size), 0, special_ids)
        for text in ("" if name == "byt5" else "中", *sentences(3)):
            prompt = model.vocabulary.encode(text.strip()) + [1]
            if name in SPECIAL:
                pieces = sentencepiece.SentencePieceProcessor(model_file="theirs/spiece.model")
                assert theirs_V[prompt].tolist() == [*pieces.encode(text.strip()), 2]
            wanted = theirs.generate(torch.tensor(theirs_V[None, prompt]))[0, 1:]
            wanted = wanted[: -1 if wanted[-1] == theirs_V[1] else None].tolist()
            assert theirs_V[model.generate([prompt])[0]].tolist() == wanted

    texts = ["12 5 7", "9 9", "40"] if is_nllb else sentences(3)
    (in_a_folder / "in.txt").write_text("".join(f"{text.strip()}\n" for text in texts))
    if name in ("switch", "nllb_moe"):
        options = ("--output=atlas", "--knockouts=2", "--min_tokens=1")
        run("atlas", "ours", "--input", "in.txt", *options)
        assert (in_a_folder / "atlas/tables/ours/knockouts.parquet").exists()
    pairs = [{"inputs": text.strip(), "targets": text.strip()} for text in texts * 8]
    (in_a_folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    capsys.readouterr()
    asked = ["--model_dir=ours", "--input=in.txt", "--max_new_tokens=4"]
    run("generate", *asked, "--output=out.txt")
    assert len((in_a_folder / "out.txt").read_text().splitlines()) == 3
    lines = "".join(f"{text.strip()}\t{text.strip()}\n" for text in texts)
    (in_a_folder / "pairs.tsv").write_text(lines)
    run("score", "--model_dir=ours", "--input=pairs.tsv", "--output=scores.txt")
    assert len((in_a_folder / "scores.txt").read_text().splitlines()) == 3
    run("checkpoint", "verify", "ours")
    if model.config.switch is not None:
        run("quantize", "--model_dir=ours", "--output=int8", "--bits=8")
        run("generate", "--model_dir=int8", *asked[1:], "--output=out8.txt")
        assert len((in_a_folder / "out8.txt").read_text().splitlines()) == 3
        words = "--model_dir=ours", "--input=pairs.tsv", "--capacity=trained"
        run("score", *words, "--output=again.txt", "--record=record.parquet")
        run("drops", "record.parquet")  # its own drops follow from it, or the status is 1
        run("drops", "record.parquet", "--group_sizes=16", "--priority=gate")
        run("drift", "ours", "int8", "--input=pairs.tsv")

    finetune = "finetune_switch_base" if name == "switch" else "finetune"
    files = [f"runs/{finetune}.gin", "tasks/pairs.gin"]
    options = [f"--gin_file=configs/{file}" for file in files] + ["--gin_file=ours/model.gin"]
    brief = [f"--gin.{each}" for each in (*TRAIN, "FILES=pairs.jsonl", "INIT_FROM=ours")]
    run("train", *options, *brief, "--model_dir=tuned")
    run("checkpoint", "verify", "tuned")
    assert switchx.load("tuned").step == 1
    for n, way in enumerate(RESHAPES.get(name, [])):
        words = (*options, *brief, *way.split())
        run("reshape", "--model_dir=ours", f"--output=reshaped{n}", *words)
        if name == "switch":
            run("convert", "--to=huggingface", f"reshaped{n}", f"reshaped{n}_back")
            theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(f"reshaped{n}_back")
            expected_BLV = their_logits(theirs.eval(), source_BM, target_BL)
            found_BLV = np.asarray(switchx.load(f"reshaped{n}").logits(source_BM, target_BL))
            assert abs(found_BLV - expected_BLV).max() <= 1e-5 * abs(expected_BLV).max()
            assert abs(found_BLV - want_BLV).max() > 1e-3
    if is_nllb:
        return

    run("convert", "--to=huggingface", "ours", "back")
    back = transformers.AutoModelForSeq2SeqLM.from_pretrained("back").eval()
    again_BLV = their_logits(back, source_BM, target_BL)
    assert abs(again_BLV - want_BLV).max() <= 1e-6 * abs(want_BLV).max()
    for key in ("suppress_tokens", *OTHERS):
        assert getattr(back.generation_config, key) == getattr(theirs.generation_config, key)
    assert back.generation_config.max_new_tokens == 11
    if name != "byt5":
        files = [in_a_folder / each / "spiece.model" for each in ("theirs", "back")]
        assert len({each.read_bytes() for each in files}) == 1
        run("convert", "--from=huggingface", "back", "again")
        again = load_vocabulary("again")
        assert again.fingerprint() == model.vocabulary.fingerprint()
        assert switchx.load("again").decoding == model.decoding
    run("convert", "--to=huggingface", "tuned", "tuned_back")
    for got, want in zip(
        jax.tree.leaves(read_checkpoint("tuned_back").params),
        jax.tree.leaves(switchx.load("tuned").params),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
