# SPDX-License-Identifier: Apache-2.0
"""Families of decoder-only models x commands: what works on which, shown on folders of
transformers with small random models, whose own numbers are the oracle.

A column is a function of `CELLS`. `python -m tests.interop.test_family_matrix` prints the table
of docs/checkpoints_of_others.md.
"""

import dataclasses
import functools
import inspect
import json
import pathlib
import urllib.request

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import switchx
from pallas_kernels.aot import gpu_compiler, tpu_compiler
from switchx.checkpoint.run_folder import RunFolder, read_model_config
from switchx.cli.main import main
from switchx.compiled.devices import json_of_child
from switchx.data.corpora.text_files import TextFiles
from switchx.data.loader import Shard
from switchx.inference.run_exported import ExportedModel
from switchx.interop.decoder_families import DECODERS
from switchx.partitioning.topology import Topology
from switchx.routing_record import open_record
from tests.compilation import on_devices
from tests.integration.runs import lines
from tests.interop.decoder_models import BASE, CASES, V, special_ids_of, theirs
from tests.processes import ROOT, skip_without
from tests.serving.served import LIMITS, events, listening, post, started

PAGE = ROOT / "docs/checkpoints_of_others.md"
# The cells that run by default.
FIRST, QUICK = ("llama", "qwen3_moe"), ("convert", "load", "generate", "score")
# Blocks that are alike: a pipeline and storage need them.
CHANGES = {
    "qwen2_moe": dict(decoder_sparse_step=1),
    "qwen3_moe": dict(mlp_only_layers=[]),
    "glm4_moe": dict(first_k_dense_replace=0),
    "dots1": dict(first_k_dense_replace=0),
}
# Sizes of which kernels for accelerators have tiles.
WIDER = dict(
    hidden_size=256, intermediate_size=512, moe_intermediate_size=256,
    shared_expert_intermediate_size=256, head_dim=64, max_position_embeddings=512,
    sliding_window=512,
)  # fmt: skip
SLICES = "v5p:2x2x1", "h200"
WRITTEN_AS = {"mistral": "LlamaForCausalLM"}
AS = {"mistral": "as Llama", "granitemoe": "as Mixtral"}
PROMPTS = [[5, 9, 11, 4, 7], [6, 80, 31], [17]]
PAIRS = [([5, 9, 11], [4, 7]), ([6, 80], [31, 8, 90]), ([17], [3])]
T, ENDS = 12, (2, 40)
# A document and its end fill a row, so that a batch has each document of training once.
SMALL = (
    "BATCH_SIZE=8", "INPUTS_LENGTH=8", "TARGETS_LENGTH=8", "TRAIN_STEPS=1", "LOG_EVERY=1",
    "EVAL_EVERY=1", "CHECKPOINT_EVERY=1", "TrainingJob.eval_batches=None",
    "ModelConfig.dropout_rate=0.0", "LossConfig.z_loss=0.0", "LossConfig.balance_weight=0.0",
    "TextFiles.validation_fraction=0.5",
)  # fmt: skip


def run(*options) -> None:
    assert main(list(map(str, options))) == 0, options


def text_of(ids) -> str:
    return " ".join(map(str, ids))


def padded(rows) -> np.ndarray:
    """`[B, L]`, filled up with the id 0, a word of these models."""
    length = max(map(len, rows))
    return np.array([[*ids, *[0] * (length - len(ids))] for ids in rows])


def ids_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@dataclasses.dataclass(frozen=True)
class Row:
    """A family: its model in transformers, and the folders `theirs` and `run` of it."""

    name: str
    folder: pathlib.Path

    @property
    def is_sparse(self) -> bool:
        return bool(DECODERS[self.name].num_experts)

    @functools.cached_property
    def model(self):
        model = theirs(self.name, **CHANGES.get(self.name, {}))
        model.generation_config.eos_token_id = list(ENDS)
        return model

    @property
    def num_elements(self) -> int:
        """Parameters in the files."""
        leaves = load_file(self.folder / "theirs/model.safetensors")
        sizes = [leaf.size for leaf in leaves.values()]
        if self.name == "granitemoe":  # logits have a factor of their own
            sizes.append(leaves["model.embed_tokens.weight"].size)
        return sum(sizes)

    def log_probs(self, ids) -> np.ndarray:
        """Natural logarithms `[L, V]` of their probabilities of what follows each token."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()

    def texts(self, **settings) -> list[list[list[int]]]:
        """What they generate for each prompt, without ends."""
        import torch

        found = []
        for prompt in PROMPTS:
            out = self.model.generate(
                torch.tensor([prompt]), eos_token_id=list(ENDS), pad_token_id=0,
                do_sample=False, max_new_tokens=T, **settings,
            )  # fmt: skip
            cut = []
            for row in out[:, len(prompt) :].tolist():
                end = next((i for i, token in enumerate(row) if token in ENDS), len(row))
                cut.append(row[:end])
            found.append(cut)
        return found

    @functools.cached_property
    def greedy(self) -> list[list[int]]:
        return [texts[0] for texts in self.texts()]

    def generated(self, *options, folder="run") -> list[dict]:
        (self.folder / "in.txt").write_text("\n".join(map(text_of, PROMPTS)))
        out = self.folder / f"out_{'_'.join([folder, *options]).replace('-', '')}.jsonl"
        words = f"--model_dir={self.folder / folder}", f"--input={self.folder / 'in.txt'}"
        run("generate", *words, f"--max_new_tokens={T}", "--json", f"--output={out}", *options)
        return lines(out)

    @functools.cached_property
    def splits(self) -> dict[str, list[list[int]]]:
        """Eight documents of training and four of validation, in the file docs.jsonl."""
        rng, file = np.random.default_rng(0), self.folder / "docs.jsonl"
        docs = [text_of(each) for each in rng.integers(3, V, (60, 15)) if 40 not in each]
        corpus, found = TextFiles(str(file), validation_fraction=0.5), {}
        for number in (len(docs), 12):
            file.write_text("\n".join(json.dumps({"text": each}) for each in docs[:number]))
            for split, most in (("train", 8), ("validation", 4)):
                found[split] = [each["text"] for each in corpus.open(split, None)][:most]
            docs = found["train"] + found["validation"]
        return {split: list(map(ids_of, texts)) for split, texts in found.items()}

    def job(self, *more) -> list[str]:
        """Gin files and bindings of a step of training on all documents."""
        assert list(map(len, self.splits.values())) == [8, 4]
        files = "runs/finetune.gin", "tasks/text_causal_lm.gin"
        of = [f"FILES={self.folder / 'docs.jsonl'}", f"INIT_FROM={self.folder / 'run'}"]
        of += ["SwitchConfig.expert_dropout_rate=0.0"] * self.is_sparse
        files = [f"--gin_file=configs/{each}" for each in files]
        return [*files, *more, *(f"--gin.{each}" for each in (*SMALL, *of))]

    def loss(self, rows) -> float:
        """Nats a token of rows `[B, L]`, of which nothing predicts the first token."""
        rows = np.asarray(rows)
        found = [-self.log_probs(row)[np.arange(len(row) - 1), row[1:]] for row in rows]
        return float(np.mean(found))

    def trained(self, name, *more) -> list[dict]:
        """Lines of the log of a step with these arguments, in a new run folder."""
        run("train", *self.job(*more), f"--model_dir={self.folder / name}")
        return lines(self.folder / name / "metrics.jsonl")


def convert_back(row: Row):
    """The folder written back has the same tensors bit by bit, class and ids."""
    from transformers import AutoModelForCausalLM

    run("convert", "--to=huggingface", row.folder / "run", row.folder / "back")
    want, got = (load_file(row.folder / n / "model.safetensors") for n in ("theirs", "back"))
    if row.name == "granitemoe":  # its factors are in the weights
        require_back(row, "run")
        return
    assert want.keys() == got.keys()
    assert all(np.array_equal(want[name], got[name]) for name in want)
    again = AutoModelForCausalLM.from_pretrained(row.folder / "back")
    assert type(again).__name__ == WRITTEN_AS.get(row.name, type(row.model).__name__)
    want = {"bos": 1, "eos": list(ENDS), "pad": None}
    assert special_ids_of(again) == special_ids_of(row.model) == want


def load(row: Row):
    """Logits of `switchx.load` are theirs, of rows of different lengths side by side."""
    import torch

    found_BLV = np.asarray(switchx.load(row.folder / "run").logits(padded(PROMPTS)))
    for got_LV, prompt in zip(found_BLV, PROMPTS, strict=True):
        with torch.no_grad():
            want_LV = row.model(torch.tensor([prompt])).logits[0].numpy()
        bound = 1e-5 * np.abs(want_LV).max()
        np.testing.assert_allclose(got_LV[: len(prompt)], want_LV, rtol=0, atol=bound)


def greedy(row: Row):
    """Tokens are theirs, and the likeliest of whole texts, which are read without a cache."""
    assert [each["tokens"] for each in row.generated()] == row.greedy
    rows = [[*prompt, *text] for prompt, text in zip(PROMPTS, row.greedy, strict=True)]
    best_BL = np.argmax(switchx.load(row.folder / "run").logits(padded(rows)), -1)
    for best_L, prompt, text in zip(best_BL, PROMPTS, row.greedy, strict=True):
        assert best_L[len(prompt) - 1 :][: len(text)].tolist() == text


def beams(row: Row):
    want = row.texts(num_beams=3, num_return_sequences=2)
    got = row.generated("--beam_size=3", "--num_return_sequences=2")
    assert [[ids_of(each["output"]) for each in line["outputs"]] for line in got] == want


def samples(row: Row):
    """Log-probabilities of drawn tokens are theirs."""
    got = row.generated("--temperature=0.9", "--seed=3", "--logprobs=0")
    for prompt, line in zip(PROMPTS, got, strict=True):
        log_probs = row.log_probs([*prompt, *line["tokens"]])[len(prompt) - 1 :]
        want = [log_probs[i, token] for i, token in enumerate(line["tokens"])]
        np.testing.assert_allclose(line["token_logprobs"][: len(want)], want, atol=2e-4)
    assert [line["tokens"] for line in got] != row.greedy


def serve(row: Row):
    """Answers over HTTP are their greedy texts, at once and in pieces."""
    limits = dataclasses.replace(LIMITS, body_timeout_s=30.0, max_new_tokens=T)
    with (
        started(limits, switchx.load(row.folder / "run")) as service,
        listening(service) as (host, port),
    ):
        for prompt, want in zip(PROMPTS, row.greedy, strict=True):
            asked = {"inputs": [prompt], "max_new_tokens": T}
            status, answer = post((host, port), asked)
            assert status == 200, answer
            assert ids_of(answer["results"][0]["text"]) == want
            body = json.dumps(asked | {"stream": True}).encode()
            request = urllib.request.Request(f"http://{host}:{port}/v1/generate", body)
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request) as response:
                pieces = events(response.read().decode())
            tokens = [data["tokens"] for name, data in pieces if name == "tokens"]
            assert sum(tokens, []) == want


def score(row: Row):
    (row.folder / "pairs.tsv").write_text(
        "\n".join("\t".join(map(text_of, pair)) for pair in PAIRS)
    )
    out = row.folder / "scores.jsonl"
    words = f"--model_dir={row.folder / 'run'}", f"--input={row.folder / 'pairs.tsv'}"
    run("score", *words, "--json", f"--output={out}")
    for (source, target), got in zip(PAIRS, lines(out), strict=True):
        ids = [*source, *target, ENDS[0]]
        log_probs = row.log_probs(ids)
        want = sum(log_probs[i - 1, ids[i]] for i in range(len(source), len(ids)))
        assert got["log_likelihood"] == pytest.approx(want, rel=1e-4)


def evaluate(row: Row, capsys):
    """The loss of the validation documents is theirs."""
    run("eval", *row.job(), f"--model_dir={row.folder / 'run'}", "--json")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    documents = [[*each, ENDS[0]] for each in row.splits["validation"]]
    assert -found["neg_log_perplexity"] == pytest.approx(row.loss(documents), rel=1e-5)


def first_step(row: Row) -> dict:
    """Metrics of the first step on one device, whose loss is that of theirs on its batch."""
    if not (row.folder / "tuned").exists():
        row.trained("tuned")
    return lines(row.folder / "tuned/metrics.jsonl")[0]


def require_same_step(row: Row, name: str, *more) -> None:
    want, (got, *_) = first_step(row), row.trained(name, *more)
    for each in ("loss", "grad_norm"):
        assert got[each] == pytest.approx(want[each], rel=1e-5), each


def split(words) -> tuple[list[str], list[str]]:
    """Gin files and bindings of a command."""
    files = [word.partition("=")[2] for word in words if word.startswith("--gin_file=")]
    return files, [word[len("--gin.") :] for word in words if word.startswith("--gin.")]


def first_texts(words) -> np.ndarray:
    """The documents of a run's first batch, `[B, L]`."""
    loader = switchx.job_from_gin(*split(words)).loader(Shard())
    batch = next(loader)
    loader.close()
    token_BL = batch["decoder_input_tokens"]
    assert token_BL.shape == (8, 16)
    return token_BL


def train(row: Row):
    assert first_step(row)["loss"] == pytest.approx(row.loss(first_texts(row.job())), rel=1e-5)


def meshes(row: Row):
    """Heads of keys are split or whole; experts and stages are split."""
    first_step(row)
    files = [("model.gin", "MODEL_PARTS=2"), ("model.gin", "MODEL_PARTS=4")]
    files += [("data_expert.gin", "EXPERT_PARTS=2")] * row.is_sparse
    files += [("pipeline.gin", "NUM_MICROBATCHES=2")]
    for n, (file, binding) in enumerate(files):
        with on_devices(int(binding[-1])):
            more = f"--gin_file=configs/meshes/{file}", f"--gin.{binding}"
            require_same_step(row, f"mesh{n}", *more)


def storage(row: Row):
    for kind in ("host", "disk"):
        require_same_step(row, kind, f"--gin_file=configs/storage/{kind}.gin")


def quantize(row: Row):
    """Logits of 8 and 4 bits are near theirs, and not theirs."""
    tokens = np.array([PROMPTS[0]])
    want = np.asarray(switchx.load(row.folder / "run").logits(tokens))
    for name, bits, bound in (("int8", 8, 0.05), ("float8_e4m3fn", 8, 0.15), ("int4", 4, 0.5)):
        of = f"--model_dir={row.folder / 'run'}", f"--output={row.folder / name}"
        run("quantize", *of, f"--bits={bits}", f"--dtype={name}")
        got = np.asarray(switchx.load(row.folder / name).logits(tokens))
        error = np.abs(got - want).max() / np.abs(want).max()
        assert 1e-4 < error < bound, name
        first = int(np.argmax(got[0, -1]))
        said = row.generated(folder=name)[0]["tokens"]
        assert said[:1] == ([] if first in ENDS else [first])


def export(row: Row):
    out, of = row.folder / "exported", f"--model_dir={row.folder / 'run'}"
    shape = "--input_length=5", f"--max_new_tokens={T}", "--batch_size=3"
    run("export", of, f"--output={out}", "--platform=cpu", *shape)
    assert [best["tokens"] for best, *_ in ExportedModel(out).generate(PROMPTS)] == row.greedy


def deploy(row: Row):
    """Its own checks hold, and what is served says their greedy texts."""
    out, job = row.folder / "deployed", row.job()
    shape = "--input_length=5", f"--max_new_tokens={T}", "--batch_size=3"
    of = f"--model_dir={row.folder / 'run'}", f"--output={out}"
    run("deploy", *job, *of, "--platform=cpu", *shape)
    said = ExportedModel(out / "6_deploy").generate(PROMPTS)
    assert [best["tokens"] for best, *_ in said] == row.greedy
    if row.is_sparse:
        of = *of[:1], f"--output={out}4"
        way = "drop" if DECODERS[row.name].has_sigmoid else "merge"
        fewer = "--experts=2", f"--reduce={way}", "--bits=4"
        run("deploy", *job, *of, "--platform=cpu", *shape, *fewer)


def expert_slots(row: Row):
    got = row.generated("--expert_slots=2", "--batch_size=1")
    assert [each["tokens"] for each in got] == row.greedy


def pairs(row: Row):
    """Text to text: the loss is that of targets behind inputs, and the result goes back."""
    rng, file = np.random.default_rng(1), row.folder / "pairs.jsonl"
    examples = [rng.integers(3, 40, (2, 5)).tolist() for _ in range(16)]
    file.write_text(
        "\n".join(
            json.dumps({"inputs": text_of(source), "targets": text_of(target)})
            for source, target in examples
        )
    )
    of = f"--gin.FILES={file}", "--gin.InputsToTargets.is_prefix_bidirectional=False"
    words = [*row.job(), "--gin_file=configs/tasks/pairs.gin", *of, "--gin.BATCH_SIZE=2"]
    run("train", *words, f"--model_dir={row.folder / 'pairs'}")
    held_out = TextFiles(str(file), validation_fraction=0.5).open("validation", None)
    found = []
    for each in held_out:
        source, target = (ids_of(each[name]) for name in ("inputs", "targets"))
        ids = [*source, ENDS[0], *target, ENDS[0]]
        log_probs = row.log_probs(ids)
        found += [-log_probs[i - 1, ids[i]] for i in range(1 + len(source), len(ids))]
    first, *_ = lines(row.folder / "pairs/validation.jsonl")
    assert -first["neg_log_perplexity"] == pytest.approx(np.mean(found), rel=1e-5)
    require_back(row, "pairs")


def require_back(row: Row, name: str):
    """A folder that is written has our logits in transformers; returns these."""
    import torch
    from transformers import AutoModelForCausalLM

    run("convert", "--to=huggingface", row.folder / name, row.folder / f"{name}_back")
    again = AutoModelForCausalLM.from_pretrained(row.folder / f"{name}_back")
    ours = switchx.load(row.folder / name).logits(np.array(PROMPTS[:1]), dropless=True)
    with torch.no_grad():
        want = again(torch.tensor(PROMPTS[:1])).logits.numpy()
    np.testing.assert_allclose(ours, want, rtol=0, atol=1e-5 * np.abs(want).max())
    return want


def distill(row: Row):
    """A small dense student: its first soft loss is the distance to theirs."""
    student = (
        "ModelConfig.architecture=decoder_only", "ModelConfig.num_encoder_layers=0",
        "ModelConfig.num_decoder_layers=1", "ModelConfig.d_model=16", "ModelConfig.d_ff=32",
        "ModelConfig.num_heads=2", "ModelConfig.d_head=8",
        "Distillation.starts_from_teacher=False", f"TEACHER={row.folder / 'run'}",
        f"ModelConfig.vocab_size={V}",
        f"FILES={row.folder / 'docs.jsonl'}",
    )  # fmt: skip
    assert row.splits
    files = "runs/distill.gin", "tasks/text_causal_lm.gin"
    files = [f"--gin_file=configs/{each}" for each in files]
    words = [*files, *(f"--gin.{each}" for each in (*SMALL, *student))]
    run("train", *words, f"--model_dir={row.folder / 'student'}")
    first, *_ = lines(row.folder / "student/metrics.jsonl")
    token_BL = first_texts(words)
    logits_BLV = switchx.Model.from_gin(*split(words)).logits(token_BL)
    ours_BLV = np.asarray(jax.nn.log_softmax(logits_BLV))[:, :-1]
    theirs_BLV = np.stack([row.log_probs(row_L)[:-1] for row_L in token_BL])
    distance = np.sum(np.exp(theirs_BLV) * (theirs_BLV - ours_BLV), axis=-1).mean()
    assert first["soft_loss"] == pytest.approx(distance, rel=1e-4)


def reshape(row: Row):
    """Fewer experts; more, or experts of a dense model, with equal logits; all go back."""
    import torch

    with torch.no_grad():
        want = row.model(torch.tensor(PROMPTS[:1])).logits.numpy()
    ways = [("--experts=4", "--every=1")]
    ways += [("--experts=4", "--every=2")] * row.name.startswith("qwen")
    if row.is_sparse:
        ways = [("--experts=2", "--reduce=drop"), ("--experts=8", "--upcycle=more_choices")]
    for n, way in enumerate(ways):
        of = f"--model_dir={row.folder / 'run'}", f"--output={row.folder / f'reshaped{n}'}"
        run("reshape", *row.job(), *of, *way)
        logits = require_back(row, f"reshaped{n}")
        is_same = np.abs(logits - want).max() <= 1e-5 * np.abs(want).max()
        assert is_same != ("--reduce=drop" in way), way


def report(row: Row):
    first_step(row)
    run("report", f"--model_dir={row.folder / 'tuned'}")
    assert "</html>" in (row.folder / "tuned/report.html").read_text()[-100:]


def record(row: Row, capsys):
    """Choices and gates of every token are theirs, and drops and drift are computed of them."""
    import torch

    of = f"--model_dir={row.folder / 'run'}"
    texts, file = row.folder / "in.txt", row.folder / "record.parquet"
    texts.write_text("\n".join(map(text_of, PROMPTS)))
    out, routed = row.folder / "recorded.txt", []
    ends = "TopKRouter", "TopkRouter"
    routers = [m for m in row.model.modules() if type(m).__name__.endswith(ends)]
    has_order = not DECODERS[row.name].has_sigmoid  # theirs are as top-k leaves them
    hooks = [m.register_forward_hook(lambda _, __, out: routed.append(out)) for m in routers]
    run("score", of, f"--input={texts}", f"--output={out}", f"--record={file}")
    for batch in open_record(file).batches():
        for i, is_token_L in enumerate(batch.is_token_BL):
            ids = batch.token_BL[i, is_token_L].tolist()
            if not ids:
                continue
            routed.clear()
            with torch.no_grad():
                row.model(torch.tensor([ids]))
            assert len(routed) == len(batch.expert_NBLS)
            for layer, (_, gate_LS, expert_LS) in enumerate(routed):
                got_LS = batch.expert_NBLS[layer, i, is_token_L]
                gates_LS = batch.gate_NBLS[layer, i, is_token_L]
                if not has_order:
                    by_id = np.argsort(got_LS), np.argsort(expert_LS.numpy())
                    got_LS, gates_LS = (
                        np.take_along_axis(each, by_id[0], -1) for each in (got_LS, gates_LS)
                    )
                    expert_LS, gate_LS = (
                        np.take_along_axis(each.numpy(), by_id[1], -1)
                        for each in (expert_LS, gate_LS)
                    )
                np.testing.assert_array_equal(got_LS, expert_LS)
                np.testing.assert_allclose(gates_LS, gate_LS, atol=1e-6)
    for hook in hooks:
        hook.remove()
    run("drops", file)
    capsys.readouterr()
    run("drift", file, file, "--json")
    layers = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert layers and {each["differing_share"] for each in layers} == {0}


def atlas(row: Row):
    row.generated()
    run("atlas", row.folder / "run", "--input", row.folder / "in.txt", "--min_tokens=1",
        "--knockouts=1", f"--output={row.folder / 'atlas'}")  # fmt: skip
    assert (row.folder / "atlas/atlas.html").exists()


def plan(row: Row, capsys):
    """It counts the parameters that the files have, in float32."""
    job = [word for word in row.job() if "expert_dropout" not in word]
    for hardware in ("v5e", "v5p", "h200"):
        capsys.readouterr()
        run("plan", *job, f"--hardware={hardware}", "--devices=1", "--json")
        first, *_ = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        assert first["memory_gradients_bytes"] == 4 * row.num_elements


def compiled(row: Row):
    """A wider model's step compiles for four TPUs and a GPU: its arguments have the planner's
    bytes, and experts compute the rows that are chosen."""
    skip_without(tpu_compiler, gpu_compiler)
    sizes = {k: v for k, v in WIDER.items() if k in BASE | CASES[row.name][1]}
    wide = Row(row.name, row.folder / "wide")
    theirs(row.name, **CHANGES.get(row.name, {}), **sizes).save_pretrained(
        wide.folder / "theirs"
    )
    run("convert", "--from=huggingface", wide.folder / "theirs", wide.folder / "run")
    more = "BATCH_SIZE=16", "INPUTS_LENGTH=128", "TARGETS_LENGTH=128"
    model = read_model_config(RunFolder(wide.folder / "run"))
    for topology in SLICES:
        words = *wide.job(), *(f"--gin.{each}" for each in more), f"--topology={topology}"
        said = json_of_child(["compile", *words, "--json"], Topology.parse(topology))
        assert all(check["holds"] for check in said["checks"]), said["checks"]
        (step,) = said["results"]
        assert step["parameters"] == wide.num_elements
        assert step["slots_per_token"] == (model.switch and model.switch.router.num_selected)


# Command: what is shown of it.
CELLS = {
    "convert": convert_back,
    "load": load,
    "generate": greedy,
    "beams": beams,
    "samples": samples,
    "score": score,
    "eval": evaluate,
    "quantize": quantize,
    "export": export,
    "serve": serve,
    "deploy": deploy,
    "--expert_slots": expert_slots,
    "train": train,
    "meshes": meshes,
    "host, disk": storage,
    "pairs": pairs,
    "distillation": distill,
    "reshape": reshape,
    "report": report,
    "record, drops, drift": record,
    "atlas": atlas,
    "plan": plan,
    "compile": compiled,
}


# Commands that do not apply to dense models.
OF_EXPERTS = (
    "quantize", "--expert_slots", "host, disk", "report", "record, drops, drift", "atlas",
)  # fmt: skip


def table() -> str:
    """The matrix as it stands on the page: what `test_cell` shows, and what does not apply."""
    rows = [["", *(f"`{name}`" for name in DECODERS)], ["---"] * (1 + len(DECODERS))]
    for name in CELLS:
        is_out = [not kin.num_experts and name in OF_EXPERTS for kin in DECODERS.values()]
        rows.append([name, *("-" if each else "yes" for each in is_out)])
        if name == "convert":  # back, of another class
            for n, kin in enumerate(DECODERS, 1):
                rows[-1][n] = AS.get(kin, "yes")
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_page_has_the_matrix():
    assert table() in PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def row(request, made_once):
    """The row of a family, converted once."""
    name = request.param

    def make(folder):
        Row(name, folder).model.save_pretrained(folder / "theirs")
        run("convert", "--from=huggingface", folder / "theirs", folder / "run")

    return Row(name, made_once(f"family_{name}", make))


def marked(name: str, command: str):
    is_slow = name not in FIRST or command not in QUICK
    return pytest.param(
        name, command, marks=[pytest.mark.slow] * is_slow, id=f"{name}-{command}"
    )


@pytest.mark.hf
@pytest.mark.parametrize(
    ("row", "command"),
    [
        marked(name, command)
        for name, kin in DECODERS.items()
        for command in CELLS
        if kin.num_experts or command not in OF_EXPERTS
    ],
    indirect=["row"],
)
def test_cell(row, command, capsys):
    cell = CELLS[command]
    with on_devices(1):
        cell(row, capsys) if "capsys" in inspect.signature(cell).parameters else cell(row)


if __name__ == "__main__":
    print(table(), end="")
