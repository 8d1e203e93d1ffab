# SPDX-License-Identifier: Apache-2.0
"""The README and docs/capabilities.md are true: commands run, links lead somewhere.

A command is a line of a ```bash block, or an inline code span that starts like one. Each
has to be in `CHAIN`, `VARIANTS` or `TESTED_ELSEWHERE`, or be a make target: a new one without
a row fails. Commands are told apart by their text, so the pages are the only place that says
them. By default variants of training are begun, up to what would be compiled; `slow` runs them.
"""

import ast
import configparser
import re
import shlex
import shutil

import pytest

from switchx.axes import DIMENSIONS
from switchx.cli.main import main
from switchx.training.program import TrainingProgram
from tests.commands import commands, python_blocks
from tests.compilation import GPT, T5, T5_OF_2, TINY_RUN, on_devices
from tests.data.downstream.published_files import PUBLISHED
from tests.processes import ROOT, dry_run

PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "docs/capabilities.md")
}
README = PAGES[ROOT / "README.md"]

# Command -> what is added, so that it takes seconds. They run in this order in one folder, in
# which `tiny_run` is what `make train` left: later ones read what earlier ones wrote.
EIGHT = "XLA_FLAGS=--xla_force_host_platform_device_count=8 switchx"
TINY = "train --gin_file=configs/runs/pretrain_tiny.gin"
TUNE = "train --gin_file=configs/runs/finetune.gin --gin.INIT_FROM=runs/pretrain_tiny"
EVAL = "eval --gin_file=configs/runs/pretrain_tiny.gin --model_dir=runs/pretrain_tiny"
OWN = "switchx train --gin_file=own.gin --model_dir=runs/own"
CHAIN = {
    "switchx --help": (),
    f"switchx {EVAL} --step=best --json": T5,
    f"switchx {TINY} --gin.TRAIN_STEPS=800 --model_dir=runs/pretrain_tiny": (
        *T5, "--gin.TRAIN_STEPS=3",
    ),
    f"switchx {TUNE} --model_dir=runs/finetuned": T5,
    "switchx report --model_dir=runs/pretrain_tiny": (),
    "switchx tasks glue_cola --manual_dir=data": (),
    "switchx configs runs/pretrain_tiny.gin --copy=mine.gin": (),
    "switchx checkpoint inspect runs/pretrain_tiny": (),
    "switchx checkpoint verify runs/pretrain_tiny": (),
    "switchx show schedule --stages=4 --microbatches=8": (),
    "switchx plan --gin_file=configs/runs/pretrain_switch_base.gin --hardware=v5p "
    "--devices=64": ("--devices=8", "--gin.BATCH_SIZE=64"),
    "switchx plan --gin_file=configs/runs/pretrain_switch_large.gin --hardware=v5e "
    "--devices=16 --storage=auto": ("--top=1", "--gin.BATCH_SIZE=64"),
    "switchx generate --model_dir=runs/pretrain_tiny --input=questions.txt "
    "--output=answers.txt --beam_size=4": ("--max_new_tokens=4",),
    "switchx score --model_dir=runs/pretrain_tiny --input=pairs.tsv": (),
    "switchx quantize --model_dir=runs/pretrain_tiny --output=runs/tiny_int4 --bits=4 "
    "--rest=bfloat16": (),
    "switchx export --model_dir=runs/pretrain_tiny --output=exports/tiny --platform=cpu,tpu "
    "--beam_size=4": ("--beam_size=1",),
    "switchx vocab --input=my_text --size=8000 --output=vocabularies/mine": ("--size=500",),
    f"{EIGHT} generate --model_dir=runs/pretrain_tiny --input=questions.txt "
    "--mesh=expert=4,model=2": ("--max_new_tokens=2",),
}  # fmt: skip
# Others read nothing of theirs; by default the tests of export and of meshes run such.
LATER = ("switchx export ", f"{EIGHT} generate ")
VARIANTS = {
    f"switchx {TINY} --gin.NUM_EXPERTS=32 --model_dir=runs/experts_32": T5,
    "switchx train --gin_file=configs/runs/pretrain_gpt_tiny.gin --model_dir=runs/gpt_tiny": (
        *GPT, "--gin.WARMUP_STEPS=1",
    ),
    "switchx train --gin_file=configs/runs/pretrain_modern_tiny.gin "
    "--model_dir=runs/modern_tiny": (*GPT, "--gin.WARMUP_STEPS=1"),
    f"switchx {TINY} --gin_file=configs/tasks/text_span_corruption.gin --gin.FILES=my_text "
    "--model_dir=runs/my_text": T5,
    f"switchx {TINY} --gin_file=configs/models/elephants_tiny.gin "
    "--model_dir=runs/elephants": T5,
    f"switchx {TINY} --gin_file=configs/models/gshard_tiny.gin --model_dir=runs/gshard": T5,
    f"switchx {TINY} --gin_file=configs/storage/disk.gin --model_dir=runs/disk": T5,
    f"switchx {TINY} --gin.GRACE_S=30 --gin.LOCAL_DIR=copies --model_dir=runs/preempted": T5,
    f"switchx {TINY} --gin_file=configs/storage/host.gin --model_dir=runs/host": T5_OF_2,
    f"switchx {TINY} --gin.SwitchConfig.dispatcher=\"'dropless'\" "
    "--model_dir=runs/dropless": T5,
    f"{EIGHT} {TINY} --gin_file=configs/meshes/data_expert.gin --model_dir=runs/mesh": T5,
    f"{EIGHT} {TINY} --gin_file=configs/meshes/pipeline_moe_stages.gin "
    "--gin.SwitchConfig.group_size=64 --model_dir=runs/stages": T5_OF_2,
    f"{EIGHT} {TINY} --gin_file=configs/meshes/zero1.gin "
    "--gin.SwitchConfig.group_size=64 --model_dir=runs/zero1": T5,
    f"{EIGHT} {TINY} --gin_file=configs/meshes/fsdp_fused.gin "
    "--gin.SwitchConfig.group_size=64 --model_dir=runs/fused": T5,
    f"{EIGHT} {TINY} --gin_file=configs/meshes/data_expert.gin "
    "--gin.SwitchConfig.group_size=64 --gin.SwitchConfig.num_replicas=8 "
    "--model_dir=runs/copies": T5,
    f"switchx {TINY} --gin_file=configs/tasks/stdlib_by_task.gin --model_dir=runs/tasks": T5,
    "switchx train --gin_file=configs/runs/finetune_task.gin "
    "--gin_file=configs/tasks/glue_cola.gin --gin.INIT_FROM=runs/pretrain_tiny "
    "--gin.MANUAL_DIR=data --model_dir=runs/cola": T5,
    f"switchx {TUNE} --model_dir=runs/lora".replace("finetune.gin", "finetune_lora.gin"): (
        *T5, "--gin.WARMUP_STEPS=1",
    ),
    f"switchx {TUNE} --gin.INIT_STEP=best "
    "--gin.INIT_RULES=\"[('.*/w_router_DE', None)]\" "
    "--model_dir=runs/fresh_routers": T5,
    f"switchx {TUNE} --gin.StepConfig.rate_multipliers=\"[('.*/experts/.*', 0.0)]\" "
    "--gin.StepConfig.ema_decay=0.99 --model_dir=runs/non_experts": T5,
    f"{EIGHT} {TINY} --gin.SwitchConfig.group_size=64 --mesh=auto --hardware=v5e "
    "--model_dir=runs/elastic": T5,
    f"switchx {TINY} --profile=10:13 --model_dir=runs/profiled": (
        *T5, "--gin.TRAIN_STEPS=13",
    ),
}  # fmt: skip

# Command -> the test that runs it.
MEASURING = "tests/cli/test_measuring.py"
TESTED_ELSEWHERE = {
    "switchx reshape --merge_adapter --model_dir=runs/lora --output=runs/lora_merged": (
        "tests/training/test_adapters.py::test_the_commands_read_a_run_of_adapters_and_merge_it"
    ),
    "switchx convert --to=peft runs/lora runs/lora_peft": (
        "tests/interop/test_peft.py::test_peft_computes_what_a_run_of_adapters_does"
    ),
    "switchx report runs/pretrain_tiny runs/experts_32": (
        "tests/analysis/test_comparison.py::test_the_page_runs"
    ),
    "switchx sweep --gin_file=configs/runs/pretrain_tiny.gin "
    "--gin.LEARNING_RATE=0.3,1,3 --seeds=2 --output=sweeps/rate": (
        "tests/cli/test_sweep.py::test_cells_are_trained_once_and_go_on"
    ),
    "switchx atlas runs/pretrain_tiny --input code.txt prose.txt --output=atlas": (
        "tests/cli/test_atlas.py::test_a_run_beside_its_int4"
    ),
    "switchx atlas models/switch-base-8 --input code.txt prose.txt --output=atlas": (
        "tests/cli/test_atlas.py::test_a_converted_switch_folder"
    ),
    "switchx atlas tiny --output=atlas": ("tests/test_shipped.py::test_an_atlas_of_what_ships"),
    "switchx check accelerator --output=measured": (
        "tests/cli/test_check_accelerator.py::test_checks_are_of_the_cards_own_rates"
    ),
    "switchx check accelerator --rehearsal --output=runs/rehearsal": (
        "tests/cli/test_check_accelerator.py::test_a_whole_rehearsal"
    ),
    "switchx checkpoint rewind runs/pretrain_tiny --step=best": (
        "tests/cli/test_checkpoint.py::test_rewind_makes_an_earlier_one_the_newest_and_deletes_"
        "nothing"
    ),
    "switchx checkpoint verify s3://bucket/run": (
        "tests/checkpoint/test_object_store.py::test_training_in_a_store_resumes_and_is_read_as_"
        "in_a_folder"
    ),
    "switchx checkpoint average runs/non_experts runs/averaged --moving": (
        "tests/optim/test_multipliers.py::test_a_run_saves_evaluates_and_exports_its_average"
    ),
    "switchx deploy --model_dir=runs/pretrain_tiny --output=deployed --experts=4 --bits=4 "
    "--platform=tpu": "tests/deploy/test_deploy.py::test_commands_of_the_page_run",
    "switchx train --gin_file=configs/runs/distill.gin --gin.TEACHER=runs/pretrain_tiny "
    "--model_dir=runs/student": "tests/cli/test_reshape.py::test_all_commands_of_the_page_run",
    "switchx teach --gin_file=configs/runs/distill.gin --gin.TEACHER=runs/pretrain_tiny "
    "--output=answers --top=16": (
        "tests/cli/test_reshape.py::test_all_commands_of_the_page_run"
    ),
    "switchx reshape --model_dir=runs/pretrain_tiny --output=runs/fewer --experts=4": (
        "tests/cli/test_reshape.py::test_reshaping_of_the_page_keeps_what_it_says"
    ),
    "switchx simulate cache --model_dir=runs/pretrain_tiny --output=cache.gin": (
        "tests/storage/test_docs.py::test_commands_run"
    ),
    "switchx bench soak --seconds=3600 --json": "tests/serving/test_soak.py::test_a_minute",
    "switchx bench train --json": MEASURING + "::test_train_prints_one_json_object",
    "switchx bench moe --json": MEASURING + "::test_moe_prints_one_json_object",
    "switchx bench kernels --json": (MEASURING + "::test_kernels_prints_one_json_object"),
    "switchx bench compiled --json": (
        "tests/bench/test_compiled_layer.py::test_the_command_prints_one_json_object"
    ),
    "switchx bench decode --json": (
        "tests/bench/test_decode.py::test_without_pytorch_ours_is_measured_alone"
    ),
    "switchx generate --model_dir=runs/pretrain_tiny --input=questions.txt --expert_slots=2": (
        "tests/cli/test_generate_and_score.py::test_with_slots_for_experts_lines_are_the_same"
    ),
    "switchx generate --model_dir=runs/tiny_int4 --input=questions.txt --expert_slots=2 "
    "--host_bytes=20000000 --expert_prefetch": (
        "tests/cli/test_generate_and_score.py::"
        "test_experts_of_a_quantized_model_are_read_from_its_file"
    ),
    "switchx generate --model_dir=runs/pretrain_tiny --input=questions.txt --ring_slots=2": (
        "tests/cli/test_generate_and_score.py::test_with_a_ring_lines_are_the_same"
    ),
    "switchx generate --model_dir=runs/pretrain_tiny --input=questions.txt --expert_slots=2 "
    "--ring_slots=2 --hardware=h200": (
        "tests/cli/test_generate_and_score.py::test_with_a_ring_lines_are_the_same"
    ),
    "switchx export --model_dir=runs/pretrain_tiny --output=exports/ring --platform=tpu,cpu "
    "--ring_slots=2": "tests/inference/test_run_exported.py::test_the_page_runs",
    "switchx eval --model_dir=runs/translation --split=test_2016_flickr --max_examples=100": (
        "tests/cli/test_evaluate.py::test_commands_of_the_page_run"
    ),
    "switchx eval --model_dir=runs/pretrain_tiny --record=eval.parquet": (
        "tests/cli/test_evaluate.py::test_a_record_drops_what_evaluation_drops"
    ),
    "switchx eval --model_dir=models/olmoe --harness=arc_easy": (
        "tests/test_harness.py::test_numbers_are_those_of_transformers"
    ),
    "switchx drops eval.parquet --group_sizes=256,1024": (
        "tests/cli/test_drops.py::test_what_is_printed_is_what_is_asked"
    ),
    "switchx drift runs/pretrain_tiny runs/tiny_int4 --input=pairs.tsv": (
        "tests/cli/test_drift.py::test_checkpoints_are_compared_by_their_routing_and_loss"
    ),
    "switchx serve --model_dir=runs/pretrain_tiny": (
        "tests/cli/test_serve.py::test_a_process_serves_drains_and_ends_well"
    ),
    "switchx generate --model_dir=runs/pretrain_tiny --input=questions.txt --beam_size=4 "
    "--num_return_sequences=3 --no_repeat_ngram_size=3 --logprobs=2 --json": (
        "tests/cli/test_generate_and_score.py::test_the_n_best_and_log_probabilities"
    ),
    "switchx tune kernels": MEASURING + "::test_rows_are_printed_and_tilings_written",
    "switchx convert --from=huggingface switch-base-8 models/switch-base-8": (
        "tests/interop/test_docs.py::test_every_block_runs"
    ),
    "switchx compile --gin_file=configs/runs/pretrain_switch_c.gin --topology=v4:8x8x16": (
        MEASURING + "::test_the_four_switch_models"
    ),
    "switchx check equivalence --json": MEASURING + "::test_report_and_exit_status",
    OWN: "tests/data/test_own_code.py::test_the_page_runs_as_printed",
    "make experiments EXPERIMENT=planner_vs_papers": (
        "tests/planner/test_papers.py::test_the_command_finds_what_is_published"
    ),
}


ALL = commands(*PAGES.values())


def kind(command: str) -> str:
    """How a command is checked: `runs`, `elsewhere`, `make`, `pip`, or `unknown`."""
    if command in CHAIN | VARIANTS:
        return "runs"
    if command in TESTED_ELSEWHERE:
        return "elsewhere"
    program = command.split()[0]
    return program if program in ("make", "pip") else "unknown"


def switchx_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of a switchx command; for `make train`, of its last one."""
    if command.startswith("make"):
        command = dry_run(*command.split()[1:]).stdout.splitlines()[-1]
        command = command.replace(".venv/bin/", "")
    words = shlex.split(command)
    start = words.index("switchx")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 :]


def devices_of(environment: dict[str, str]) -> int:
    """Simulated devices that a command's own environment asks for."""
    assert environment.keys() <= {"XLA_FLAGS", "SWITCHX_MALLOC"}
    flags = environment.get("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    return int(re.fullmatch(r"--xla_force_host_platform_device_count=(\d+)", flags)[1])


def test_every_command_has_a_check_and_none_is_left_over():
    assert [command for command in ALL if kind(command) == "unknown"] == []
    checked = CHAIN | VARIANTS | TESTED_ELSEWHERE
    assert checked.keys() - set(ALL) == set()


@pytest.fixture
def folder(in_a_folder, tiny_run):
    """Where commands run: what `make train` left; text, questions, pairs, files of a task."""
    shutil.copytree(tiny_run, in_a_folder / "runs/pretrain_tiny")
    (in_a_folder / "my_text").mkdir()
    for page in ROOT.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        (in_a_folder / "my_text" / f"{page.stem}.txt").write_text(text)
    for name, content in PUBLISHED["glue_cola"].files.items():
        path = in_a_folder / "data/glue/CoLA" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (in_a_folder / "questions.txt").write_text("def <extra_id_0>(self):\n")
    (in_a_folder / "pairs.tsv").write_text("def <extra_id_0>(self):\t<extra_id_0> close\n")
    return in_a_folder


def run(command: str, added, capsys) -> str:
    """Runs a command on as many devices as it asks for; what it printed."""
    environment, words = switchx_of(command)
    with on_devices(devices_of(environment)):
        try:
            status = main([*words, *added])
        except SystemExit as end:  # --help
            status = end.code
    said = capsys.readouterr()
    assert status == 0, f"{command}\n{said.err}"
    return said.out


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("left_out", [LATER, pytest.param((), marks=pytest.mark.slow)])
def test_commands_and_snippets_run_in_one_folder(folder, capsys, left_out):
    for command, added in CHAIN.items():
        if command.startswith(left_out):
            continue
        assert run(command, added, capsys) or "--output=answers.txt" in command
    for snippet in python_blocks(README):
        with on_devices(1):
            exec(compile(snippet, "README.md", "exec"), {})
        assert capsys.readouterr().out


class WouldCompile(Exception):
    """Options, gin files and data are what a run needs; a program comes next."""


@pytest.mark.parametrize(("command", "added"), VARIANTS.items())
def test_variants_of_training_begin(folder, capsys, monkeypatch, command, added):
    def stop(program, params):
        raise WouldCompile

    monkeypatch.setattr(TrainingProgram, "init_state", stop)
    with pytest.raises(WouldCompile):
        run(command, added, capsys)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("command", "added"), VARIANTS.items())
def test_variants_of_training_run(folder, capsys, command, added):
    assert "Training finished" in run(command, added, capsys)


@pytest.mark.parametrize("command", [c for c in ALL if c.startswith("make ")])
def test_make_target_exists(command):
    result = dry_run(*command.split()[1:])
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("command", [c for c in ALL if kind(c) == "pip"])
def test_extras_exist(command):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = set(re.findall(r"[\w-]+", re.search(r"\[(.*)\]", command)[1]))
    assert extras <= config["options.extras_require"].keys()


@pytest.mark.parametrize(("command", "test"), TESTED_ELSEWHERE.items())
def test_test_that_runs_a_command_exists(command, test):
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_lead_somewhere(page):
    folders = "configs|docs|switchx|tests|experiments|launch"
    paths = re.findall(rf"(?<![\w/])(?:{folders})/[\w/.]+", PAGES[page])
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_shell_finds_switchx_before_it_is_called():
    """`make train` installs it into a folder of its own, which is on no path."""
    assert README.index("`source .venv/bin/activate`") < README.index("`switchx")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "VENV ?= .venv\n" in makefile


def measured(page: str) -> dict[str, list[list[str]]]:
    """Command -> the numbers of each row of a page's measurements that it made."""
    found: dict[str, list[list[str]]] = {}
    _, _, text = page.partition("\n## Measured\n")
    rows = re.compile(r"^\|[^|]*\| `([^`]+)`[^|]*\|([^|]*)\|$", re.MULTILINE)
    for command, cell in rows.findall(text):
        numbers = re.findall(r"(?<![\w.])-?\d+(?:[.,]\d+)*(?:e-?\d+)?", cell)
        found.setdefault(command, []).append(numbers)
    return found


def test_both_pages_measured_the_same():
    # A row of the README has the first numbers of one row of the other page, or the first one
    # of several.
    ours, theirs = measured(README), measured(PAGES[ROOT / "docs/capabilities.md"])
    assert sum(map(len, ours.values())) == 8
    for command, rows in ours.items():
        for row in rows:
            firsts = iter([other[0] for other in theirs[command]])
            is_of_one = any(other[: len(row)] == row for other in theirs[command])
            assert is_of_one or all(number in firsts for number in row), (command, row)
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    cells = re.findall(r"\| ([A-Z]) \| (\w+) (?=\|)", page.partition("## The dimension key")[2])
    assert dict(cells) == DIMENSIONS
    assert len(cells) == len(DIMENSIONS)


# That the reading of a page is able to fail.


def test_commands_of_a_page_are_found():
    page = (
        "Run `switchx train --x=1`, not `switchx` or `train`.\n"
        "```bash\nswitchx new  --flag # why\n\n$ A=b switchx \\\n  eval --y\n```\n"
        "| `make test-all` | `configs/runs` |\n```python\nimport switchx\n```\n"
    )
    assert commands(page) == [
        "switchx new --flag",
        "A=b switchx eval --y",
        "switchx train --x=1",
        "make test-all",
    ]
    assert kind("switchx new --flag") == "unknown"
    assert kind("rm -rf x") == "unknown"
    assert python_blocks(page) == ["import switchx\n"]
    assert switchx_of("A=b switchx eval --y=1") == ({"A": "b"}, ["eval", "--y=1"])
    environment, words = switchx_of("make train")
    assert not environment
    assert words == [*TINY_RUN, "--model_dir=runs/pretrain_tiny"]
