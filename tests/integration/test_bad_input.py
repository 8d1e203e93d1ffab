# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused at once, in one paragraph, and nothing that was there is changed.

Gin's part of it, names and types and syntax, is in tests/cli/test_gin_errors.py and
test_gin_edge.py; here is what only a command with data and a run folder can meet.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess

import jax
import pytest

from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.data.vocabularies import train_sentencepiece
from switchx.training.program import TrainingProgram
from tests.integration.runs import arguments, lines, write_corpus


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch, session_cache):
    """Input is checked before a model is; and the user's cache and data stay out of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(session_cache))
    monkeypatch.delenv("SWITCHX_DATA_DIR", raising=False)

    def compiles(self, *args):
        raise AssertionError("a program is compiled for input that is to be refused")

    monkeypatch.setattr(TrainingProgram, "init_state", compiles)
    monkeypatch.setattr("switchx.training.loop.evaluate_job", compiles)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_corpus(tmp_path)


@pytest.fixture
def run_folder(finished_run, tmp_path):
    """A copy of a finished run; at the end it has to be what it was."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run.folder, folder)
    before = content_of(folder)
    yield folder
    assert content_of(folder) == before


def content_of(folder) -> dict[str, str]:
    """What a run is made of: all its files but the lock, by their content."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "trainer.lock"
    }


@pytest.fixture
def refused(capsys):
    """`refused(status, command, *arguments)`: the paragraph that the command refuses with."""

    def refused(status: int, *words) -> str:
        assert main(list(map(str, words))) == status
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        before, mark, said = captured.err.rpartition(f"switchx {words[0]}: error: ")
        assert mark, before
        return said.rstrip("\n")

    return refused


def says(pattern: str, said: str):
    """`<any>` in a text stands for anything."""
    regex = re.escape(pattern).replace("<any>", ".*")
    assert re.fullmatch(regex, said, re.DOTALL), said


# What does not fit together.


@pytest.mark.parametrize(
    ("binding", "mesh", "said"),
    [
        (
            "NUM_MICROBATCHES=3",
            None,
            "batch_size=8 is not divisible by num_microbatches=3; use a multiple of it, or a "
            "number of microbatches that divides 8 (while building TrainingJob)",
        ),
        (
            "BATCH_SIZE=12",
            None,
            "batch_size=12 in 1 microbatches is not divisible by the 8 devices that the mesh "
            "splits rows over; use a multiple of 8, or a smaller mesh",
        ),
        (
            "SwitchConfig.every=3",
            None,
            "num_encoder_layers=2 is not divisible by switch.every=3; use 3 layers, or every=1 "
            "(while building ModelConfig)",
        ),
        (
            "NUM_EXPERTS=6",
            "data_expert",
            "expert dimension E=6 is not divisible by mesh axis 'expert' of size 4; use 4 or "
            "8, or a mesh with an axis that divides 6",
        ),
        (
            "EXPERT_PARTS=16",
            "data_expert",
            "mesh data=1 x expert=16 needs 16 devices, but there are 8 (cpu); change the mesh, "
            "or simulate devices on CPU with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=16",
        ),
        (
            "VOCAB_SIZE=300",
            None,
            "the vocabulary has 384 ids, but the model's vocab_size is 300; use a vocab_size "
            "of at least 384 (VOCAB_SIZE in the shipped configurations)",
        ),
        (
            "INPUTS_LENGTH=2",
            None,
            "inputs_length=2 is too short for any text; use at least 3",
        ),
        (
            "TARGETS_LENGTH=3",
            None,
            "span corruption of inputs_length=64 makes targets of 14 tokens, got "
            "targets_length=3; use targets_length=14 or more, or shorter inputs",
        ),
        (
            "Prefetch.num_workers=9",
            None,
            "num_workers=9 for 8 rows of a process; use 8 or fewer",
        ),
        (
            "Task.evaluation_split=test",
            None,
            "text_files has no split 'test'; use one of train, validation",
        ),
    ],
)
def test_what_does_not_fit(refused, files, binding, mesh, said):
    words = arguments("run", files, binding)
    words += [f"--gin_file=meshes/{mesh}.gin"] if mesh else []
    assert len(jax.devices()) == 8
    assert refused(2, "train", *words) == said
    assert not pathlib.Path("run/config.json").exists()


# Text that is not there, or is none.


PAIR = b'{"inputs": "a", "targets": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "<any> does not exist; name a text file or a folder of them"),
        (
            "empty.txt",
            b"",
            "text_files path='empty.txt' holds 0 distinct documents and a split into train and "
            "validation needs at least 2; add text, or cut it finer by a lower max_characters",
        ),
        ("blank.txt", b"\n \n", "text_files path='blank.txt' holds 0 distinct documents<any>"),
        (
            "text.pdf",
            b"%PDF",
            "<any>/text.pdf holds no text: none of its 1 files ends in .txt, .txt.gz, .jsonl, "
            ".jsonl.gz, .json.gz; rename or convert them",
        ),
        (
            "latin.txt",
            "größer".encode("latin-1"),
            "<any>/latin.txt is not UTF-8: byte 0xf6 at offset 2; convert it, as with `iconv "
            "-f LATIN1 -t UTF-8`",
        ),
        (
            "cut.txt.gz",
            b"\x1f\x8b\x08\x00",
            "<any>/cut.txt.gz cannot be read: <any>; check that it is whole and that you may "
            "read it",
        ),
        (
            "bad.jsonl",
            b'{"text": "a"}\n{"text": \n',
            "<any>/bad.jsonl:2: not JSON <any>; one object a line is expected",
        ),
        (
            "keys.jsonl",
            b'{"body": "a"}\n',
            "<any>/keys.jsonl:1: expected the key text, or inputs and targets; got body",
        ),
        (
            "pairs.jsonl",
            PAIR + PAIR.replace(b'"a"', b'"c"'),
            "task 'small': SpanCorruption reads ['text'], the records of TextFiles(<any>) have "
            "['inputs', 'targets']; use the objective InputsToTargets, or another corpus",
        ),
    ],
)
def test_corpus_that_cannot_be_read(refused, files, name, content, said):
    if content is not None:
        pathlib.Path(name).write_bytes(content)
    says(said, refused(2, "train", *arguments("run", name)))
    assert not pathlib.Path("run/config.json").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_corpus_that_may_not_be_read(refused, files):
    files.chmod(0)
    says(f"{files} cannot be read: <any>", refused(2, "train", *arguments("run", files)))


def test_data_dir_that_is_a_file(refused, files):
    said = refused(2, "train", *arguments("run", files, f"DATA_DIR={files}"))
    assert said == f"data_dir={str(files)!r} is a file; name a folder"


# The run folder.


@pytest.mark.parametrize(
    "folder", ["corpus.txt", "corpus.txt/run", "/proc/run", "/proc/self/a"]
)
def test_model_dir_that_cannot_be_written(refused, files, folder):
    if folder.startswith("/proc") and not os.path.isdir("/proc/self"):
        pytest.skip("this system has no /proc")
    before = files.read_bytes()
    said = refused(2, "train", *arguments(folder, files))
    says(
        f"model_dir={folder!r} cannot be written (<any>); give a folder that this user may "
        "write, on a disk that has space",
        said,
    )
    assert files.read_bytes() == before


def test_model_dir_of_another_configuration(refused, run_folder, finished_run):
    changes = (
        "SEED=3",
        "ModelConfig.d_ff=128",
        "TRAIN_STEPS=50",
        "LOG_EVERY=1",
        "EVAL_EVERY=1",
    )
    said = refused(2, "train", *arguments(run_folder, finished_run.files, *changes))
    assert said == (
        f"model_dir={str(run_folder)!r} belongs to another configuration (model.d_ff: 64 "
        "there, 128 here; seed: 0 there, 3 here); give another model_dir, or the configuration "
        "it was made with. On resume these may change: train_steps, log_every, eval_every, "
        "checkpoint_every, eval_batches, retention, max_skipped_in_a_row, data_dir, mesh, "
        "pipeline, prefetch, compiler"
    )


def test_model_dir_that_another_trainer_holds(refused, run_folder, finished_run):
    with RunFolder(run_folder).locked():
        said = refused(2, "train", *arguments(run_folder, finished_run.files, "TRAIN_STEPS=20"))
    says(
        f"model_dir={str(run_folder)!r} is being trained by process {os.getpid()} on <any>; "
        "wait for it, end it, or give another model_dir",
        said,
    )


def test_model_dir_whose_text_has_changed(refused, run_folder, finished_run, tmp_path):
    """The same configuration; but the loader's state is of other text."""
    files = tmp_path / "corpus.txt"
    shutil.copy(finished_run.files, files)
    with files.open("a") as file:
        file.write("\n\nan expert more")
    config = json.loads((run_folder / "config.json").read_text())
    path = config["source"]["corpus"]["path"]
    said = refused(2, "train", *arguments(run_folder, files, "TRAIN_STEPS=20"))
    says(f"<any>source.corpus.path: {path!r} there, {str(files)!r} here<any>", said)


def sentencepiece_arguments(folder, files, *bindings):
    vocabulary = pathlib.Path("sp.gin")
    vocabulary.write_text(
        "from __gin__ import dynamic_registration\n"
        "from switchx.data import tokenizers\n"
        "VOCABULARY = @tokenizers.SentencePieceVocabulary()\n"
        'tokenizers.SentencePieceVocabulary.path = "v/vocabulary.model"\n'
    )
    words = arguments(folder, files, "VOCAB_SIZE=500", *bindings)
    return [*words, f"--gin_file={vocabulary}"]


def test_vocabulary_that_is_another_than_the_runs(refused, files, monkeypatch, capsys):
    """Trained anew under the same name: the configuration does not show it."""
    train_sentencepiece(str(files), 300, "v")
    words = sentencepiece_arguments("run", files)
    with pytest.raises(AssertionError, match="compiled"):  # all is well so far
        main(["train", *words])
    pathlib.Path("run/checkpoints/4").mkdir()
    (pathlib.Path("run/checkpoints/4/file")).write_text("as if it were one")
    capsys.readouterr()
    before = content_of(pathlib.Path("run"))
    train_sentencepiece(str(files), 290, "v")
    said = refused(2, "train", *words)
    assert said == (
        "model_dir='run' was trained with another vocabulary: 400 ids there, 390 here, or "
        "other pieces; the same ids would mean other things. Its copy is in that folder: use "
        "it, or give another model_dir"
    )
    assert content_of(pathlib.Path("run")) == before
    shutil.rmtree("v")
    says(
        "vocabulary v/vocabulary.model does not exist; train one with `switchx vocab "
        "--input=FILES --size=8000 --output=DIR`, or name a SentencePiece .model file<any>",
        refused(2, "train", *words),
    )


# Starting from another run.


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (
            ["ModelConfig.d_ff=48"],
            "init_from='<any>' does not fit; 8 of <any> arrays differ:\n"
            "<any>ffn/w_in_DF: expected float32[32, 48], got float32[32, 64]\n<any>"
            "use the configuration that it was made with, or another source",
        ),
        (
            ["ModelConfig.num_encoder_layers=4"],
            "init_from='<any>' does not fit; <any> of <any> arrays differ:\n"
            "<any>encoder/<any>/layer_3/<any>: expected float32[<any>], got nothing\n<any>",
        ),
        (
            ["SwitchConfig.every=1"],
            "<any>ffn/w_in_DF: expected nothing, got float32[32, 64]\n<any>",
        ),
        (
            ["ByteVocabulary.num_sentinels=50"],
            "init_from='<any>' was trained with another vocabulary than this job's; its token "
            "ids mean other things. Use the copy in that folder",
        ),
    ],
)
def test_init_from_a_run_that_does_not_fit(refused, run_folder, files, bindings, said):
    words = arguments("new", files, f"INIT_FROM={run_folder}", *bindings)
    says(said, refused(2, "train", *words))
    assert not pathlib.Path("new/config.json").exists()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("none", "no vocabulary can be read from <any>/none: <any>; name a run folder, or save "
         "one there"),
        ("empty", "no vocabulary can be read from <any>/empty: <any>"),
        ("", "--gin.INIT_FROM= has no value; write --gin.INIT_FROM=VALUE (is a shell variable "
         "not set?)"),
    ],
)  # fmt: skip
def test_init_from_no_run(refused, files, source, said):
    pathlib.Path("empty").mkdir()
    says(said, refused(2, "train", *arguments("new", files, f"INIT_FROM={source}")))
    finetune = ["--gin_file=runs/finetune.gin", f"--gin.INIT_FROM={source}", "--model_dir=new"]
    says(said.replace("<any>/", ""), refused(2, "train", *finetune).split(" (while")[0])


def test_init_from_a_run_without_a_checkpoint(refused, files, finished_run):
    shutil.copytree(finished_run.folder, "source", ignore=lambda *_: ["checkpoints"])
    says(
        "no complete checkpoint in <any>/source: found config.json, <any>; make one with "
        "`switchx train --gin_file=... --model_dir=<any>source`, or give another folder",
        refused(2, "train", *arguments("new", files, "INIT_FROM=source")),
    )


# Evaluation.


def test_eval_of_what_is_no_run(refused, files):
    pathlib.Path("empty").mkdir()
    for folder, found in (("empty", "empty"), ("none", "nothing is there")):
        assert refused(2, "eval", f"--model_dir={folder}") == (
            f"{pathlib.Path(folder).absolute()} is not a run folder, it has no "
            f"operative_config.gin: {found}; give the model_dir of a run, or --gin_file"
        )
        says(
            f"{pathlib.Path(folder).absolute()} is not a run folder, its config.json cannot be "
            f"read (<any>): {found}; give the model_dir of a run",
            refused(2, "eval", *arguments(folder, files)),
        )
    assert list(pathlib.Path("empty").iterdir()) == []
    assert not pathlib.Path("none").exists()


def test_eval_of_a_step_that_is_not_there(refused, run_folder):
    says(
        f"no complete checkpoint of step 5 in {run_folder}: found checkpoints 12, 8, 4<any>",
        refused(2, "eval", f"--model_dir={run_folder}", "--step=5"),
    )
    assert refused(2, "eval", f"--model_dir={run_folder}", "--step=last") == (
        "argument --step: 'last' is no step; give its number, or best (`switchx eval --help` "
        "explains)"
    )


def test_eval_of_another_model(refused, run_folder):
    says(
        f"model_dir={str(run_folder)!r} holds another model (model.activation: 'relu' there, "
        "'gelu' here); use the configuration that it was trained with. These may be others: "
        "<any>, and all that is not of the model",
        refused(2, "eval", f"--model_dir={run_folder}", "--gin.ModelConfig.activation=gelu"),
    )


def test_eval_of_damaged_checkpoints_alone(refused, files, finished_run):
    shutil.copytree(finished_run.folder, "run")
    for manifest in pathlib.Path("run").glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    before = content_of(pathlib.Path("run"))
    says(
        "no complete checkpoint in <any>: found checkpoints 12, 8, 4<any>",
        refused(2, "eval", "--model_dir=run"),
    )
    assert content_of(pathlib.Path("run")) == before


# The disk.


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, mebibytes: int):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs: root, outside of a sandbox")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_is_full_while_saving(finished_run, run_cli, tmp_path):
    """Nothing is lost: with room made, the same command goes on and ends bit-equal."""
    disk = tmp_path / "disk"
    with small_disk(disk, mebibytes=5):
        command = ["train", *arguments(disk / "run", finished_run.files)]
        process = run_cli(*command, "--gin.TRAIN_STEPS=4")
        assert process.returncode == 0, process.stderr
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while shutil.disk_usage(disk).free > 1 << 20:
                file.write(bytes(1 << 16))
        process = run_cli(*command)
        assert process.returncode == 1, process.stderr
        said = process.stderr.rpartition("switchx train: error: ")[2]
        says(
            f"checkpoint 8 could not be written to {disk}/run/checkpoints: it needs about "
            "<any> MiB; the disk has <any> MiB free. Intact: 4. Make room or mend the disk "
            "(<any> MiB are in *.damaged-* there), then run the same command to resume\n",
            said,
        )
        filler.unlink()
        process = run_cli(*command)
        assert process.returncode == 0, process.stderr
        assert "resumed from step 4" in process.stderr
        got = lines(disk / "run/metrics.jsonl")
    want = lines(finished_run.folder / "metrics.jsonl")
    assert [row["step"] for row in got] == [row["step"] for row in want]
    assert [row["loss"] for row in got] == [row["loss"] for row in want]
