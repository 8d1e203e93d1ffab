# SPDX-License-Identifier: Apache-2.0
"""`switchx generate` and `score`: what the Python API says, a line each, in order."""

import dataclasses
import io
import json
import math
import pathlib
import re
import sys
import types

import numpy as np
import pytest

import switchx
from switchx.cli import expert_arguments, simulate
from switchx.cli.main import main
from switchx.cli.text import lines as text
from switchx.inference.score import Score, Scorer
from switchx.models.config import ModelConfig, SwitchConfig
from switchx.routing_record import open_record
from tests.training.saved_runs import SPANS, save_run

pytestmark = pytest.mark.usefixtures("programs_compiled_once")

MODEL = ModelConfig("encoder_decoder", 384, 8, 8, 1, 8, 1, 1, switch=SwitchConfig(2, every=1))
DECODER = ModelConfig("decoder_only", 384, 8, 8, 1, 8, 1)
# As many tokens each, so that few programs are compiled.
LINES = ["gate", "<extra_id_0> at", "an x", "slot"]
PAIRS = [("a gate", "of"), ("x", "an expert"), ("slot", "y")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"), MODEL, source=SPANS)


@pytest.fixture(scope="module")
def model(folder):
    return switchx.load(folder)


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("\n".join(LINES))
    return file


@pytest.fixture
def pairs(tmp_path):
    def pairs_of(*lines):
        file = tmp_path / "pairs.tsv"
        file.write_text("\n".join(lines))
        return file

    return pairs_of


def words(folder, *options):
    return ["generate", f"--model_dir={folder}", "--max_new_tokens=3", *map(str, options)]


def test_lines_are_those_of_the_api(folder, model, lines, capsys, cli, monkeypatch):
    want = model.generate(LINES, max_length=3, with_scores=True)
    assert main(words(folder, f"--input={lines}", "--json")) == 0
    got = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["output"], each["is_finished"]) for each in got] == [
        (each.output, each.is_finished) for each in want
    ]
    for each, result in zip(got, want, strict=True):
        assert each["score"] == pytest.approx(result.score, rel=1e-5)
        assert model.vocabulary.decode(each["tokens"]) == each["output"]
    stdin = types.SimpleNamespace(buffer=io.BytesIO(lines.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    captured = cli(*words(folder))
    assert "experts have a capacity" not in captured.err
    plain = [each.output.replace("\n", " ").replace("\r", " ") for each in want]
    assert captured.out.split("\n")[:-1] == plain
    assert "reading standard input until its end" in captured.err


def test_the_n_best_and_log_probabilities(folder, model, lines, capsys):
    options = [f"--input={lines}", "--beam_size=2", "--num_return_sequences=2"]
    settings = {"length_penalty": 0.5, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
    options += [f"--{name}={value}" for name, value in settings.items()]
    options.append("--forced_prefix=70,71")
    want = model.generate(
        LINES, max_length=3, beam_size=2, num_return_sequences=2, logprobs=2, with_scores=True,
        forced_prefix=(70, 71), **settings,
    )  # fmt: skip
    assert main(words(folder, *options, "--json", "--logprobs=2")) == 0
    got = [json.loads(line)["outputs"] for line in capsys.readouterr().out.splitlines()]
    for outputs, wanted in zip(got, want, strict=True):
        assert [each["output"] for each in outputs] == [each.output for each in wanted]
        for each, own in zip(outputs, wanted, strict=True):
            assert each["tokens"][:2] == [70, 71]
            assert each["token_logprobs"] == pytest.approx(own.token_logprobs, rel=1e-4)
            top = [{int(token): x for token, x in top.items()} for top in each["top_logprobs"]]
            assert [list(x) for x in top] == [list(x) for x in own.top_logprobs]
    assert main(words(folder, *options)) == 0
    plain = [re.sub(r"[\t\r\n]+", " ", each.output) for wanted in want for each in wanted]
    found = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert [text for line in found for text in line.split("\t")] == plain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--repetition_penalty=0"], "repetition_penalty=0.0; use 0.01 to 100"),
        (["--forced_prefix=384"], "the vocabulary has 0 to 383, not 384"),
        (["--forced_prefix=a"], "'a' are no whole numbers; write them with commas"),
        (["--logprobs=1"], "without --json, which writes them; give both"),
        (["--beam_size=0"], "DecodingConfig.beam_size=0; use at least 1"),
        (["--pruning=some"], "there is no 'some'; use none, experts, compact"),
        (["--batch_size=0"], "batch_size=0; use 1 to"),
        (["--max_input_tokens=0"], "--max_input_tokens: '0' is no whole number of at least 1"),
        (["--output="], "--output: it is empty"),
        (["--capacity=some"], "there is no 'some'"),
        (["--beam_sise=2"], "unknown option --beam_sise (did you mean --beam_size?)"),
        (["--mesh=experts=2"], "argument --mesh: 'experts=2' is no axis of a mesh; write AXIS"),
        (["--mesh=data=2,expert=2"], "mesh data=2 x expert=2 needs 4 devices, but there are 8"),
        (["--input=none.txt"], "--input=none.txt cannot be read"),
    ],
)
def test_wrong_options_are_refused(folder, lines, cli, options, said):
    assert said in cli.refused(*words(folder, f"--input={lines}", *options))


def test_a_stop_ends_an_output_and_a_capacity_is_told(folder, model, lines, capsys):
    (whole, *_) = model.generate(LINES, max_length=3)
    stop = whole[1]
    assert main(words(folder, f"--input={lines}", f"--stop={stop}", "--stop=zz")) == 0
    got = capsys.readouterr().out.split("\n")[0]
    assert got == re.sub(r"[\r\n]+", " ", whole[: whole.index(stop)])
    assert main(words(folder, f"--input={lines}", "--capacity=trained")) == 0
    assert "experts have a capacity: " in capsys.readouterr().err


@pytest.mark.slow  # tests/inference/test_chosen_experts.py has slots by default
def test_with_slots_for_experts_lines_are_the_same(folder, model, lines, cli):
    want = model.generate(LINES, max_length=2)
    options = [f"--input={lines}", "--max_new_tokens=2", "--pruning=experts"]
    captured = cli(*words(folder, *options, "--expert_slots=1"))
    assert captured.out.splitlines() == [re.sub(r"[\r\n]+", " ", each) for each in want]
    assert "experts: 1 slots for 2 in each of 2 layers, 0.00 of 0.00 MiB" in captured.err
    for wrong, words_of_it in (
        (["--expert_slots=0"], "'0' is no whole number of at least 1"),
        (["--expert_slots=3"], "of a model with 2 experts a layer; use 1 to 2"),
        (["--expert_slots=1", "--mesh=expert=2"], "leave out one of the two"),
        (["--host_bytes=9"], "--host_bytes without --expert_slots; give --expert_slots=K, too"),
        (["--expert_slots=1", "--host_bytes=9"], "experts in arrays of whole layers"),
        (["--ring_slots=2", "--host_bytes=9"], "--host_bytes without --expert_slots; give"),
        (
            ["--ring_slots=2", "--expert_slots=1", "--host_bytes=9"],
            "--ring_slots, which has all",
        ),
        (["--ring_slots=2"], "has one Switch layer; use expert_slots"),
    ):
        assert words_of_it in cli.refused(*words(folder, *options, *wrong))


@pytest.mark.slow  # tokens of a ring: test_ring_decode.py
def test_with_a_ring_lines_are_the_same(lines, tmp_path, capsys, cli):
    config = dataclasses.replace(MODEL, num_encoder_layers=2, num_decoder_layers=2)
    run = save_run(tmp_path / "run", config, source=SPANS)
    options = [f"--input={lines}", "--max_new_tokens=2", "--pruning=experts"]
    want = cli(*words(run, *options)).out
    captured = cli(*words(run, *options, "--ring_slots=2", "--hardware=h200"))
    assert captured.out == want
    assert "experts: a ring of 2 layers" in captured.err
    assert "a resident model is better" in captured.err
    assert "h200: 1 calls streamed whole layers; encoder, " in captured.err
    both = ["--expert_slots=1", "--ring_slots=2"]
    assert main(words(run, *options, *both)) == 2
    assert "a device 'cpu' can do; give --hardware=NAME" in capsys.readouterr().err
    captured = cli(*words(run, *options, *both, "--hardware=h200"))
    assert captured.out == want
    assert "experts: 0 calls streamed whole layers, 3 moved chosen experts" in captured.err
    assert "h200: 2 calls moved chosen experts; decoder, 4 tokens" in captured.err


def simulated_cache(host_bytes: int) -> str:
    """As `switchx simulate cache` writes it."""
    chosen = types.SimpleNamespace(capacity=1, chosen="decayed_lfu", hits=lambda *_, **__: 0.5)
    trace = types.SimpleNamespace(num_keys=9, record_bytes=host_bytes)
    return simulate._cache_gin(types.SimpleNamespace(model_dir="run"), trace, chosen)


def test_a_simulated_cache_is_read_as_it_is_written(tmp_path):
    (tmp_path / "cache.gin").write_text(simulated_cache(700))
    found = expert_arguments._simulated_cache(str(tmp_path / "cache.gin"))
    assert found == {"policy": "decayed_lfu", "host_bytes": 700}


@pytest.mark.slow  # tests/inference/test_expert_source.py reads by default
def test_experts_of_a_quantized_model_are_read_from_its_file(
    folder, lines, tmp_path, capsys, cli
):
    artifact, cache = tmp_path / "int8", tmp_path / "cache.gin"
    quantize = ["quantize", f"--model_dir={folder}", f"--output={artifact}", "--bits=8"]
    cli(*quantize)
    options = [f"--input={lines}", "--max_new_tokens=2", "--pruning=experts"]
    want = cli(*words(artifact, *options)).out
    cache.write_text(simulated_cache(700))
    slots = ["--expert_slots=1", f"--expert_cache={cache}", "--expert_prefetch"]
    captured = cli(*words(artifact, *options, *slots))
    assert captured.out == want
    assert "of experts in host memory" in captured.err
    assert "streaming: nothing says what a device 'cpu' can do; give --hardware" in captured.err
    err = cli(*words(artifact, *options, *slots, "--hardware=h200")).err
    # A decoder's step has a token of each of the four lines.
    chosen = r"h200: \d+ calls moved chosen experts; "
    assert re.search(chosen + r"encoder, \d+ tokens: .* an expert are below the", err)
    assert re.search(chosen + r"decoder, 4 tokens: .*: chosen; max\(", err)
    assert main(words(artifact, *options, *slots, "--hardware=h9")) == 2
    assert "--hardware=h9: no such hardware" in capsys.readouterr().err
    assert main(words(artifact, *options, *slots, "--host_bytes=7")) == 2
    assert "host_bytes=7 holds 0 experts" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_with_slots_is_the_same_model(folder, model):
    slotted = switchx.load(folder, expert_slots=1)
    assert slotted.fingerprint == model.fingerprint
    assert slotted.num_params == model.num_params
    tokens = [[69, 70, 258, 1], [71, 1, 0, 0]], [[0, 258, 90], [0, 258, 0]]
    np.testing.assert_allclose(slotted.logits(*tokens), model.logits(*tokens), rtol=1e-5)
    inputs, targets = map(list, zip(*PAIRS, strict=True))
    for ours, theirs in zip(
        slotted.score(inputs, targets), model.score(inputs, targets), strict=True
    ):
        assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, rel=1e-5)
    assert slotted.experts.traffic.moved_bytes > slotted.experts.traffic.device_bytes


def test_options_are_settings_of_the_api(folder, model, lines, tmp_path):
    settings = {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "seed": 3}
    output = tmp_path / "samples.jsonl"
    options = [f"--{name}={value}" for name, value in settings.items()]
    options += [f"--input={lines}", f"--output={output}", "--json"]
    assert main(words(folder, *options)) == 0
    got = [json.loads(line)["output"] for line in output.read_text().splitlines()]
    assert got == model.generate(LINES, max_length=3, **settings)


def test_a_killed_command_goes_on_to_the_same_samples(folder, lines, tmp_path, monkeypatch):
    """Shards of two lines, so that samples are of the line's number, not the shard's."""
    options = [f"--input={lines}", "--temperature=1", "--json", "--batch_size=2"]
    options.append("--pruning=none")
    assert main(words(folder, *options, f"--output={tmp_path / 'whole'}")) == 0
    monkeypatch.setattr(text, "BATCHES_PER_SHARD", 1)
    append, written = text.run_in_shards, tmp_path / "out"

    def dies_after_one_shard(lines, output, compute, reporter, **settings):
        def some(shard, first):
            if first:
                raise KeyboardInterrupt
            yield from compute(shard, first)

        append(lines, output, some, reporter, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(text, "run_in_shards", dies_after_one_shard)
        assert main(words(folder, *options, f"--output={written}")) == 130
    assert len(written.read_text().splitlines()) == 2
    assert main(words(folder, *options, f"--output={written}")) == 0
    got, want = ([json.loads(line) for line in path.read_text().splitlines()]
                 for path in (written, tmp_path / "whole"))  # fmt: skip
    assert [each["tokens"] for each in got] == [each["tokens"] for each in want]


def test_other_settings_do_not_go_on(folder, lines, tmp_path, capsys):
    options = [f"--input={lines}", f"--output={tmp_path / 'out'}"]
    assert main(words(folder, *options)) == 0
    assert main(words(folder, *options, "--pruning=none", "--batch_size=2")) == 0
    assert main(words(folder, *options, "--beam_size=2")) == 2
    assert "begun with other settings (beam_size: 1 then, 2 now)" in capsys.readouterr().err
    assert main(words(folder, *options, "--step=5")) == 2
    assert "begun with other settings (model: " in capsys.readouterr().err


def test_wrong_lines_are_named_before_anything_runs(folder, tmp_path, cli):
    file, output = tmp_path / "in.txt", tmp_path / "out"
    file.write_text("a\n\n" + "b" * 2049 + "\n<extra_id_100>\n")
    said = cli.refused(*words(folder, f"--input={file}", f"--output={output}"))
    assert (
        f"{file}: line 3 has 2050 tokens, more than --max_input_tokens=2048; "
        "line 4 cannot be read (<extra_id_100> in a text" in said
    )
    assert not output.exists()


@pytest.mark.slow  # tests/inference/test_model_mesh.py has meshes by default
def test_scores_are_those_of_the_api_on_a_mesh_too(folder, model, pairs, cli):
    file = pairs(*map("\t".join, PAIRS))
    want = model.score(*zip(*PAIRS, strict=True))
    for options in ([], ["--mesh=expert=2"]):
        captured = cli("score", f"--model_dir={folder}", f"--input={file}", *options)
        rows = [line.split("\t") for line in captured.out.splitlines()]
        assert [int(num_tokens) for _, num_tokens in rows] == [3, 10, 2]  # bytes, and eos
        for (log_likelihood, _), score in zip(rows, want, strict=True):
            assert float(log_likelihood) == pytest.approx(score.log_likelihood, rel=1e-5)
    total = sum(score.log_likelihood for score in want)
    said = f"3 lines, 15 target tokens: log-likelihood {total:.4f}, {total / 15:.4f} a token"
    assert said in captured.err


def test_a_file_goes_on_and_the_sum_is_of_all_its_lines(folder, pairs, tmp_path, capsys, cli):
    lines, output = ["a gate\tof", "a slot\tin"], tmp_path / "scores.jsonl"
    words = ["score", f"--model_dir={folder}", f"--output={output}", "--json"]
    cli(*words, f"--input={pairs(*lines[:1])}")
    assert main([*words, f"--input={pairs(*lines)}"]) == 0
    got = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["num_tokens"] for each in got] == [3, 3]
    total = sum(each["log_likelihood"] for each in got)
    said = capsys.readouterr().err
    assert "1 of 2 lines are there already" in said
    assert f"2 lines, 6 target tokens: log-likelihood {total:.4f}" in said


def test_a_score_that_is_no_number_is_null_as_in_all_json(folder, pairs, cli, monkeypatch):
    scores = [(0, Score(math.nan, 2)), (1, Score(-1.5, 3))]
    monkeypatch.setattr(Scorer, "__call__", lambda *_: iter(scores))
    file = pairs("a\tb", "c\td")
    captured = cli("score", f"--model_dir={folder}", f"--input={file}", "--json")
    lines = captured.out.splitlines()
    assert lines[0] == '{"log_likelihood": null, "num_tokens": 2}'
    assert json.loads(lines[1])["log_likelihood"] == -1.5 and "nan a token" in captured.err
    # What is printed goes through `fields.json_text`; files for ourselves need not.
    of_files = {"cli/text/resumable_output.py"}
    root = pathlib.Path(switchx.__file__).parent
    for path in (*root.glob("cli/**/*.py"), root / "jobs.py", root / "results.py"):
        is_of_files = path.relative_to(root).as_posix() in of_files
        assert is_of_files or "json.dumps" not in path.read_text(), path


def test_a_decoder_scores_texts_from_their_beginning(tmp_path, pairs, capsys):
    folder = save_run(tmp_path / "decoder", DECODER)
    want = switchx.load(folder).score(["", "a"], ["a gate", "gate"])
    file = pairs("a gate", "a\tgate")
    assert main(["score", f"--model_dir={folder}", f"--input={file}"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    for (log_likelihood, num_tokens), score in zip(rows, want, strict=True):
        assert float(log_likelihood) == pytest.approx(score.log_likelihood, abs=1e-5)
        assert int(num_tokens) == score.num_tokens


def test_wrong_pairs_are_all_named(folder, pairs, cli):
    file = pairs("a\tb", "no tab", "a\tb\tc", "\tb", "a\t", "", "a\t" + "b" * 2048)
    said = cli.refused("score", f"--model_dir={folder}", f"--input={file}")
    for fault in (
        "line 2 has 0 tabs",
        "line 3 has 2 tabs",
        "line 6 has 0 tabs",
        "line 7 has a target that has 2049 tokens, more than --max_input_tokens=2048",
    ):
        assert fault in said
    assert not re.search("line [145] ", said)  # an empty text is its end alone


def test_a_record_has_what_was_read(folder, model, lines, pairs, cli, tmp_path):
    path = tmp_path / "record.parquet"
    file = pairs(*map("\t".join, PAIRS))
    options = [f"--model_dir={folder}", f"--input={file}", f"--record={path}"]
    assert "bytes each" in cli("score", *options).err
    record = open_record(path)
    assert (record.info.source, record.info.model) == ("score", model.fingerprint)
    read = {
        int(row): tokens[tokens > 0].tolist()
        for batch in record.batches(stacks=["encoder"])
        for row, tokens in zip(batch.row_B, batch.token_BL, strict=True)
        if row >= 0
    }
    assert read == dict(enumerate(model.prompts([inputs for inputs, _ in PAIRS])))

    cli(*words(folder, f"--input={lines}", f"--record={path}"))
    answers = model.generate(model.prompts(LINES), max_length=3, with_scores=True)
    assert not any(each.is_finished for each in answers)  # their last tokens are not read
    written = {
        int(row): tokens.tolist()
        for batch in open_record(path).batches(stacks=["decoder"])
        for row, tokens in zip(batch.row_B, batch.token_BL, strict=True)
    }
    assert written == {row: [0, *each.output[:2]] for row, each in enumerate(answers)}


def test_a_record_of_a_part_or_of_nothing_is_refused(folder, lines, capsys, cli, tmp_path):
    output, record = tmp_path / "out.txt", tmp_path / "record.parquet"
    assert main(words(folder, f"--input={lines}", f"--output={output}")) == 0
    again = [f"--input={lines}", f"--output={output}", f"--record={record}"]
    assert "4 lines of" in cli.refused(*words(folder, *again)) and not record.exists()
    dense = save_run(tmp_path / "dense", DECODER)
    assert main(words(dense, f"--input={lines}", f"--record={record}")) == 2
    assert "a record of a model without Switch layers" in capsys.readouterr().err
