# SPDX-License-Identifier: Apache-2.0
"""What is exported says what the model says, in a process that has no model code.

The blocks of docs/export.md run here too, in their order, in one folder.
"""

import dataclasses
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from switchx.cli.main import main
from switchx.inference import run_exported
from switchx.inference.config import DecodingConfig
from switchx.inference.generate import Generator, for_decoding
from switchx.inference.run_exported import ExportedModel
from tests.cases import slow
from tests.data.refusals import refused
from tests.inference.exports import DECODER, INPUTS, MESH, export, generated, rewrite
from tests.inference.tiny import trained
from tests.processes import ROOT, xla_flags
from tests.training.jobs import ENCODER_DECODER, with_switch
from tests.training.saved_runs import save_run

PAGE = (ROOT / "docs/export.md").read_text(encoding="utf-8")

# run.py with what it has imported at the end, on standard error.
PROGRAM = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(*{name.split(".")[0] for name in sys.modules}, file=sys.stderr)
"""
NOT_NEEDED = {"switchx", "pallas_kernels", "flax", "orbax", "gin", "tests"}


def run(folder, cwd, *options, devices: int, inputs=INPUTS):
    """`python run.py`, outside of the checkout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "run.py"), *options],
        input="\n".join(map(json.dumps, inputs)),
        cwd=cwd,
        env=environment | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """float32, beams of 3."""
    folder = tmp_path_factory.mktemp("exports") / "beams"
    export(folder, trained(), ("cpu",), beam_size=3)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return ExportedModel(folder)


@pytest.fixture
def copy(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("bits", "beam_size", "mesh"),
    [
        slow(None, 3, None),
        (4, 1, MESH),
        slow(4, 1, None),
        slow(8, 3, MESH),
        slow("float8_e4m3fn", 1, None),
    ],
    ids=lambda value: "mesh" if value is MESH else str(value),
)
def test_its_tokens_are_switchxs_own_without_switchx(tmp_path, bits, beam_size, mesh):
    model = trained(8, dtype=bits) if bits == "float8_e4m3fn" else trained(bits)
    export(tmp_path / "a", model, ("cpu",), mesh=mesh, beam_size=beam_size)
    result = run(tmp_path / "a", tmp_path, devices=8 if mesh else 1)
    assert result.returncode == 0, result.stderr
    assert not set(result.stderr.split()) & NOT_NEEDED
    got = [json.loads(line) for line in result.stdout.splitlines()]
    want = generated(model, beam_size=beam_size)
    assert [each["tokens"] for each in got] == [best[0] for best, *_ in want]
    for each, (best, *_) in zip(got, want, strict=True):
        assert each["score"] == pytest.approx(best[1], rel=1e-5)


def test_from_python_all_beams_are_there_and_batches_may_be_smaller(model):
    for inputs in (INPUTS, INPUTS[:1]):
        got = model.generate(inputs)
        wanted = generated(trained(), beam_size=3)[: len(inputs)]
        for beams, want in zip(got, wanted, strict=True):
            assert [each["tokens"] for each in beams] == [tokens for tokens, _ in want]
    assert all(len(best["tokens"]) <= 2 for best, *_ in model.generate(INPUTS, 2))
    assert model.generate([]) == []


@pytest.mark.slow
def test_settings_are_those_of_the_export(tmp_path):
    """Of each row's text so far, with log-probabilities; another one is refused."""
    settings = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "forced_prefix": (4, 4)}
    model = trained(config=DECODER)
    export(tmp_path / "x", model, ["cpu"], logprobs=2, **settings)
    exported = ExportedModel(tmp_path / "x")
    got = exported.generate(INPUTS, **settings)
    decoding = DecodingConfig(5, pruning="experts", logprobs=2, **settings)
    generator = Generator(for_decoding(model[0]), model[1], decoding, 4)
    for number, hypotheses in generator(INPUTS):
        ((want,), (said,)) = hypotheses, got[number]
        assert said["tokens"] == want.tokens and want.tokens[:2] == [4, 4]
        assert said["score"] == pytest.approx(want.score, rel=1e-5)
        assert said["token_logprobs"] == pytest.approx(want.token_logprobs, rel=1e-4)
        assert [list(x) for x in said["top_logprobs"]] == [list(x) for x in want.top_logprobs]
    for name, value in {"repetition_penalty": 2.0, "logprobs": None, "stop": ["x"]}.items():
        with pytest.raises(ValueError, match=f"{name}=.*, exported with .* --{name}"):
            exported.generate(INPUTS, **{name: value})


@pytest.mark.slow
def test_samples_of_an_export(tmp_path):
    settings = {"temperature": 1.0, "seed": 3, "best_of": 2, "num_return_sequences": 2}
    export(tmp_path / "x", trained(), ["cpu"], **settings)
    exported, want = ExportedModel(tmp_path / "x"), generated(trained(), **settings)
    got = exported.generate(INPUTS[:2])
    assert [[each["tokens"] for each in said] for said in got] == [
        [tokens for tokens, _ in said] for said in want[:2]
    ]
    with pytest.raises(ValueError, match="got 3 inputs, exported for batches of 2"):
        exported.generate(INPUTS)
    third = exported.generate(INPUTS[2:], first_number=2)
    assert [each["tokens"] for each in third[0]] == [tokens for tokens, _ in want[2]]


def test_inputs_are_numbered_over_all_batches(model, monkeypatch, capsys):
    """Samples depend on the numbers, which are those of `Generator`."""
    numbers, prefill = [], model._prefill

    def watched(weights, arrays):
        numbers.append(arrays["sentence_B"].tolist())
        return prefill(weights, arrays)

    monkeypatch.setattr(model, "_prefill", watched)
    monkeypatch.setattr(run_exported, "ExportedModel", lambda folder: model)
    monkeypatch.setattr(sys, "stdin", io.StringIO("[5]\n" * 6))
    assert run_exported.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert numbers == [[0, 1, 2, 3], [4, 5, -1, -1]]
    with refused("first_number=-1"):
        model.generate(INPUTS, first_number=-1)


@pytest.mark.parametrize(
    "drafted", [{}, slow({"prompt_lookup_num_tokens": 2})], ids=["plain", "drafted"]
)
def test_a_decoder_only_model_goes_on_from_prompts(tmp_path, drafted):
    model = trained(None, DECODER)
    export(tmp_path / "a", model, ("cpu",), **drafted)
    got = ExportedModel(tmp_path / "a").generate(INPUTS)
    assert [best["tokens"] for best, *_ in got] == [best[0] for best, *_ in generated(model)]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([[2]] * 5, "got 5 inputs, exported for batches of 4"),
        ([[2], [2] * 7], "input 1 has 7 tokens, exported for 6 at most"),
        ([[]], "input 0 is empty"),
        ([[3, 12]], "input 0 has token id 12, the vocabulary has 0 to 11"),
        (["text"], "input 0 is 'text'"),
    ],
)
def test_inputs_that_it_was_not_exported_for(model, inputs, said):
    with refused(said):
        model.generate(inputs)


def test_an_answer_without_a_finite_score_is_an_error(model, monkeypatch):
    monkeypatch.setattr(
        model, "_decoded", lambda *_: {"score_BL": np.full((model.batch_size, 3), np.nan)}
    )
    with refused("input 5 has no answer whose score is a number"):
        model.generate(INPUTS[:2], first_number=5)


def test_it_steps_on_the_device_as_often_as_it_was_exported_for(model, monkeypatch):
    with refused("max_new_tokens=6"):
        model.generate(INPUTS, 6)
    expected = model.generate(INPUTS)
    monkeypatch.setattr(model, "_step", None)  # of the host's loop
    assert model.generate(INPUTS) == expected


@pytest.mark.parametrize("name", ["weights.safetensors", "step.cpu.jax_export"])
def test_damaged_files_are_named(copy, name):
    data = (copy / name).read_bytes()
    for changed, said in (
        (data[:-1] + bytes([data[-1] ^ 1]), "has changed since it was written"),
        (data[:-1], f"has {len(data) - 1} bytes, not {len(data)}"),
        (None, "is missing"),
    ):
        (copy / name).unlink() if changed is None else (copy / name).write_bytes(changed)
        with refused(f"{copy / name} {said}"):
            ExportedModel(copy)
    (copy / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    with refused(f"{copy / name} is a pointer of Git LFS <any>: run `git lfs pull` in"):
        ExportedModel(copy)


def test_a_manifest_that_is_missing_changed_or_of_another_format(copy, tmp_path):
    with refused(f"{tmp_path / 'export.json'} is missing"):
        ExportedModel(tmp_path)
    file = copy / "export.json"
    text = file.read_text()
    file.write_text(text.replace('"batch_size": 4', '"batch_size": 5'))
    with refused("cannot be read (it has changed since it was written)"):
        ExportedModel(copy)
    rewrite(copy, lambda content: content.update(format_version=4))
    with refused("its format_version is 4, this program reads 3"):
        ExportedModel(copy)
    file.write_text(text[:-9])
    with refused("export.json cannot be read ("):
        ExportedModel(copy)
    file.write_text(text)
    rewrite(copy, lambda content: content["files"].update({"../x": [0, ""]}))
    with refused("export.json names '../x', which is not in "):
        ExportedModel(copy)


def test_another_platform(copy):
    def change(content):
        content["programs"]["tpu"] = content["programs"].pop("cpu")

    rewrite(copy, change)
    with refused(f"{copy} was exported for tpu, JAX runs on cpu here"):
        ExportedModel(copy)


def test_another_number_of_devices(copy):
    rewrite(copy, lambda content: content["mesh"].update(expert=4, model=4))
    with refused(
        f"{copy} was exported for the mesh expert=4 x model=4, 16 devices, but "
        "there are 8 (cpu)<any> with another --mesh"
    ):
        ExportedModel(copy)


@pytest.mark.parametrize(
    ("versions", "is_same", "said"),
    [
        ({"jax": "9.1.0"}, False, "install jax 9.1.0 or a later one that reads it, or "),
        ({"calling_convention": 99}, False, "calling convention 99"),
        ({"jax": "0.9.0"}, True, "install jax 0.9.0, or make the export again: "),
    ],
)
def test_another_version_of_jax(copy, versions, is_same, said):
    def change(content):
        content["versions"].update(versions)
        content["programs"]["cpu"]["needs_same_jax"] = is_same

    rewrite(copy, change)
    with refused(f"was exported by jax <any>{said}"):
        ExportedModel(copy)


def test_a_program_that_is_none(copy):
    """With a checksum that is right: what JAX then says is passed on."""
    name = "step.cpu.jax_export"
    (copy / name).write_bytes(b"program")
    sha256 = hashlib.sha256(b"program").hexdigest()
    rewrite(copy, lambda content: content["files"].update({name: [7, sha256]}))
    with refused(f"{copy / name} cannot be read by jax {jax.__version__} (<any>)"):
        ExportedModel(copy)


@pytest.mark.slow  # half a minute; the README's commands are a default test
def test_the_page_runs(in_a_folder, capsys):
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 2}
    model = dataclasses.replace(with_switch(ENCODER_DECODER, every=1), **sizes)
    save_run(in_a_folder / "runs/tiny", model)
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for language, block in blocks:
        if language == "python":
            exec(compile(block, "export.md", "exec"), {})
            assert capsys.readouterr().out
            continue
        for command in block.splitlines():
            if command.startswith("switchx"):
                assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
                continue
            line, program = re.fullmatch(r'echo "(.*)" \| python (.*)/run.py', command).groups()
            folder = in_a_folder / program
            result = run(folder, in_a_folder, devices=1, inputs=[json.loads(line)])
            assert json.loads(result.stdout)["tokens"], result.stderr
