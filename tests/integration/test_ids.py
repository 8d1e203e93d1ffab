# SPDX-License-Identifier: Apache-2.0
"""A model whose id 0 is a word, without padding and with two ends, through the commands.

Its twin has the same parameters with permuted ids: 0 is padding and ends are 1 and 2. Both read
the same places, route them alike and say the same. Losses differ by the rounding of sums over V
alone, whose order the permutation changes.
"""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest

import switchx
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.data.bpe import read_bpe
from switchx.data.special_ids import their_ids
from switchx.data.tokenizers import TokenIdVocabulary
from switchx.inference.run_exported import ExportedModel
from switchx.routing_record import open_record
from switchx.training.resume import write_run_config
from switchx.training.step import init_state
from tests.data.tokenizer_files import tokenizer_folder
from tests.integration.runs import SMALL, numbers, write_corpus
from tests.serving.served import LIMITS, listening, post, started
from tests.training.jobs import make_params

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

V, UNUSED = 24, 23
ENDS = (7, 3)
# Texts have the ids of the first of each pair; the second permutes them as it reads, as models
# of transformers are converted. Without a start token, and with one, which is ours' padding.
OF_OURS = {"special_ids": (UNUSED, *ENDS), "eos_ids": (1, 2)}
VOCABULARIES = {
    "startless": (
        TokenIdVocabulary(V, pad_id=None, eos_ids=ENDS, start_id=None),
        TokenIdVocabulary(V, start_id=None, **OF_OURS),
    ),
    "started": (
        TokenIdVocabulary(V, pad_id=None, eos_ids=ENDS, start_id=UNUSED),
        TokenIdVocabulary(V, **OF_OURS),
    ),
}
THEIRS = np.arange(V)
for our, their in their_ids(OF_OURS["special_ids"]).items():
    THEIRS[our] = their
OUR = np.argsort(THEIRS)
JOB = [
    "VOCABULARY=@read_or_trained()", f"VOCAB_SIZE={V}", "FILES='text.jsonl'",
    "ModelConfig.architecture='decoder_only'", "ModelConfig.num_encoder_layers=0",
    "INPUTS_LENGTH=16", "TARGETS_LENGTH=16", "TRAIN_STEPS=3", "LOG_EVERY=1", "EVAL_EVERY=3",
    "CHECKPOINT_EVERY=3", "NUM_EXPERTS=4", "ModelConfig.tie_embeddings=True",
]  # fmt: skip
CAUSAL = """
from __gin__ import dynamic_registration
from switchx.data import objectives
from switchx.data import tasks

tasks.Task.objective = @objectives.CausalLM()
"""
NAMES = "theirs", "ours"
OF_AN_ENCODER = "architecture='encoder_decoder'", "num_encoder_layers=1"
PROMPTS = ["0 9", "4 0 0 11", "12", "0"]


def corpus() -> list[str]:
    """Documents of words, 0 the most frequent of them; none has an end or the unused id."""
    rng, known = np.random.default_rng(0), [i for i in range(V) if i not in (*ENDS, UNUSED)]
    share = np.arange(len(known), 0, -1) ** 2.0
    texts = [
        rng.choice(known, rng.integers(1, 40), p=share / share.sum()).tolist()
        for _ in range(99)
    ]
    return [" ".join(map(str, text)) for text in texts]


FILES = [str(SMALL), "causal.gin"]


def bindings_of(name: str) -> list[str]:
    return [*JOB, f"INIT_FROM='{name}_init'"]


def save(name: str, vocabulary, permutation) -> None:
    """A run folder of a random model, whose table has the rows of these ids."""
    job = switchx.job_from_gin(FILES, bindings_of(name))
    job = dataclasses.replace(
        job, source=dataclasses.replace(job.source, vocabulary=vocabulary), init_from=None
    )
    params = make_params(job.model, seed=3)
    table = params["embedding"]["embedding_VD"]
    params["embedding"] = params["embedding"] | {"embedding_VD": table[permutation] * 4}
    run = RunFolder(f"{name}_init").create()
    write_run_config(run, job)
    state = init_state(job.model, job.optimizer.build(job.schedule), seed=0, params=params)
    with Checkpointer(run, Retention()) as checkpointer:
        checkpointer.save(1, state, metrics={"neg_log_perplexity": -1.0})


@pytest.fixture(params=VOCABULARIES)
def twins(request, in_a_folder):
    """Run folders `theirs` and `ours`, trained for three steps by the command."""
    (in_a_folder / "causal.gin").write_text(CAUSAL)
    lines = [json.dumps({"text": text}) for text in corpus()]
    (in_a_folder / "text.jsonl").write_text("\n".join(lines))
    vocabularies, orders = VOCABULARIES[request.param], (np.arange(V), THEIRS)
    for name, vocabulary, order in zip(NAMES, vocabularies, orders, strict=True):
        save(name, vocabulary, order)
        words = [f"--gin.{binding}" for binding in bindings_of(name)]
        words += [f"--gin_file={file}" for file in FILES]
        assert main(["train", *words, f"--model_dir={name}"]) == 0
    return in_a_folder


def said(capsys, command: str, name: str, *options: str) -> list[dict]:
    assert main([command, f"--model_dir={name}", "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def assert_close(theirs, ours) -> None:
    assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-6)


def of_both(function) -> list:
    return [function(name) for name in NAMES]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_commands_say_the_same_of_permuted_ids(twins, capsys):
    logs = of_both(lambda name: numbers(twins / name / "metrics.jsonl"))
    for theirs, ours in zip(*logs, strict=True):
        assert theirs["target_tokens"] == ours["target_tokens"] > 0
        assert theirs["accuracy"] == ours["accuracy"]
        assert_close(theirs["loss"], ours["loss"])
    capsys.readouterr()
    require_same_evaluation(capsys)
    (twins / "in.txt").write_text("\n".join(PROMPTS))
    pairs = zip(PROMPTS, PROMPTS[::-1], strict=True)
    (twins / "in.tsv").write_text("\n".join("\t".join(pair) for pair in pairs))
    require_same_texts(capsys)
    (theirs, experts), (ours, experts_of_ours) = of_both(served)
    assert theirs["text"] == ours["text"] and experts == experts_of_ours
    theirs, ours = theirs["logprobs"], ours["logprobs"]
    is_startless = switchx.load("theirs").vocabulary.start_id is None
    for each in (theirs, ours):
        for name in ("token_logprobs", "top_logprobs"):
            assert (each[name][0] is None) == is_startless
    assert_close(theirs["token_logprobs"][1:], ours["token_logprobs"][1:])
    assert theirs["tokens"] == ours["tokens"] and theirs["text_offset"] == ours["text_offset"]
    for one, other in zip(theirs["top_logprobs"], ours["top_logprobs"], strict=True):
        assert one == (other and pytest.approx(other, rel=1e-3))
    require_same_atlas(capsys)
    export = ["--platform=cpu", "--input_length=5", "--max_new_tokens=8", "--batch_size=4"]
    said_by_exports = []
    for name in NAMES:
        words = [f"--model_dir={name}", f"--output={name}_export", *export]
        assert main(["export", *words]) == 0
        model = switchx.load(name)
        prompts = model.prompts(PROMPTS)
        said = ExportedModel(f"{name}_export").generate(prompts)
        want = model.generate(PROMPTS, max_new_tokens=8, with_scores=True)
        assert [model.vocabulary.decode(best["tokens"]) for best, *_ in said] == [
            each.output for each in want
        ]
        said_by_exports.append([each.output for each in want])
    assert said_by_exports[0] == said_by_exports[1]


def require_same_evaluation(capsys) -> None:
    """Losses, masks and records of `switchx eval`."""
    (theirs,), (ours,) = of_both(
        lambda name: said(capsys, "eval", name, f"--record={name}.parquet")
    )
    assert theirs["target_tokens"] == ours["target_tokens"] > 0
    assert_close(theirs["neg_log_perplexity"], ours["neg_log_perplexity"])
    require_same_records("{}.parquet")


def require_same_records(path: str) -> None:
    records = of_both(lambda name: open_record(path.format(name)).batches())
    for theirs, ours in zip(*records, strict=True):
        np.testing.assert_array_equal(theirs.segment_BL, ours.segment_BL)
        is_token_BL = ours.is_token_BL
        assert np.any(theirs.token_BL[is_token_BL] == 0)
        for one, other in (
            (OUR[theirs.token_BL[is_token_BL]], ours.token_BL[is_token_BL]),
            (theirs.expert_NBLS[:, is_token_BL], ours.expert_NBLS[:, is_token_BL]),
            (theirs.is_dropped_NBLS, ours.is_dropped_NBLS),
        ):
            np.testing.assert_array_equal(one, other)


def require_same_texts(capsys) -> None:
    """Outputs of `switchx generate`, some of which come to each end, and log-likelihoods."""
    for way in ((), ("--beam_size=2",), ("--prompt_lookup_num_tokens=2",)):
        options = ("--input=in.txt", "--max_new_tokens=12", *way)
        record = [] if way else ["--record={}_texts.parquet"]
        generated = of_both(
            lambda name, words=(*options, *record): said(
                capsys, "generate", name, *(word.format(name) for word in words)
            )
        )
        for one, other in zip(*generated, strict=True):
            assert one["output"] == other["output"]
            assert OUR[one["tokens"]].tolist() == other["tokens"]
            assert one["is_finished"] == other["is_finished"]
            assert_close(one["score"], other["score"])
    require_same_records("{}_texts.parquet")
    scored = of_both(lambda name: said(capsys, "score", name, "--input=in.tsv", "--logprobs=2"))
    for one, other in zip(*scored, strict=True):
        assert one["num_tokens"] == other["num_tokens"]
        assert_close(one["token_logprobs"], other["token_logprobs"])


def served(name: str) -> tuple[dict, dict]:
    """A choice of `/v1/completions` that is echoed and scored, and the experts of an answer."""
    asked = {"prompt": "4 0 0 11", "temperature": 0, "max_tokens": 6}
    asked |= {"echo": True, "logprobs": 2}
    with started(LIMITS, switchx.load(name)) as service, listening(service) as address:
        status, answer = post(address, asked, path="/v1/completions")
        assert status == 200, answer
        (choice,) = answer["choices"]
        status, answer = post(address, {"inputs": "4 0", "experts": True})
        assert status == 200, answer
    return choice, answer["results"][0]["experts"]["layers"]


def require_same_atlas(capsys) -> None:
    """Losses of labels, and numbers of tokens, which leave out start tokens alone."""
    lines = corpus()
    for i, name in enumerate(("few", "many")):
        pathlib.Path(f"{name}.txt").write_text("\n".join(lines[i::2]))
    words = ["--input", "few.txt", "many.txt", "--knockouts=1", "--factors=1", "--json"]
    found = []
    for name in NAMES:
        assert main(["atlas", name, f"--output={name}_atlas", *words]) == 0
        (atlas,) = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
        found.append([(label["label"], label["loss"]) for label in atlas["labels"]])
    for theirs, ours in zip(*found, strict=True):
        assert theirs[0] == ours[0]
        assert_close(theirs[1], ours[1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_tokenizer_json_goes_through_the_commands(in_a_folder, capsys, monkeypatch):
    pytest.importorskip("tokenizers", reason="needs pip install 'switchx[bpe]'")
    theirs = tokenizer_folder(in_a_folder / "theirs", "qwen")
    (in_a_folder / "causal.gin").write_text(CAUSAL)
    write_corpus(in_a_folder)
    bindings = ["FILES='corpus.txt'", "VOCABULARY_FILE='theirs/tokenizer.json'"]
    bindings += [each for each in JOB if not each.startswith(("FILES", "VOCAB_SIZE"))]
    train = [f"--gin_file={file}" for file in FILES] + [f"--gin.{each}" for each in bindings]
    for more, said_of_it in (
        (["--gin.VOCAB_SIZE=100"], "ids, but the model's vocab_size is 100; use"),
        (
            [f"--gin.ModelConfig.{each}" for each in OF_AN_ENCODER],
            "the vocabulary has no start_id, and the decoder of an encoder-decoder begins",
        ),
    ):
        assert main(["train", *train, *more, "--model_dir=refused"]) == 2
        assert said_of_it in capsys.readouterr().err
    assert main(["train", *train, "--model_dir=run"]) == 0
    assert main(["quantize", "--model_dir=run", "--output=int8", "--bits=8"]) == 0
    export = ["--platform=cpu", "--input_length=8", "--max_new_tokens=4", "--batch_size=2"]
    assert main(["export", "--model_dir=run", "--output=exported", *export]) == 0
    for folder in ("run", "int8", "exported"):
        for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
            assert (in_a_folder / folder / name).read_bytes() == (theirs / name).read_bytes()
    capsys.readouterr()
    text = "<|im_end|> token"
    (in_a_folder / "in.txt").write_text(text)
    for folder in ("run", "int8"):
        model = switchx.load(folder)
        decoding = model.decoding_config()
        assert (decoding.eos_id, *decoding.other_eos_ids) == read_bpe(theirs).eos_ids
        assert model.prompts([text]) == [read_bpe(theirs).encode(text)]
        options = ("--input=in.txt", "--max_new_tokens=4")
        (got,) = said(capsys, "generate", folder, *options)
        ids = [model.vocabulary.encode(text)]
        (want,) = model.generate(ids, max_new_tokens=4, with_scores=True)
        assert got["tokens"] == want.output
        assert got["output"] == model.vocabulary.decode(want.output)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["generate", "--model_dir=run", *options]) == 2
    assert "pip install 'switchx[bpe]'" in capsys.readouterr().err
