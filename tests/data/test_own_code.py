# SPDX-License-Identifier: Apache-2.0
"""Code of a user's own: docs/own_code.md and its files run, and what is refused."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.compiled.workload import workload_of
from switchx.data.features import Example
from switchx.data.objectives import CausalLM, RecordObjective
from switchx.data.tasks import TextFormat
from switchx.data.tokenizers import ByteVocabulary, Vocabulary
from switchx.data.vocabularies import load_vocabulary, save_vocabulary
from switchx.fields import describe
from switchx.inference.quantize import quantize_experts
from switchx.interop import huggingface, t5x
from switchx.models.config import ModelConfig, model_from_description
from switchx.training.fused_loss import check_fused
from switchx.training.pipelined import build_schedule
from switchx.training.resume import write_run_config
from tests.data.refusals import refused
from tests.processes import ROOT
from tests.training.jobs import SPARSE, TASK, make_job

PAGE = (ROOT / "docs/own_code.md").read_text(encoding="utf-8")
FOLDER = ROOT / "docs/own_code"
FILES = {
    name: (FOLDER / name).read_text() for name in ("my_code.py", "own.gin", "own_model.gin")
}
EXCERPT = re.compile(r":\n\n```(?:python|gin)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"In Python:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow  # one training after another
def test_the_page_runs_as_printed(in_a_folder, one_device, monkeypatch, capsys):
    tmp_path = in_a_folder
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (block,) = BASH.findall(PAGE)
    first, *commands = block.splitlines()
    words = subprocess.run(
        [sys.executable, "-c", "import this"], capture_output=True, text=True
    )
    assert first == 'python -c "import this" > words.txt'
    (tmp_path / "words.txt").write_text(words.stdout)
    commands = [shlex.split(command) for command in commands]
    assert {program for program, *_ in commands} == {"switchx"}
    # Commands find modules of the working directory; none has this name before and after.
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "my_code", None)
    del sys.modules["my_code"]
    for _, *arguments in commands:
        assert main(arguments) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "resumed from step 4" in said.err
    assert "same_length" in said.out

    own, model = tmp_path / "runs/own", tmp_path / "runs/own_model"
    assert [line["step"] for line in lines(own / "validation.jsonl")] == [0, 4, 6]
    described = json.loads((own / "config.json").read_text())
    assert described["source"]["objective"]["type"] == "my_code.Spelled"
    assert described["optimizer"]["make"] == "my_code.signed_momentum"
    saved = json.loads((own / "vocabulary.json").read_text())
    assert (saved["kind"], saved["fields"].keys()) == ("my_code.Letters", {"letters"})
    described = json.loads((model / "config.json").read_text())["model"]
    assert (described["type"], described["window"]) == ("my_code.WindowConfig", 3)
    (last,) = lines(model / "metrics.jsonl")[-1:]
    assert np.isfinite(last["loss"]) and "model_flops_per_s" not in last

    (code,), names = PYTHON.findall(PAGE), {}
    exec(code, names)
    assert capsys.readouterr().out.startswith("[Score(log_likelihood=-")
    with refused("WindowConfig builds a module of its own, and decoding knows the blocks"):
        names["model"].generate(["t-h-e"])


def test_excerpts_of_the_page_are_in_its_files():
    excerpts = EXCERPT.findall(PAGE.replace(*PYTHON.findall(PAGE), ""))
    assert len(excerpts) == 3 and not excerpts.pop()  # of Python, which was emptied
    assert [any(text in file for file in FILES.values()) for text in excerpts] == [True, True]


@dataclasses.dataclass(frozen=True)
class Digits(Vocabulary):
    """Digits of a base; `secret` changes its ids and is no field."""

    base: int = 10
    names: tuple[str, ...] = ()
    num_sentinels: ClassVar[int] = 0
    secret: ClassVar[int] = 0

    @property
    def size(self):
        return 3 + self.base

    def encode(self, text):
        return [3 + int(digit, self.base) for digit in text]

    def decode(self, ids):
        return "".join(str(i - 3) for i in ids if i >= 3)


class Drifting(Digits):
    """A vocabulary whose ids depend on more than its fields."""

    def fingerprint(self):
        Drifting.secret += 1
        return f"{Drifting.secret:x}"


@dataclasses.dataclass(frozen=True)
class Copy(RecordObjective):
    """The targets are the inputs, in a prefix that is read causally and has no end."""

    ends_inputs_with_eos = False
    is_prefix_bidirectional: bool = False

    def example(self, record, vocabulary):
        ids = np.array(vocabulary.encode(record["inputs"]), np.int32)
        return Example(ids, ids)


def task_of(objective):
    return dataclasses.replace(TASK, objective=objective)


def test_a_vocabulary_of_ones_own_is_saved_and_read_again(tmp_path):
    save_vocabulary(Digits(8, ("octal",)), tmp_path)
    loaded = load_vocabulary(tmp_path)
    assert type(loaded) is Digits and loaded.base == 8
    assert loaded.fingerprint() == Digits(8, ("octal",)).fingerprint()
    assert len({each.fingerprint() for each in (loaded, Digits(8), Digits(9))}) == 3
    assert loaded.piece(4).text == "1" and loaded.piece(0).kind == "control"
    with refused("sentinel 0 of 0"):
        loaded.sentinel_id(0)
    file = tmp_path / "vocabulary.json"
    text = file.read_text()
    file.write_text(text.replace('"base": 8', '"base": 9'))
    with refused(f"the vocabulary in {tmp_path} has the fingerprint <any>, its description"):
        load_vocabulary(tmp_path)
    for name, complaint in (
        ("tests.data.gone.Digits", "which cannot be imported"),
        ("tests.data.test_own_code.Copy", "which is no Vocabulary"),
    ):
        file.write_text(text.replace("tests.data.test_own_code.Digits", name))
        with refused(f"{file} names {name}, {complaint}"):
            load_vocabulary(tmp_path)


def test_a_prompt_follows_an_objective_of_ones_own():
    description = describe(task_of(Copy()))
    got = TextFormat.of_training(description, is_encoder_decoder=False)
    assert got == TextFormat(False, False, False)
    description = describe(task_of(Copy(is_prefix_bidirectional=True)))
    got = TextFormat.of_training(description, is_encoder_decoder=False)
    assert got == TextFormat(False, True, False)
    description["objective"]["type"] = "tests.data.gone.Copy"
    with refused("config.json names tests.data.gone.Copy, which cannot be imported"):
        TextFormat.of_training(description, is_encoder_decoder=False)
    description["objective"]["type"] = "Copies"
    with refused("config.json names the objective 'Copies'"):
        TextFormat.of_training(description, is_encoder_decoder=False)


def test_what_cannot_be_read_again_is_refused_by_name_before_anything_is_written(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Local(CausalLM):
        pass

    class Plain(ByteVocabulary):
        """No dataclass of its own, but of a known one."""

    for source, name in (
        (task_of(Local()), "job.source.objective"),
        (task_of(object()), "job.source.objective"),
        (dataclasses.replace(TASK, corpus=object()), "job.source.corpus"),
        (dataclasses.replace(TASK, vocabulary=Plain()), "job.source.vocabulary"),
    ):
        with refused(f"{name}=<any> cannot be written into a run folder and read again"):
            write_run_config(RunFolder(tmp_path), make_job(source=source))
    job = make_job(source=dataclasses.replace(TASK, vocabulary=Drifting()))
    with refused(
        "the vocabulary tests.data.test_own_code.Drifting has the fingerprint 1, and 2"
    ):
        write_run_config(RunFolder(tmp_path), job)
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass(frozen=True)
class OwnModel(ModelConfig):
    def build(self, key):
        return super().build(key)


def test_what_takes_a_model_apart_refuses_one_of_ones_own():
    values = {f.name: getattr(SPARSE, f.name) for f in dataclasses.fields(ModelConfig)}
    own = OwnModel(**values)
    assert model_from_description(describe(own), "config.json") == own
    job = make_job(own)
    for take_apart in (
        lambda: huggingface.describe(own),
        lambda: t5x.read_checkpoint("nowhere", own),
        lambda: quantize_experts(own, {}, bits=8),
        lambda: workload_of(job),
        lambda: build_schedule(own, job.pipeline, 2, 2),
        lambda: check_fused(own, None, None, bucket_bytes=1, rows=8, lengths=(8,)),
    ):
        with refused("OwnModel builds a module of its own, and <any> knows the blocks"):
            take_apart()
