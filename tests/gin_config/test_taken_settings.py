# SPDX-License-Identifier: Apache-2.0
"""What a job takes of INIT_FROM and of VOCABULARY_FILE, and what flags may say otherwise."""

import json
import pathlib

import pytest

from switchx.cli.main import main
from switchx.data.tokenizers import ByteVocabulary, SentencePieceVocabulary
from switchx.data.vocabularies import SavedVocabulary, read_or_trained, save_vocabulary
from switchx.fields import describe
from switchx.gin_config import building
from switchx.gin_config.building import ConfigurationError, job_from_gin
from switchx.gin_config.writing import model_gin
from switchx.models.config import ModelConfig, model_from_description
from tests.gin_files import CONFIGS, names, required_macros
from tests.training.jobs import OwnConfig

TINY, FINETUNE = "runs/pretrain_tiny.gin", "runs/finetune.gin"
SMALL = ("NUM_EXPERTS=4", "VOCAB_SIZE=500", "ModelConfig.d_model=64", "SwitchConfig.every=1",
         "SwitchConfig.capacity_factor=3.0", "ModelConfig.scan_layers=True")  # fmt: skip


@pytest.fixture
def source(in_a_folder) -> str:
    """The folder of a run of another model than any gin file has."""
    folder = in_a_folder / "runs/a"
    folder.mkdir(parents=True)
    model = job_from_gin(TINY, SMALL).model
    (folder / "config.json").write_text(json.dumps({"model": describe(model)}))
    save_vocabulary(ByteVocabulary(), folder)
    return "runs/a"


def trained(*bindings: str):
    return job_from_gin(TINY, [*SMALL, *bindings]).model


@pytest.mark.parametrize("file", [FINETUNE, "runs/finetune_task.gin"])
def test_init_from_is_all_that_fine_tuning_needs(source, file):
    job = job_from_gin(file, [f"INIT_FROM={source}"])
    rates = "ModelConfig.dropout_rate=0.1", "SwitchConfig.expert_dropout_rate=0.4"
    # What changes no mathematics is the new run's.
    assert job.model == trained(*rates, "ModelConfig.scan_layers=False")
    assert job.source.vocabulary == SavedVocabulary(source)


def test_the_model_of_gin_files_gives_way_and_that_is_said(source, caplog):
    job = job_from_gin(TINY, [f"INIT_FROM={source}"])
    assert (job.model.d_model, job.model.switch.num_experts) == (64, 4)
    # Capacity decides nothing about what the parameters mean: the file's stays.
    assert job.model.switch.capacity_factor == 1.25
    assert job.source.vocabulary.fingerprint() == ByteVocabulary().fingerprint()
    assert "ModelConfig.d_model=64 for 256" in caplog.text
    assert "SwitchConfig.num_experts=4 for 8" in caplog.text


@pytest.mark.parametrize(
    "flag, there, here",
    [
        ("NUM_EXPERTS=8", "switch.num_experts: 4 there", "8 here"),
        ("VOCAB_SIZE=4096", "vocab_size: 500 there", "4096 here"),
        ("ModelConfig.d_model=32", "d_model: 64 there", "32 here"),
        ("config.ModelConfig.activation='gelu'", "activation: 'relu' there", "'gelu' here"),
    ],
)
def test_a_flag_that_contradicts_is_refused_with_both_values(source, flag, there, here):
    with pytest.raises(ConfigurationError) as error:
        job_from_gin(FINETUNE, [f"INIT_FROM={source}", flag])
    said = str(error.value)
    assert said.startswith(f"--gin.{flag} (model.{there}, {here})")
    assert "INIT_FROM='runs/a'; leave the flag out" in said


def test_flags_that_agree_and_rules_are_taken(source):
    flags = ["NUM_EXPERTS=4", "ModelConfig.d_model=64", "SwitchConfig.capacity_factor=2.0"]
    switch = job_from_gin(FINETUNE, [f"INIT_FROM={source}", *flags]).model.switch
    assert (switch.num_experts, switch.capacity_factor) == (4, 2.0)
    rules = 'INIT_RULES=[(".*router.*", None)]'
    job = job_from_gin(FINETUNE, ["NUM_EXPERTS=8", rules, f"INIT_FROM={source}"])
    assert (job.model.switch.num_experts, job.model.d_model) == (8, 64)


def test_a_source_that_is_gone(source):
    """The run that began with it describes itself; a new one cannot begin."""
    job = building.parse_job([FINETUNE], [f"INIT_FROM={source}"])
    pathlib.Path("operative_config.gin").write_text(building.operative_config("JOB"))
    pathlib.Path("model.gin").write_text(model_gin(job.model))
    pathlib.Path(source, "config.json").unlink()
    assert job_from_gin("operative_config.gin") == job_from_gin(
        [FINETUNE, "model.gin"], [f"INIT_FROM={source}"]
    )
    with pytest.raises(ConfigurationError, match="INIT_FROM='runs/a': the model is taken from"):
        job_from_gin(FINETUNE, [f"INIT_FROM={source}"])


# Vocabularies.

TASKS = [
    name for name in names("tasks", "runs")
    if "vocabularies.CorpusVocabulary()" in (CONFIGS / name).read_text()
    or "VOCABULARY_FILE = %gin.REQUIRED" in (CONFIGS / name).read_text()
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> pathlib.Path:
    """The folder of `switchx vocab --size=400`."""
    folder = tmp_path_factory.mktemp("vocabulary")
    words = (f"word{i} is {i * 7 % 31} times as far as {i * i % 97}\n" for i in range(2000))
    (folder / "text.txt").write_text("".join(words))
    options = [f"--input={folder}/text.txt", "--size=400", f"--output={folder}"]
    assert main(["vocab", *options]) == 0
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_every_task_that_has_a_vocabulary_reads_a_file(name, vocabulary, in_a_folder):
    (in_a_folder / "de.txt").write_text("ein Tor\n\nein Experte\n")
    values = {"FILES": ".", "FOLDER": ".", "LANGUAGES": "('de',)"}
    files = [name] if name.startswith("runs/") else [TINY, name]
    asked = set().union(*map(required_macros, files)) & values.keys()
    flags = [f"{macro}={values[macro]}" for macro in asked]
    job = job_from_gin(files, [*flags, f"VOCABULARY_FILE={vocabulary}"])
    assert job.vocabulary == SentencePieceVocabulary(str(vocabulary / "vocabulary.model"))
    # 400 pieces and 100 sentinels are 500 ids, 512 rows.
    assert job.model.vocab_size == 512
    job.check_vocabulary()


def test_rows_follow_a_vocabulary_file_that_a_gin_file_names(vocabulary, in_a_folder):
    shipped = f'include "{TINY}"\ninclude "tasks/text_span_corruption.gin"\nFILES = "."\n'
    mine = pathlib.Path("mine.gin")
    mine.write_text(f'{shipped}VOCABULARY_FILE = "{vocabulary}"\n')
    task = "tasks/text_span_corruption.gin"

    def rows(*files, flags=()):
        return job_from_gin(list(files), flags).model.vocab_size

    # 400 pieces and 100 sentinels are 500 ids, 512 rows; the shipped files' 4096 is a default.
    files = ["FILES='.'"]
    assert (rows("mine.gin"), rows("mine.gin", task, flags=files)) == (512, 512)
    # A flag says otherwise, and so does a file of one's own.
    assert rows("mine.gin", flags=["VOCAB_SIZE=640"]) == 640
    pathlib.Path("more.gin").write_text("VOCAB_SIZE = 768\n")
    assert rows("mine.gin", "more.gin") == 768
    # An operative configuration has both, and is read as it is written.
    building.parse_job(["mine.gin"], ["VOCAB_SIZE=4096"])
    pathlib.Path("operative_config.gin").write_text(building.operative_config("JOB"))
    assert rows("operative_config.gin") == 4096


def test_what_a_vocabulary_file_may_be(vocabulary, source):
    model = vocabulary / "vocabulary.model"
    assert read_or_trained(str(model)) == read_or_trained(str(vocabulary))
    assert read_or_trained(source) == SavedVocabulary(source)
    assert read_or_trained(None, ByteVocabulary()) == ByteVocabulary()
    with pytest.raises(ValueError, match="this task trains no vocabulary; give"):
        read_or_trained(None)
    flags = [f"VOCABULARY_FILE={vocabulary}/vocabulary.model", "VOCAB_SIZE=400"]
    with pytest.raises(ValueError, match="has 500 ids, but the model's vocab_size is 400"):
        job_from_gin(TINY, flags).check_vocabulary()


# model.gin.


def test_the_model_of_a_class_of_ones_own_is_written(in_a_folder):
    model = OwnConfig("decoder_only", 384, 8, 16, 2, 4, 1, width=5)
    pathlib.Path("model.gin").write_text(model_gin(model))
    building.parse_files(["model.gin"], [])
    assert building.build("MODEL", ModelConfig) == model
    read = model_from_description(json.loads(json.dumps(describe(model))), "here")
    assert read == model and hash(read) == hash(model)
