# SPDX-License-Identifier: Apache-2.0
"""`switchx convert`: from transformers and T5X, back, and on to fine-tuning."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import switchx
from switchx.data.tokenizers import ByteVocabulary, SentencePieceVocabulary, TokenIdVocabulary
from switchx.data.vocabularies import load_vocabulary
from switchx.data.vocabulary_training import train_sentencepiece
from switchx.interop.huggingface import read_checkpoint, write_checkpoint
from switchx.models.config import ModelConfig
from switchx.models.params import abstract_params
from switchx.tree import named_leaves, nested, num_bytes
from tests.data.words import sentences
from tests.interop.folders import (
    SWITCH,
    T5,
    assert_same_params,
    change_tensors,
    huggingface_folder,
    tokenizer_json,
)
from tests.interop.t5x_files import SWITCH as T5X_SWITCH
from tests.interop.t5x_files import by_layers, write_t5x
from tests.processes import ROOT
from tests.training.jobs import make_params

ROWS = 512


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    """A SentencePiece model of 400 pieces."""
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "text.txt").write_text("".join(sentences(400)))
    train_sentencepiece([str(folder / "text.txt")], 400, str(folder))
    return folder / "vocabulary.model"


def test_from_huggingface_and_back(in_a_folder, cli):
    _, params = huggingface_folder(in_a_folder / "theirs", SWITCH)
    output = cli("convert", "--from=huggingface", "theirs", "ours")
    assert output.out.startswith("ours: 1") and "open it with switchx.load" in output.out
    assert "no vocabulary: texts of this model are token ids such as '12 5 7'" in output.err
    model = switchx.load("ours")
    assert model.config == SWITCH
    assert model.vocabulary == TokenIdVocabulary(SWITCH.vocab_size)
    assert_same_params(model.params, params)
    assert json.loads((in_a_folder / "ours/config.json").read_text())["origin"] == (
        "huggingface: theirs"
    )

    err = cli("convert", "--to=huggingface", "ours", "back").err
    assert "ours has no SentencePiece model: back has no tokenizer" in err
    for name in ("model.safetensors", "config.json"):
        assert (in_a_folder / "back" / name).read_bytes() == (
            in_a_folder / "theirs" / name
        ).read_bytes()


def test_a_tokenizer_json_alone_becomes_the_vocabulary(in_a_folder, cli):
    huggingface_folder(in_a_folder / "theirs", T5)
    file = tokenizer_json(in_a_folder / "theirs/tokenizer.json")
    cli("convert", "--from=huggingface", "theirs", "ours")
    vocabulary = load_vocabulary("ours")
    assert isinstance(vocabulary, SentencePieceVocabulary)
    assert (vocabulary.size, vocabulary.encode("a aa")) == (T5.vocab_size, [3, 4, 3, 4, 4])

    tokenizer_json(file, model={"type": "BPE"})
    error = cli.refused("convert", "--from=huggingface", "theirs", "again").strip()
    assert "theirs/tokenizer.json: model.type='BPE'; expected 'Unigram'" in error
    assert not (in_a_folder / "again").exists()
    cli("convert", "--from=huggingface", "theirs", "ids", "--vocabulary=none")
    assert load_vocabulary("ids") == TokenIdVocabulary(T5.vocab_size)


def test_parameters_in_another_dtype(in_a_folder, cli):
    _, params = huggingface_folder(in_a_folder / "theirs", T5)
    cli("convert", "--from=huggingface", "theirs", "ours", "--dtype=bfloat16")
    model = switchx.load("ours")
    assert model.config.precision.params == "bfloat16"
    assert_same_params(model.params, jax.tree.map(lambda x: x.astype("bfloat16"), params))
    cli("convert", "--to=huggingface", "ours", "back", "--dtype=float32")
    assert (
        json.loads((in_a_folder / "back/config.json").read_text())["torch_dtype"] == "float32"
    )
    back = read_checkpoint("back").params
    assert_same_params(
        back, jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    )
    change_tensors(
        in_a_folder / "theirs", lambda tensors: tensors["shared.weight"].__imul__(1e9)
    )
    error = cli.refused("convert", "--from=huggingface", "theirs", "halves", "--dtype=float16")
    assert "embedding/embedding_VD has numbers up to" in error and "use bfloat16 or" in error


# The most anonymous memory of a conversion beside what was there before it.
PEAK = """
import sys, threading, time
from switchx.cli.main import main

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

assert main(["convert", "--from=huggingface", "small", "first"]) == 0  # what it imports
peaks = [before := anonymous()]
threading.Thread(
    target=lambda: [peaks.append(anonymous()) or time.sleep(0.005) for _ in iter(int, 1)],
    daemon=True,
).start()
assert main(["convert", "--from=huggingface", *sys.argv[1:]]) == 0
print(max(peaks) - before)
"""


@pytest.mark.slow  # a model of 128 MiB
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="needs Linux' /proc")
def test_a_conversion_does_not_hold_the_model_twice(in_a_folder):
    """Parameters are mapped from files; what is encoded and not yet written is held once."""
    config = ModelConfig("encoder_decoder", 8192, 512, 2048, 8, 64, 4, 4, activation="relu")
    rng = np.random.default_rng(0)
    params = nested({
        name: rng.normal(size=leaf.shape).astype(np.float32)
        for name, leaf in named_leaves(abstract_params(config)).items()
    })  # fmt: skip
    huggingface_folder(in_a_folder / "small", T5)
    (in_a_folder / "theirs").mkdir()
    write_checkpoint(in_a_folder / "theirs", config, params)
    run = subprocess.run(
        [sys.executable, "-c", PEAK, "theirs", "ours"],
        capture_output=True,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    largest = max(leaf.nbytes for leaf in named_leaves(params).values())
    assert int(run.stdout.split()[-1]) <= 1.1 * num_bytes(params) + 2 * largest
    assert_same_params(switchx.load("ours").params, params)
    assert not list(in_a_folder.glob(".ours_*"))


def test_byt5_has_bytes_and_no_file(in_a_folder, cli):
    config = dataclasses.replace(T5, vocab_size=384)
    folder, _ = huggingface_folder(in_a_folder / "theirs", config)
    tokenizer = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    cli("convert", "--from=huggingface", "theirs", "ours")
    vocabulary = load_vocabulary("ours")
    assert vocabulary == ByteVocabulary()
    assert vocabulary.encode("é") == [0xC3 + 3, 0xA9 + 3]


def test_layers_saved_in_the_other_layout_are_written_for_huggingface(in_a_folder, cli):
    """As in a run that was resumed with another `scan_layers`: config.json has the first."""
    huggingface_folder(in_a_folder / "theirs", T5)
    cli("convert", "--from=huggingface", "theirs", "ours")
    path = in_a_folder / "ours/config.json"
    config = json.loads(path.read_text())
    config["model"]["scan_layers"] = not config["model"]["scan_layers"]
    path.write_text(json.dumps(config))
    cli("convert", "--to=huggingface", "ours", "back")
    want, got = (in_a_folder / name / "model.safetensors" for name in ("theirs", "back"))
    assert got.read_bytes() == want.read_bytes()


def test_a_model_with_a_bias_of_each_block_opens_in_every_command(in_a_folder, cli):
    """UMT5's, whose blocks cannot be scanned."""
    config = dataclasses.replace(
        T5, activation="geglu", tie_embeddings=False, relative_bias_per_layer=True
    )
    _, params = huggingface_folder(in_a_folder / "theirs", config)
    cli("convert", "--from=huggingface", "theirs", "ours")
    model = switchx.load("ours")
    assert model.config.relative_bias_per_layer and not model.config.can_be_scanned
    assert_same_params(model.params, params)
    cli("checkpoint", "verify", "ours")
    cli("convert", "--to=huggingface", "ours", "back")
    want, got = (in_a_folder / name / "model.safetensors" for name in ("theirs", "back"))
    assert got.read_bytes() == want.read_bytes()


def t5x_arguments(folder, model: ModelConfig, gin_file: str) -> tuple[str, ...]:
    """Of converting a checkpoint of the model, whose sizes are given beside a gin file."""
    names = ("vocab_size", "d_model", "d_ff", "num_heads", "d_head")
    names += ("num_encoder_layers", "num_decoder_layers")
    return (
        *("convert", "--from=t5x", str(folder), "ours", f"--gin_file={gin_file}"),
        *(f"--gin.ModelConfig.{name}={getattr(model, name)}" for name in names),
    )


def test_from_t5x_and_on_to_huggingface(in_a_folder, cli, spiece):
    config = dataclasses.replace(T5, vocab_size=ROWS)
    params = make_params(config)
    folder = write_t5x(in_a_folder / "checkpoint_7", by_layers(config, params))
    arguments = t5x_arguments(folder, config, "configs/models/t5_1_0_base.gin")
    cli(*arguments, f"--vocabulary={spiece}")
    model = switchx.load("ours")
    assert model.config.d_model == 12 and not model.config.scan_layers
    assert model.vocabulary.size == ROWS
    assert_same_params(model.params, params)
    err = cli("convert", "--to=huggingface", "ours", "back").err
    assert "T5Tokenizer gives other ids for this vocabulary" in err
    assert (in_a_folder / "back/spiece.model").read_bytes() == spiece.read_bytes()


def test_from_t5x_by_the_gin_file_of_a_run(in_a_folder, cli):
    """Its mesh's file leaves the dispatcher to a job, which a converted model does not have."""
    params = make_params(T5X_SWITCH)
    folder = write_t5x(in_a_folder / "checkpoint_7", by_layers(T5X_SWITCH, params))
    arguments = t5x_arguments(folder, T5X_SWITCH, "configs/runs/pretrain_switch_base.gin")
    experts = f"--gin.NUM_EXPERTS={T5X_SWITCH.switch.num_experts}"
    cli(*arguments, "--gin_file=configs/meshes/data.gin", experts)
    model = switchx.load("ours")
    assert model.config.switch.dispatcher == "gather"
    assert_same_params(model.params, params)


def test_nothing_is_left_where_nothing_could_be_converted(in_a_folder, cli, spiece):
    huggingface_folder(in_a_folder / "theirs")
    text = cli.refused(
        "convert", "--from=huggingface", "theirs", "ours", f"--vocabulary={spiece}"
    )
    assert "has 400 pieces, the model's embedding 50 rows; give the vocabulary" in text
    text = cli.refused("convert", "--from=huggingface", "theirs", "theirs")
    assert "theirs exists; give a folder that does not exist or is empty" in text
    text = cli.refused("convert", "--to=huggingface", "theirs", "ours")
    assert "is not a run folder" in text
    text = cli.refused("convert", "--to=peft", "nowhere", "ours")
    assert "nowhere is not a run folder" in text and "nothing is there" in text
    text = cli.refused(
        "convert", "--from=t5x", "theirs", "ours", "--gin_file=models/switch_base_released.gin"
    )
    assert "theirs has no file 'checkpoint'" in text
    assert [path.name for path in in_a_folder.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["a", "b"], "one of the arguments --from --to is required"),
        (["--from=torch", "a", "b"], "there is no 'torch'; use huggingface, t5x"),
        (["--from=huggingface", "a"], "give: DST"),
        (["--from=t5x", "a", "b"], "--from=t5x needs the model's configuration, such as"),
        (["--to=huggingface", "--overflow=drop", "a", "b"], "--overflow is for --from=hug"),
        (["--to=huggingface", "--vocabulary=x", "a", "b"], "--vocabulary is for --from"),
        (["--from=huggingface", "--step=best", "a", "b"], "--step is for --to; leave it out"),
        (["--from=huggingface", "--gin_file=x.gin", "a", "b"], "gin files, their paths and"),
        (["--from=huggingface", "--gin.A=1", "a", "b"], "--gin.NAME=VALUE are for --from=t5x"),
        (["--to=huggingface", "--gin_search_paths=a", "a", "b"], "are for --from=t5x"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(cli, options, message):
    assert message in cli.refused("convert", *options)
