# SPDX-License-Identifier: Apache-2.0
"""XLA's options reach each program that decodes, scores or is exported, and it alone."""

import json

import jax
import pytest

from pallas_kernels.aot import gpu_compiler
from switchx.cli.main import _parser, main
from switchx.cli.serve import model_folders
from switchx.inference.config import DecodingConfig, ExpertSlots
from switchx.inference.generate import Generator
from switchx.inference.model_mesh import ModelMesh
from switchx.inference.offload.ring_or_chosen import outside_of_device
from switchx.inference.run_exported import ExportedModel
from switchx.inference.running_batch import are_compiled
from switchx.inference.score import Scorer
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.partitioning.compiler_options import DECODING_OPTIONS, CompilerOptions
from tests.inference import tiny
from tests.inference.exports import INPUTS, rewrite
from tests.processes import script_with_compiler
from tests.training.saved_runs import save_run

KNOWN, UNKNOWN = "xla_cpu_enable_fast_min_max=True", "xla_cpu_enable_nothing=True"
REFUSAL = "No such compile option: 'xla_cpu_enable_nothing'"
OPTIONS = (tuple(KNOWN.split("=")),)
TWO_LAYERS = ModelConfig(
    "decoder_only", tiny.V, 16, 32, 2, 8, 2, switch=SwitchConfig(4, every=1)
)


@pytest.mark.parametrize(
    "slots", [ExpertSlots(2), ExpertSlots(ring_slots=2)], ids=["slots", "ring"]
)
def test_the_compiler_of_programs_with_experts_elsewhere_is_given_them(slots):
    """By default those of the whole model are compiled by the commands below."""
    config, params, experts = outside_of_device(*tiny.trained(config=TWO_LAYERS), slots, None)
    decoding = DecodingConfig(4, pruning="none")

    def using(option):
        # Not of `ModelMesh.of`, which asks the compiler at once.
        compiler = CompilerOptions(cpu=(option,))
        return {"devices": ModelMesh(compiler=compiler), "experts": experts}

    changed, refusing = (
        Generator(tiny.for_decoding(config), params, decoding, 4, **using(option))
        for option in (KNOWN, UNKNOWN)
    )
    assert list(changed(INPUTS[:1]))
    assert are_compiled(changed, 1, 6) and not are_compiled(refusing, 1, 6)
    for run in (
        lambda: list(refusing(INPUTS[:1])),
        lambda: list(Scorer(config, params, **using(UNKNOWN))([(INPUTS[0], INPUTS[1])])),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSAL):
            run()


def test_what_decoding_has_by_itself(monkeypatch):
    assert CompilerOptions().for_decoding("tpu") == {}
    assert CompilerOptions().for_decoding("cuda") == DECODING_OPTIONS["gpu"]
    monkeypatch.setitem(DECODING_OPTIONS, "gpu", {"xla_a": "1", "xla_b": "2"})
    asked = CompilerOptions(gpu=("xla_b=3",))
    assert asked.for_decoding("cuda", "NVIDIA H200") == {"xla_a": "1", "xla_b": "3"}
    assert CompilerOptions().of("gpu") == {}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("options") / "run", tiny.OF_BYTES)


@pytest.mark.slow  # decodes by two commands
def test_commands_that_decode_take_them(run_folder, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("a red house\ta house\n")
    words = [f"--model_dir={run_folder}", f"--input={tmp_path / 'in.txt'}"]
    for command in (["generate", "--max_new_tokens=2"], ["score"]):
        known = [f"--xla={KNOWN}", "--xla=xla_gpu_enable_command_buffer="]
        assert main([*command, *words, *known]) == 0, capsys.readouterr().err
        assert main([*command, *words, f"--xla={UNKNOWN}"]) == 2
        assert REFUSAL in capsys.readouterr().err
    arguments = _parser().parse_args(["serve", words[0], "--mesh=data=8", f"--xla={KNOWN}"])
    (folder,) = model_folders(arguments).values()
    assert folder.load().devices.options == OPTIONS
    assert main(["generate", *words, "--xla=fast"]) == 2
    assert "'fast'; write xla_name=value" in capsys.readouterr().err


def test_an_export_has_them(tmp_path, run_folder):
    """One that was made before they were written has none."""
    words = [f"--model_dir={run_folder}", "--platform=cpu", "--max_new_tokens=2"]
    folder, inputs = tmp_path / "x", [[5, 6, 1]]
    assert main(["export", *words, f"--output={folder}", f"--xla={KNOWN}"]) == 0
    manifest = json.loads((folder / "export.json").read_bytes())
    assert manifest["programs"]["cpu"]["compiler_options"] == dict(OPTIONS)
    assert f"--xla={KNOWN}" in manifest["about"]["rebuild"]
    said = ExportedModel(folder).generate(inputs)
    rewrite(folder, lambda content: content["programs"]["cpu"].pop("compiler_options"))
    assert ExportedModel(folder).generate(inputs) == said
    wrong = {"compiler_options": dict([UNKNOWN.split("=")])}
    rewrite(folder, lambda content: content["programs"]["cpu"].update(wrong))
    for run in (ExportedModel.generate, lambda model, _: model.lowered_step().compile()):
        with pytest.raises(jax.errors.JaxRuntimeError, match=REFUSAL):
            run(ExportedModel(folder), inputs)


DECODED = """
import dataclasses, json, os, pathlib, sys
os.environ["XLA_FLAGS"] = f"--xla_dump_to={sys.argv[1]} --xla_dump_hlo_as_text"
import jax
from pallas_kernels.aot.gpu_compiler import compile_lowered, described_gpus
from switchx.bench.accelerator.decoding import OPTIONS
from switchx.inference.config import DecodingConfig
from switchx.inference.decode import run_until
from switchx.inference.export import Target
from switchx.models.config import Precision
from switchx.models.params import abstract_params
from tests.compiled.slow_loops import copied_constants, host_waits
from tests.inference import tiny

sizes = {"d_model": 256, "d_ff": 512, "d_head": 64, "vocab_size": 512}
precision, devices = Precision(params="bfloat16", compute="bfloat16"), Target("cuda").devices()
config = dataclasses.replace(tiny.for_decoding(tiny.CONFIG), precision=precision, **sizes)
params = devices.abstract(abstract_params(config))
for way in json.loads(sys.argv[2]):
    decoding = DecodingConfig(16, eos_id=-1, pruning="none", **way)
    with devices.use():
        state = jax.eval_shape(lambda: tiny.start(decoding, (config, params)))
        traced = run_until.trace(config, decoding.program, params, state, 0, 16)
        lowered = traced.lower(lowering_platforms=("cuda",))
    for option in ("default", "loops in command buffers"):
        program = compile_lowered(lowered, described_gpus("h200"), OPTIONS[option])
        texts = pathlib.Path(sys.argv[1]).glob("*.thunk_sequence*")
        thunks = max(texts, key=lambda file: file.stat().st_mtime_ns).read_text()
        hlo = program.hlo_modules()[0].to_string()
        print(json.dumps([host_waits(hlo, thunks), max(copied_constants(hlo), default=0)]))
"""
WAYS = (
    ({}, 1),
    ({"beam_size": 4}, 1),
    ({"prompt_lookup_num_tokens": 3}, 1),
    ({"temperature": 0.8, "top_p": 0.9}, 4),  # bisects in loops that the data ends
)


@pytest.mark.aot
def test_the_host_waits_once_a_token_or_never(tmp_path):
    """It asks whether a loop goes on, unless one command buffer has all of it."""
    ways = json.dumps([way for way, _ in WAYS])
    done = script_with_compiler(gpu_compiler, DECODED, str(tmp_path), ways)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line[0] == "["]
    assert [waits for waits, _ in rows] == [n for _, waits in WAYS for n in (waits, 0)]
    assert max(num_bytes for _, num_bytes in rows) < 1 << 10
