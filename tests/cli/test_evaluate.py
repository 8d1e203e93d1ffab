# SPDX-License-Identifier: Apache-2.0
"""`switchx eval`: by the folder alone, with other settings, and by what the model writes."""

import collections
import dataclasses
import json
import re
import shlex
import shutil

import numpy as np
import pytest
import sacrebleu

import switchx
from switchx.checkpoint.checkpointer import Checkpointer
from switchx.checkpoint.restore import complete_steps
from switchx.checkpoint.run_folder import RunFolder
from switchx.cli import evaluate
from switchx.cli.main import main
from switchx.data.text_metrics import METRICS
from switchx.generated_evaluation import metrics_of
from switchx.gin_config import building
from switchx.model_evaluation import _evaluation, _mesh_of_texts
from switchx.partitioning.mesh import MeshSpec
from switchx.routing_record import open_record
from switchx.training.job import TrainingJob
from switchx.training.programs import compiled_program
from switchx.training.resume import write_run_config
from tests.compilation import T5, on_devices
from tests.data.downstream.published_files import PUBLISHED
from tests.data.refusals import refused
from tests.integration.runs import lines
from tests.processes import ROOT
from tests.training.jobs import TASK

pytestmark = pytest.mark.usefixtures("programs_compiled_once", "one_device")


def evaluated(cli, *options) -> dict:
    return cli.json("eval", "--json", *options)


def test_a_checkpoint_is_chosen_and_nothing_is_written(
    finished_run, cli, monkeypatch, tmp_path
):
    folder = finished_run.folder
    monkeypatch.chdir(tmp_path)
    before = sorted(path for path in folder.rglob("*"))
    newest = evaluated(cli, f"--model_dir={folder}")
    assert newest == lines(folder / "validation.jsonl")[-1]
    assert evaluated(cli, f"--model_dir={folder}", "--step=best") == newest
    earlier = evaluated(cli, f"--model_dir={folder}", "--step=4")
    assert earlier["step"] == 4
    assert earlier["neg_log_perplexity"] < newest["neg_log_perplexity"]
    assert sorted(path for path in folder.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_record_drops_what_evaluation_drops(finished_run, cli, tmp_path):
    folder = f"--model_dir={finished_run.folder}"
    path, factor = tmp_path / "record.parquet", "--gin.SwitchConfig.eval_capacity_factor=0.5"
    found = evaluated(cli, folder, f"--record={path}", factor)
    record = open_record(path)
    assert record.info.source == "eval" and record.info.switch.eval_capacity_factor == 0.5
    load, dropped = collections.Counter(), collections.Counter()
    for batch in record.batches():
        for layer, expert_BLS, is_dropped_BLS in zip(
            batch.layers, batch.expert_NBLS, batch.is_dropped_NBLS, strict=True
        ):
            load[layer] += int((expert_BLS < record.info.switch.num_experts).sum())
            dropped[layer] += int(is_dropped_BLS.sum())
    shares = [dropped[layer] / load[layer] for layer in record.info.all_layers]
    np.testing.assert_allclose(shares, found["routing"]["dropped"], rtol=1e-6)
    assert sum(dropped.values()) / sum(load.values()) == pytest.approx(
        found["dropped_fraction"]
    )
    evaluated(cli, folder, f"--record={path}", "--record_places=1")
    assert not open_record(path).info.is_whole


@pytest.mark.slow  # tests/training/test_replay.py replays by default
def test_a_record_is_replayed(finished_run, capsys, cli, tmp_path):
    """Its own record changes nothing; another checkpoint's choices do."""
    path, folder = tmp_path / "record.parquet", f"--model_dir={finished_run.folder}"
    plain = evaluated(cli, folder, f"--record={path}")
    again = evaluated(cli, folder, f"--replay={path}", f"--record={tmp_path / 'again'}")
    assert again == plain
    before, after = (list(open_record(p).batches()) for p in (path, tmp_path / "again"))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.expert_NBLS, other.expert_NBLS)
        np.testing.assert_array_equal(one.is_dropped_NBLS, other.is_dropped_NBLS)
    earlier = evaluated(cli, folder, f"--replay={path}", "--step=4")
    own = evaluated(cli, folder, "--step=4")
    assert earlier["routing"]["load"] == plain["routing"]["load"] != own["routing"]["load"]
    assert earlier["cross_entropy"] != own["cross_entropy"]
    assert main(["eval", folder, f"--replay={path}", "--gin.BATCH_SIZE=4"]) == 2
    assert "has other tokens in batch 0" in capsys.readouterr().err
    assert main(["eval", folder, f"--replay={path}", "--gin.TrainingJob.eval_batches=1"]) == 2
    assert "has more batches than the 1 of this evaluation" in capsys.readouterr().err


def test_all_checkpoints_are_one_table_that_goes_on(finished_run, capsys, cli, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run.folder, folder)
    given = f"--model_dir={folder}"
    steps = complete_steps(RunFolder(folder))
    assert len(steps) > 1 and all(step % 4 == 0 for step in steps)
    table = folder / "evaluations.jsonl"
    some = evaluated(cli, given, "--step=every:12")
    assert [line["step"] for line in some] == [12] and lines(table) == some
    assert switchx.evaluate_checkpoints(folder, every=12) == some  # of the same settings
    one = evaluated(cli, given, f"--step={steps[0]}")
    kept = some[0] | {"accuracy": 0.125}  # what is there is not measured again
    table.write_text(json.dumps(kept) + "\n")
    found = evaluated(cli, given, "--step=all")
    assert [line["step"] for line in found] == steps and found[-1] == kept
    assert {name: found[0][name] for name in one} == one and lines(table) == found
    other = kept | {"of": "of another checkpoint of this step, or of other texts"}
    table.write_text(json.dumps(other) + "\n")
    assert evaluated(cli, given, "--step=every:12") == some
    table.write_text("".join(json.dumps(line) + "\n" for line in found))
    assert main(["report", given]) == 0
    text = (folder / "report.html").read_text()
    assert "largest MaxVio" in text and "0.125" in text
    capsys.readouterr()
    printed = cli("eval", given, "--step=all").out.splitlines()
    assert printed[0].split() == ["step", "neg_log_perplexity", "accuracy", "dropped_fraction"]
    assert [row.split()[0] for row in printed[1:]] == [str(step) for step in steps]


def test_a_table_of_other_settings_is_not_gone_on_with(finished_run, capsys, cli, tmp_path):
    given, output = f"--model_dir={finished_run.folder}", f"--output={tmp_path / 'table'}"
    other = "--gin.TrainingJob.eval_batches=1"
    assert len(evaluated(cli, given, output, "--step=every:12", other)) == 1
    assert main(["eval", given, output, "--step=all"]) == 2
    assert "evaluated with other settings; give another output" in capsys.readouterr().err
    with _evaluation(finished_run.folder, None, None) as run:  # other metrics are, too
        wanted = ({"a_task": (each(),)} for each in METRICS.values())
        prints = {dataclasses.replace(run, wanted=each).fingerprint for each in wanted}
        assert len(prints) == len(METRICS) > 1
    said = cli.refused("eval", given, output, "--step=every:7")
    assert "no complete checkpoint of a multiple of 7 steps" in said and "there are " in said


@pytest.mark.parametrize("name", ["predictions", "record", "replay"])
def test_files_of_one_checkpoint_are_not_ignored_for_several(finished_run, capsys, name):
    given = f"--model_dir={finished_run.folder}"
    assert main(["eval", given, "--step=all", f"--{name}=file"]) == 2
    assert f"--{name} is for one checkpoint; give its --step" in capsys.readouterr().err


@pytest.fixture
def cola(tiny_run, in_a_folder, cli):
    """A run that was fine-tuned on CoLA, and what its training printed."""
    shutil.copytree(tiny_run, in_a_folder / "runs/pretrain_tiny")
    data = in_a_folder / "data/CoLA"
    data.mkdir(parents=True)
    for name, content in PUBLISHED["glue_cola"].files.items():
        (data / name).write_text(content)
    options = [
        "INIT_FROM=runs/pretrain_tiny", "MANUAL_DIR=data", "DATA_DIR=prepared",
        "TextEvaluation.max_new_tokens=4", "EVAL_TIME_SHARE=None",
        "BEST_METRIC=glue_cola/matthews_corrcoef",
    ]  # fmt: skip
    files = [
        f"--gin_file=configs/{each}.gin" for each in ("runs/finetune_task", "tasks/glue_cola")
    ]
    given = [*files, *(f"--gin.{each}" for each in options), *T5]
    return in_a_folder / "cola", cli("train", *given, "--model_dir=cola")


@pytest.mark.slow  # a run; on a mesh: tests/test_generated_evaluation.py
def test_scores_in_training_are_those_of_its_checkpoint(cola, cli):
    folder, printed = cola
    in_training = lines(folder / "validation.jsonl")[-1]["texts"]["glue_cola"]
    file = folder.parent / "predictions.jsonl"
    options = ["--step=best", "--max_new_tokens=4", f"--predictions={file}"]
    got = evaluated(cli, "--model_dir=cola", *options)
    (metric,) = got["texts"]["tasks"]["glue_cola"].pop("metrics")
    score = in_training.pop("matthews_corrcoef")
    assert (metric["name"], metric["score"]) == ("matthews_corrcoef", score)
    about = got["texts"]["tasks"]["glue_cola"]
    assert in_training == {
        "examples": about["examples"],
        "examples_left_out": 0,
        "outputs_unfinished": about["outputs_unfinished"],
    }
    assert file.read_text() == (folder / "predictions/step_000002.jsonl").read_text()
    shown = f"matthews_corrcoef {score:.2f}  ({about['examples']} examples)"
    assert f"step     2  glue_cola: {shown}" in printed.err
    assert f"glue_cola: matthews_corrcoef  {score:.2f} (step 2, " in printed.out


@pytest.mark.slow
def test_a_task_without_metrics_is_answered_for_its_file(cola, cli):
    folder, _ = cola
    content = PUBLISHED["glue_ax"].files["diagnostic.tsv"]
    (folder.parent / "data/diagnostic.tsv").write_text(content)
    file = folder.parent / "ax.jsonl"
    files = [
        f"--gin_file={each}" for each in (f"{folder}/operative_config.gin", "tasks/glue_ax.gin")
    ]
    options = ["--gin.MANUAL_DIR=data", "--max_new_tokens=4", f"--predictions={file}"]
    got = evaluated(cli, *files, "--model_dir=cola", *options)
    assert got["texts"]["tasks"]["glue_ax"]["metrics"] == []
    (line,) = lines(file)
    assert line["inputs"] == PUBLISHED["glue_ax"].inputs and line["id"] == "0"


def test_other_data_capacity_and_meshes_may_be_evaluated(finished_run, cli):
    folder = finished_run.folder
    metrics = lines(folder / "validation.jsonl")[-1]
    options = ["BATCH_SIZE=4", "TrainingJob.eval_batches=1", "SEED=4"]
    options.append("SwitchConfig.eval_capacity_factor=8.0")
    got = evaluated(cli, f"--model_dir={folder}", *(f"--gin.{each}" for each in options))
    assert 0 < got["target_tokens"] < metrics["target_tokens"]
    assert got["dropped_fraction"] == 0.0 < metrics["dropped_fraction"]
    # Another mesh changes no number.
    folder = finished_run.folder
    files = [f"--gin_file={folder}/operative_config.gin", "--gin_file=meshes/data_expert.gin"]
    with on_devices(8):
        got = evaluated(cli, *files, f"--model_dir={folder}")
    want = lines(folder / "validation.jsonl")[-1]["neg_log_perplexity"]
    assert got["neg_log_perplexity"] == pytest.approx(want, rel=1e-5)


def test_table_of_likelihood_for_a_person(finished_run, capsys):
    metrics = lines(finished_run.folder / "validation.jsonl")[-1]
    assert main(["eval", f"--model_dir={finished_run.folder}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["step", "12"]
    assert ["neg_log_perplexity", f"{metrics['neg_log_perplexity']:.4f}"] in rows
    assert ["target_tokens", f"{metrics['target_tokens']:,.0f}"] in rows
    assert rows[-2][:2] == ["encoder", "0"] and len(rows[-2]) == 10


def test_table_of_several_tasks(capsys):
    from switchx.cli.evaluate import print_tables

    tasks = {"a": {"neg_log_perplexity": -1.0, "accuracy": 0.5, "routing": {}}}
    tasks["b"] = tasks["a"] | {"dropped_fraction": 0.25}
    print_tables(None, {"step": 1234, "neg_log_perplexity": -1.0, "tasks": tasks})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["step", "1,234"],
        ["neg_log_perplexity", "-1.0000"],
        ["a:", "neg_log_perplexity", "-1.0000"],
        ["a:", "accuracy", "0.5000"],
        ["b:", "neg_log_perplexity", "-1.0000"],
        ["b:", "accuracy", "0.5000"],
        ["b:", "dropped_fraction", "0.2500"],
    ]


PAGE = (ROOT / "docs/text_metrics.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)

GIN = """
from __gin__ import dynamic_registration
from switchx.data import mixtures
from switchx.data import tokenizers
from switchx.models import config

include "runs/defaults.gin"
include "models/switch_tiny.gin"
include "optimizers/adafactor.gin"

MODEL = @config.ModelConfig()
config.ModelConfig.vocab_size = 384
config.ModelConfig.d_model = 8
config.ModelConfig.d_ff = 8
config.ModelConfig.num_heads = 1
config.ModelConfig.num_encoder_layers = 1
config.ModelConfig.num_decoder_layers = 1
config.ModelConfig.init_scale = 4.0
config.SwitchConfig.num_experts = 2
config.SwitchConfig.every = 1

SOURCE = @mixtures.multi30k_directions()
mixtures.multi30k_directions.vocabulary = @tokenizers.ByteVocabulary()
mixtures.multi30k_directions.languages = ("en", "de")

TRAIN_STEPS = 1
BATCH_SIZE = 8
INPUTS_LENGTH = 64
TARGETS_LENGTH = 64
LEARNING_RATE = 1.0
WARMUP_STEPS = 1
"""
LINES = {
    "en": ["Two men at a stove.", "A girl.", "Dogs run fast."],
    "de": ["Zwei Männer am Herd.", "Ein Mädchen.", "Hunde rennen schnell."],
}
TEST = "test_2016_flickr"
BRIEF = ["--max_new_tokens=4", f"--split={TEST}"]


def texts(language: str, number: int) -> list[str]:
    """Of a split; 5 to 8 are decoded by one program."""
    return (LINES[language] * 3)[:number]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of an untrained model of both directions."""
    base = tmp_path_factory.mktemp("translation")
    splits = ("train", "val", TEST, "test_2017_flickr")
    for number, split in enumerate(splits):
        for language in LINES:
            file = base / "data" / "multi30k" / f"{split}.{language}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(texts(language, 5 + number)) + "\n", encoding="utf-8")
    (base / "run.gin").write_text(GIN)
    folder = RunFolder(base / "run").create()
    building.parse_files([str(base / "run.gin")], [f"DATA_DIR={base / 'data'}"])
    job = building.build("JOB", TrainingJob)
    folder.operative_config.write_text(building.operative_config("JOB"))
    write_run_config(folder, job)
    with on_devices(1):
        program = compiled_program(job)
    with program.scope(), Checkpointer(folder, job.retention) as checkpointer:
        checkpointer.save(3, program.init_state(), metrics={"neg_log_perplexity": -1.0})
    return folder.root


def test_metrics_of_each_direction_are_sacrebleus_of_what_the_api_writes(run, cli, tmp_path):
    file = tmp_path / "predictions.jsonl"
    options = [*BRIEF, "--beam_size=2", "--bootstrap=9", f"--predictions={file}"]
    got = evaluated(cli, f"--model_dir={run}", *options)
    assert got["step"] == 3
    assert got["tasks"].keys() == {"multi30k_en_de", "multi30k_de_en"}  # likelihood, as ever
    written = got["texts"]
    assert written["decoding"] == {"beam_size": 2, "max_new_tokens": 4, "length_penalty": 1.0}
    answers = lines(file)
    model, means = switchx.load(run), []
    for name, prefix, languages in (
        ("multi30k_en_de", "German: ", ("en", "de")),
        ("multi30k_de_en", "English: ", ("de", "en")),
    ):
        mine = [each for each in answers if each["task"] == name]
        # Of the test split, which has seven lines, in the corpus' order: pairs, as they were.
        pairs = [(each["inputs"], each["target"]) for each in mine]
        both = [texts(language, 7) for language in languages]
        assert sorted(pairs) == sorted(zip(*both, strict=True))
        said = model.generate([prefix + i for i, _ in pairs], beam_size=2, max_length=4)
        assert [each["prediction"] for each in mine] == said
        bleu = sacrebleu.metrics.BLEU()
        want = bleu.corpus_score(said, [[t for _, t in pairs]], n_bootstrap=9)
        first, second = written["tasks"][name].pop("metrics")
        assert first == {
            "name": "bleu", "score": want.score, "signature": str(bleu.get_signature()),
            "interval": [want._mean - want._ci, want._mean + want._ci], "note": None,
        }  # fmt: skip
        assert second["name"] == "chrf"
        means.append((first["score"], second["score"]))
        assert written["tasks"][name] == {
            "split": TEST, "examples": 7, "inputs_cut": 0, "outputs_unfinished": 7,
        }  # fmt: skip
    for each, pair in zip(written["mean"], zip(*means, strict=True), strict=True):
        assert each["score"] == pytest.approx(sum(pair) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data_expert", "data"])
def test_texts_and_metrics_are_the_same_on_a_mesh(run, cli, tmp_path, mesh, monkeypatch):
    def evaluate_into(file, *options):
        options = [f"--model_dir={run}", *BRIEF, f"--predictions={file}", *options]
        return evaluated(cli, *options)["texts"], lines(file)

    want = evaluate_into(tmp_path / "one.jsonl")
    meshes, load = [], switchx.api.load
    monkeypatch.setattr(
        "switchx.api.load", lambda *a, **k: meshes.append(k["mesh"]) or load(*a, **k)
    )
    options = [f"--gin_file={run}/operative_config.gin", f"--gin_file=meshes/{mesh}.gin"]
    if mesh == "data_expert":
        options.append("--gin.EXPERT_PARTS=2")
    with on_devices(8):
        got = evaluate_into(tmp_path / "mesh.jsonl", *options)
    assert got == want and len({each["prediction"] for each in want[1]}) > 1
    (spec,) = meshes
    assert spec.num_devices(8) == 8 and (spec.expert > 1) == (mesh == "data_expert")


def test_the_mesh_of_texts_has_no_stages():
    """Their devices take rows; `data` that is left open takes them anyway."""
    with on_devices(8):
        assert _mesh_of_texts(MeshSpec(data=2, model=2, pipe=2)) == MeshSpec(data=4, model=2)
        assert _mesh_of_texts(MeshSpec(pipe=4)) == MeshSpec()
        assert _mesh_of_texts(MeshSpec(data=1)) is None
    with on_devices(1):
        assert _mesh_of_texts(MeshSpec()) is None


def test_metrics_may_be_named_or_left_out(run, cli):
    options = [f"--model_dir={run}", *BRIEF, "--max_examples=5", "--beam_size=2"]
    got = evaluated(cli, *options, "--metrics=accuracy,rouge,squad")
    names = [each["name"] for each in got["texts"]["mean"]]
    assert names == ["accuracy", "rouge1", "rouge2", "rougeLsum", "exact_match", "f1"]
    assert got["texts"]["tasks"]["multi30k_de_en"]["examples"] == 5
    without = evaluated(cli, *options, "--metrics=none")
    assert "texts" not in without and without["tasks"] == got["tasks"]


def test_table_of_metrics_for_a_person():
    result = {"name": "bleu", "score": 31.234, "signature": "nrefs:1", "interval": (30.0, 32.5)}
    result["note"] = None
    task = {"examples": 9, "inputs_cut": 2, "outputs_unfinished": 1000, "metrics": [result]}
    texts = {"tasks": {"a": task, "b": task}, "mean": [result | {"interval": None}]}
    assert evaluate.rows_of_texts(texts) == [
        ("a: bleu", "31.23", "30.00 to 32.50"),
        ("b: bleu", "31.23", "30.00 to 32.50"),
        ("mean: bleu", "31.23", ""),
        ("a: inputs cut to a row of training", "2", ""),
        ("a: outputs cut off", "1,000", ""),
        ("b: inputs cut to a row of training", "2", ""),
        ("b: outputs cut off", "1,000", ""),
    ]
    assert evaluate.signatures(texts) == ["bleu  nrefs:1"]
    missing = {"name": "own", "score": None, "signature": "", "interval": None, "note": "why"}
    texts = {"tasks": {"a": task | {"metrics": [missing]}}, "mean": []}
    assert evaluate.rows_of_texts(texts)[0] == ("a: own", "none", "why")
    assert evaluate.signatures(texts) == []


def test_names_of_metrics_are_all_of_them_and_on_the_page():
    assert evaluate._metric_names(",".join(METRICS)) == list(METRICS)
    assert evaluate._metric_names("none") == []
    rows = PAGE.partition("| `--metrics` | in gin |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = "|".join(cell for row in rows for cell in row.split("|")[1:3])
    found = re.findall(r"`(\w+)`", cells), re.findall(r"`(\w+)\(", cells)
    assert dict(zip(*found, strict=True)) == {
        name: metric.__name__ for name, metric in METRICS.items()
    }


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--metrics=bleu,blue", "there is no metric 'blue'; use some of bleu,chrf,rouge,squad"),
        ("--split=tset", "has no split 'tset'; use one of train, validation, test_2016_flickr"),
        (
            "--tasks=multi30k_de_en,multi30k_de_fr",
            "tasks names 'multi30k_de_fr'; there are metrics for multi30k_en_de, multi30k_de",
        ),
        ("--max_examples=0", "'0' is no whole number of at least 1"),
        ("--bootstrap=1", "bootstrap=1 is no sample to tell an interval by; use 1000"),
        ("--rank_choices", "example 0 of 'validation' has no choices of which one is known"),
        ("--predictions=", "--predictions: it is empty; is a shell variable not set?"),
        ("--step=every:0", "'every:0' is no step; give its number, best, all, or every:N"),
        ("--output=table", "--output is for --step=all or every:N; add that, or leave it out"),
        ("--predictions=no/such/file", "cannot be written: its folder is not there"),
    ],
)
def test_wrong_options(run, capsys, option, said):
    assert main(["eval", f"--model_dir={run}", "--metrics=bleu", option]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_choices_and_files_need_a_task_of_texts(finished_run, capsys, tmp_path):
    assert main(["eval", f"--model_dir={finished_run.folder}", "--rank_choices"]) == 2
    assert "no task has metrics of texts" in " ".join(capsys.readouterr().err.split())
    file = tmp_path / "answers"
    assert main(["eval", f"--model_dir={finished_run.folder}", f"--predictions={file}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"predictions={str(file)!r}: no text is written" in said and not file.exists()


def test_metrics_need_texts_for_targets():
    assert metrics_of(TASK, None) == {}
    assert metrics_of(TASK, None, has_file=True) == {}  # it has no texts
    assert metrics_of(TASK, []) == {}
    with refused(
        "metrics=bleu compares generated texts with targets, and no task "
        "(letters) is of InputsToTargets"
    ):
        metrics_of(TASK, ["bleu"])


@pytest.mark.slow  # test_docs.py parses them by default
def test_commands_of_the_page_run(run, capsys, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    shutil.copytree(run, tmp_path / "runs/translation")
    commands = [line for block in BLOCK.findall(PAGE) for line in block.splitlines()]
    assert any("quantize" in command for command in commands)
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "switchx"
        if words[0] == "eval":
            words += ["--max_new_tokens=4"]
        said = cli(*words).out
        assert words[0] == "quantize" or "bleu" in said
    assert (tmp_path / "predictions.jsonl").is_file()

    # A quantized model is evaluated by its texts alone, on the tasks of gin files.
    options = ["--model_dir=runs/translation_int4", *BRIEF, "--tasks=multi30k_de_en"]
    gin = "--gin_file=runs/translation/operative_config.gin"
    got = evaluated(cli, gin, *options)
    assert got.keys() == {"step", "texts"} and got["step"] == 3
    assert list(got["texts"]["tasks"]) == ["multi30k_de_en"] and got["texts"]["mean"] == []
    assert "is quantized, and does not know its tasks" in cli.refused("eval", *options)
    assert main(["eval", gin, *options[:-1], "--metrics=none"]) == 2
    assert "is quantized: it is evaluated by the texts" in capsys.readouterr().err
