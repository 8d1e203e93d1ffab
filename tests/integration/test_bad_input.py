# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused at once, in one paragraph, and nothing that was there is changed.

Gin's part of it, names and types and syntax, is in tests/cli; here is what only a command
with data and a run folder can meet.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
import shutil

import jax
import pytest

from switchx.checkpoint.adapter_run import AdapterRecord
from switchx.checkpoint.retention import UNFINISHED
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli.main import main
from switchx.data.downstream.templates import Templates
from switchx.data.vocabulary_training import train_sentencepiece
from switchx.gin_config.building import job_from_gin
from switchx.models.adapters import LoRASpec
from switchx.training.program import TrainingProgram
from switchx.training.start import require_apart
from tests.integration.runs import SMALL, arguments, write_corpus


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch, session_cache):
    """Input is checked before a model is; and the user's cache and data stay out of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(session_cache))
    monkeypatch.delenv("SWITCHX_DATA_DIR", raising=False)

    def compiles(self, *args, **options):
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
    """`refused(said, command, *words)`: the command ends with status 2 and one paragraph.

    Its names and values are `said`, in which `<any>` stands for anything, and it goes on with
    a way out; it is returned.
    """

    def refused(said: str, *words) -> str:
        assert main(list(map(str, words))) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err
        before, mark, text = captured.err.rpartition(f"switchx {words[0]}: error: ")
        assert mark, before
        pattern = ".*".join(re.escape(part) for part in said.split("<any>"))
        assert re.search(pattern, text, re.DOTALL), text
        assert re.search(r"; |\. |, or |\(`switchx", text), f"no way out: {text}"
        return text

    return refused


# What does not fit together.


@pytest.mark.parametrize(
    ("binding", "mesh", "said"),
    [
        ("NUM_MICROBATCHES=3", None, "batch_size=8 is not divisible by num_microbatches=3"),
        ("BATCH_SIZE=12", None, "batch_size=12 in 1 microbatches is not divisible by the 8"),
        ("SwitchConfig.every=3", None, "num_encoder_layers=1 is not divisible by switch.every"),
        ("NUM_EXPERTS=6", "data_expert", "E=6 is not divisible by mesh axis 'expert' of size"),
        ("EXPERT_PARTS=16", "data_expert", "expert=16 needs 16 devices, but there are 8"),
        ("VOCAB_SIZE=300", None, "the vocabulary has 384 ids<any>vocab_size is 300"),
        ("INPUTS_LENGTH=2", None, "inputs_length=2 is too short for any text; use at least 3"),
        ("TARGETS_LENGTH=3", None, "inputs_length=64 makes targets of 14 tokens, got"),
        ("Prefetch.num_workers=9", None, "num_workers=9 for 8 rows of a process"),
        ("Task.evaluation_split=test", None, "no split 'test'; use one of train, validation"),
    ],
)  # fmt: skip
def test_what_does_not_fit(refused, files, binding, mesh, said):
    words = arguments("run", files, binding)
    words += [f"--gin_file=meshes/{mesh}.gin"] if mesh else []
    assert len(jax.devices()) == 8
    refused(said, "train", *words)
    assert not pathlib.Path("run").exists()


# Text that is not there, or is none.


PAIR = b'{"inputs": "a", "targets": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "does not exist; name a file or a folder of files"),
        ("empty.txt", b"", "path='empty.txt' holds 0 distinct documents<any>at least 2"),
        ("blank.txt", b"\n \n", "path='blank.txt' holds 0 distinct documents"),
        ("text.pdf", b"%PDF", "text.pdf holds no text: its files end in .pdf (1), and none in"),
        ("latin.txt", "größer".encode("latin-1"), "not UTF-8: byte 0xf6 at offset 2"),
        ("cut.txt.gz", b"\x1f\x8b\x08\x00", "cut.txt.gz cannot be read: "),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "bad.jsonl:2: not JSON "),
        ("keys.jsonl", b'{"body": "a"}\n', "keys.jsonl:1: expected the key text, or inputs"),
        (
            "pairs.jsonl",
            PAIR + PAIR.replace(b'"a"', b'"c"'),
            "'small': SpanCorruption reads ['text']<any>['inputs', 'targets']; use the",
        ),
    ],
)  # fmt: skip
def test_corpus_that_cannot_be_read(refused, files, name, content, said):
    if content is not None:
        pathlib.Path(name).write_bytes(content)
    refused(said, "train", *arguments("run", name))
    assert not pathlib.Path("run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_corpus_that_may_not_be_read(refused, files):
    files.chmod(0)
    refused(f"{files} cannot be read: ", "train", *arguments("run", files))


def test_data_dir_that_is_a_file(refused, files):
    words = arguments("run", files, f"DATA_DIR={files}")
    refused(f"data_dir={str(files)!r} is a file; name a folder", "train", *words)


# The run folder.


@pytest.mark.parametrize(
    "folder", ["corpus.txt", "corpus.txt/run", "/proc/run", "/proc/self/a"]
)
def test_model_dir_that_cannot_be_written(refused, files, folder):
    if folder.startswith("/proc") and not os.path.isdir("/proc/self"):
        pytest.skip("this system has no /proc")
    before = files.read_bytes()
    refused(f"model_dir={folder!r} cannot be written", "train", *arguments(folder, files))
    assert files.read_bytes() == before


@pytest.mark.parametrize("folder", ["texts", "texts/run"])
def test_model_dir_among_the_texts(refused, files, folder):
    """The second attempt would read the first one's logs as records."""
    pathlib.Path("texts").mkdir()
    files.rename("texts/corpus.txt")
    said = f"model_dir={folder!r} lies in the data of task 'small', texts, which<any>elsewhere"
    refused(said, "train", *arguments(folder, "texts"))
    assert [each.name for each in pathlib.Path("texts").iterdir()] == ["corpus.txt"]


def test_model_dir_beside_what_is_read(tmp_path):
    """Hidden files are not read, nor what lies below a folder of tables; others have
    checkpoints, too."""
    job = job_from_gin(SMALL, [f"FILES={tmp_path}"])
    require_apart(job, RunFolder(tmp_path / ".runs" / "a"))
    table = dataclasses.replace(job.source, corpus=Templates(str(tmp_path), "{a}", "{b}"))
    of_table = dataclasses.replace(job, source=table)
    require_apart(of_table, RunFolder(tmp_path / "runs"))
    with pytest.raises(ValueError, match="lies in the data of task 'small'"):
        require_apart(of_table, RunFolder(tmp_path))
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "config.json").write_text("{}")
    nowhere = dataclasses.replace(job.source.corpus, path=None)  # as a corpus of one's own
    no_path = dataclasses.replace(job.source, corpus=nowhere)
    require_apart(dataclasses.replace(job, source=no_path), RunFolder(tmp_path / "runs"))
    elsewhere = dataclasses.replace(table, corpus=Templates("tfds:ag", "{a}", "{b}"))
    require_apart(dataclasses.replace(job, source=elsewhere),
                  RunFolder(tmp_path / "app" / "checkpoints" / "a"))  # fmt: skip


def test_model_dir_in_the_checkpoints_of_another_run(refused, run_folder, finished_run):
    folder = run_folder / "checkpoints" / "new"
    refused(f"model_dir={str(folder)!r} lies in the checkpoints of the run {run_folder}; give",
            "train", *arguments(folder, finished_run.files))  # fmt: skip


def test_files_that_changed_since_the_run_began(refused, run_folder, finished_run, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(pathlib.Path(finished_run.files).read_text() + "\n\none more\n")
    text = refused(
        "the loader's state was taken from another pipeline (small.corpus: 'text_files/train "
        "<any>; restore the files that were read, which the run's corpora.json counts, or",
        "train",
        *arguments(run_folder, other, "TRAIN_STEPS=50"),
    )
    assert "a new model_dir, with INIT_FROM" in text


def test_a_folder_that_is_no_run_is_called_what_it_is(refused, files):
    folder = pathlib.Path("theirs")
    folder.mkdir()
    (folder / "artifact.json").write_text("{}")
    words = "convert", "--to=huggingface", "theirs", "back"
    refused("it is a packed model, as quantize and deploy make it", *words)
    (folder / "artifact.json").rename(folder / "config.json")
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    said = "it is a model of transformers: `switchx convert --from=huggingface <any>theirs DST`"
    refused(said, "eval", "--model_dir=theirs")
    refused(said, "train", *arguments("run", files, "INIT_FROM=theirs"))


def test_model_dir_of_another_configuration(refused, run_folder, finished_run):
    changes = ("SEED=3", "ModelConfig.d_ff=128", "TRAIN_STEPS=50", "LOG_EVERY=1")
    text = refused(
        f"model_dir={str(run_folder)!r} belongs to another configuration (model.d_ff: 64 "
        "there, 128 here; seed: 0 there, 3 here); give another model_dir",
        "train",
        *arguments(run_folder, finished_run.files, *changes),
    )
    assert "train_steps:" not in text and "log_every:" not in text  # these may be other


def test_model_dir_that_another_trainer_holds(refused, run_folder, finished_run):
    with RunFolder(run_folder).locked():
        refused(
            f"model_dir={str(run_folder)!r} is being trained by process {os.getpid()} on ",
            "train",
            *arguments(run_folder, finished_run.files, "TRAIN_STEPS=20"),
        )


def test_model_dir_whose_text_has_changed(refused, run_folder, finished_run, tmp_path):
    """Files may lie elsewhere; but the loader's state is of other text."""
    files = tmp_path / "corpus.txt"
    files.write_text("an expert more\n\n" + finished_run.files.read_text())
    words = arguments(run_folder, files, "TRAIN_STEPS=20")
    said = "the loader's state was taken from another pipeline (small.corpus: <any> there, "
    refused(said, "train", *words)


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


def test_vocabulary_that_is_another_than_the_runs(refused, files, capsys):
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
    refused(
        "model_dir='run' was trained with another vocabulary: 400 ids there, 390 here",
        "train",
        *words,
    )
    assert content_of(pathlib.Path("run")) == before
    # The run has its own copy: what the configuration names may be gone.
    shutil.rmtree("v")
    # As if it had been cut short: over damaged checkpoints training does not begin again.
    pathlib.Path("run/checkpoints/4").rename(f"run/checkpoints/4{UNFINISHED}")
    with pytest.raises(AssertionError, match="compiled"):
        main(["train", *words])


# Starting from another run.


@pytest.mark.parametrize(
    ("bindings", "said"),
    [
        (
            ["ModelConfig.d_ff=48"],
            "--gin.ModelConfig.d_ff=48 (model.d_ff: 64 there, 48 here): the model is that of "
            "INIT_FROM=",
        ),
        (
            ["ModelConfig.switch=None"],
            "--gin.ModelConfig.switch=None (model.switch: a SwitchConfig there, None here): ",
        ),
        (
            ["ByteVocabulary.num_sentinels=50"],
            "was trained with another vocabulary than this job's",
        ),
    ],
)
def test_init_from_a_run_that_does_not_fit(refused, run_folder, files, bindings, said):
    words = arguments("new", files, f"INIT_FROM={run_folder}", *bindings)
    refused(f"<any>{said}", "train", *words)
    assert not pathlib.Path("new/config.json").exists()


NO_VALUE = "--gin.INIT_FROM= has no value; write --gin.INIT_FROM=VALUE"


@pytest.mark.parametrize(
    ("source", "said", "said_of_model"),
    [
        ("none", "init_from='none' has no config.json: it is no run", "INIT_FROM='none': the"),
        (
            "empty",
            "init_from='empty' has no config.json: it is no run",
            "INIT_FROM='empty': the",
        ),
        ("", NO_VALUE, NO_VALUE),
    ],
)
def test_init_from_no_run(refused, files, source, said, said_of_model):
    pathlib.Path("empty").mkdir()
    refused(said, "train", *arguments("new", files, f"INIT_FROM={source}"))
    # Its model is that folder's.
    finetune = ["--gin_file=runs/finetune.gin", f"--gin.INIT_FROM={source}", "--model_dir=new"]
    refused(said_of_model, "train", *finetune)


# Evaluation.


def test_eval_of_what_is_no_run(refused, files):
    pathlib.Path("empty").mkdir()
    for folder, found in (("empty", "empty"), ("none", "nothing is there")):
        where = f"{pathlib.Path(folder).absolute()} is not a run folder, "
        said = f"{where}it has no operative_config.gin: {found}; give the model_dir of a run"
        refused(said, "eval", f"--model_dir={folder}")
        said = f"{where}its config.json cannot be read (<any>): {found}; give the model_dir"
        refused(said, "eval", *arguments(folder, files))
    assert list(pathlib.Path("empty").iterdir()) == []
    assert not pathlib.Path("none").exists()


# Adapters.


@pytest.mark.parametrize(
    ("command", "binding", "said"),
    [
        ("train", "LoRASpec.rank=0", "LoRASpec.rank=0; use at least 1"),
        ("train", "LoRASpec.targets=('dense_ffn',)", "('dense_ffn',) matches no weight"),
        ("train", "NUM_EXPERTS=16", "holds another model (model.switch.num_experts"),
        ("eval", "LoRASpec.rank=8", "fingerprint was 000000000000; that folder has another"),
    ],
)
@pytest.mark.usefixtures("one_device")
def test_adapters_that_do_not_fit(command, binding, said, finished_run, tmp_path, refused):
    base, run = finished_run.folder, tmp_path / "run"
    if command == "eval":
        shutil.copytree(base, run)
        AdapterRecord(LoRASpec(str(base), 12), "0" * 64).write(RunFolder(run))
    bindings = "LORA=@LoRASpec()", f"LoRASpec.base='{base}'", binding
    refused(said, command, *arguments(run, finished_run.files, *bindings))
