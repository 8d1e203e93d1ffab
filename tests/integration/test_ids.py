# SPDX-License-Identifier: Apache-2.0
"""A model whose id 0 is a word, without padding and with two ends, through the commands.

Its twin has the same parameters with permuted ids: 0 is padding and ends are 1 and 2. Both read
the same places, route them alike and say the same. Losses differ by the rounding of sums over V
alone, whose order the permutation changes.
"""

import dataclasses
import json

import numpy as np
import pytest

import switchx
from switchx.checkpoint.checkpointer import Checkpointer, Retention
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.data.special_ids import their_ids
from switchx.data.tokenizers import TokenIdVocabulary
from switchx.routing_record import open_record
from switchx.training.resume import write_run_config
from switchx.training.step import init_state
from tests.integration.runs import SMALL, numbers
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


@pytest.mark.slow
def test_commands_say_the_same_of_permuted_ids(twins, capsys):
    logs = [numbers(twins / name / "metrics.jsonl") for name in NAMES]
    for theirs, ours in zip(*logs, strict=True):
        for name in ("target_tokens", "accuracy"):
            assert theirs[name] == ours[name]
        assert_close(theirs["loss"], ours["loss"])
    assert logs[0][-1]["loss"] < logs[0][0]["loss"]
    capsys.readouterr()

    evaluated = [said(capsys, "eval", name, f"--record={name}.parquet")[0] for name in NAMES]
    assert evaluated[0]["target_tokens"] == evaluated[1]["target_tokens"] > 0
    assert_close(evaluated[0]["neg_log_perplexity"], evaluated[1]["neg_log_perplexity"])
    batches = [list(open_record(twins / f"{name}.parquet").batches()) for name in NAMES]
    for theirs, ours in zip(*batches, strict=True):
        np.testing.assert_array_equal(theirs.segment_BL, ours.segment_BL)
        is_token_BL = ours.is_token_BL
        assert np.any(theirs.token_BL[is_token_BL] == 0)
        np.testing.assert_array_equal(
            OUR[theirs.token_BL[is_token_BL]], ours.token_BL[is_token_BL]
        )
        np.testing.assert_array_equal(
            theirs.expert_NBLS[:, is_token_BL], ours.expert_NBLS[:, is_token_BL]
        )

    (twins / "in.txt").write_text("\n".join(PROMPTS))
    pairs = zip(PROMPTS, PROMPTS[::-1], strict=True)
    (twins / "in.tsv").write_text("\n".join("\t".join(pair) for pair in pairs))
    for way in ((), ("--beam_size=2",), ("--prompt_lookup_num_tokens=2",)):
        options = ("--max_new_tokens=12", *way)
        theirs, ours = (
            said(capsys, "generate", name, "--input=in.txt", *options) for name in NAMES
        )
        for one, other in zip(theirs, ours, strict=True):
            assert one["output"] == other["output"]
            assert OUR[one["tokens"]].tolist() == other["tokens"]
            assert one["is_finished"] == other["is_finished"]
            assert_close(one["score"], other["score"])
    scored = [said(capsys, "score", name, "--input=in.tsv", "--logprobs=2") for name in NAMES]
    for one, other in zip(*scored, strict=True):
        assert one["num_tokens"] == other["num_tokens"]
        assert_close(one["token_logprobs"], other["token_logprobs"])
