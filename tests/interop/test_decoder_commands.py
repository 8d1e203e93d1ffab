# SPDX-License-Identifier: Apache-2.0
"""Options of decoder-only models through the commands: read, generated with, written back.

Families: test_family_matrix.py.

transformers is the oracle: greedy texts of prompts of three lengths, tensors bit by bit, logits
of what was written.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import switchx
from switchx.cli.main import main
from switchx.data.corpora.text_files import TextFiles
from switchx.interop.decoder_families import DECODERS
from switchx.interop.huggingface import read_checkpoint
from switchx.tree import named_leaves
from tests.data.refusals import refused
from tests.data.tokenizer_files import tokenizer_folder
from tests.interop.decoder_models import CASES, V, eager, is_release_5, special_ids_of, theirs

pytestmark = pytest.mark.hf

PROMPTS = [[5, 9, 11, 4, 7], [6, 80, 31], [17]]
NEW_TOKENS = 12


def converted(folder, *more):
    arguments = [str(folder / "theirs"), str(folder / "run"), *more]
    status = main(["convert", "--from=huggingface", *arguments])
    assert status == 0
    return folder / "run"


def their_texts(model, eos, prompts=PROMPTS, **more):
    import torch

    found = []
    for prompt in prompts:
        row, greedy = torch.tensor([prompt]), dict(do_sample=False, max_new_tokens=NEW_TOKENS)
        out = model.generate(row, eos_token_id=eos, pad_token_id=0, **greedy, **more)
        text = out[0, len(prompt) :].tolist()
        found.append(text[:-1] if text[-1] in eos else text)
    return found


# Families stand in test_family_matrix.py, those with a first dense block without it.
OPTIONS = [case for case in CASES if case not in DECODERS or case in ("glm4_moe", "dots1")]


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_is_read_writes_texts_and_is_written_back(case, tmp_path, capsys):
    import torch
    from transformers import AutoModelForCausalLM

    model = theirs(case)
    eos = [2, 40]
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = 40  # an end pads, as in Qwen's chat models
    model.save_pretrained(tmp_path / "theirs")
    run = converted(tmp_path)
    assert "no tokenizer.json" in capsys.readouterr().err
    ours = switchx.load(str(run))
    texts = ours.generate(
        [" ".join(map(str, prompt)) for prompt in PROMPTS], max_new_tokens=NEW_TOKENS
    )
    assert [[int(i) for i in text.split()] for text in texts] == their_texts(model, eos)
    capsys.readouterr()
    assert main(["convert", "--to=huggingface", str(run), str(tmp_path / "back")]) == 0
    assert ("router are not above 0" in capsys.readouterr().err) == ("groups" in case)
    want, got = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back")
    )
    assert want.keys() == got.keys()
    assert all(np.array_equal(want[name], got[name]) for name in want)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", **eager())
    assert type(again) is type(model)
    assert special_ids_of(again) == special_ids_of(model) == {"bos": 1, "eos": eos, "pad": 40}
    assert read_checkpoint(tmp_path / "back").config == ours.config
    tokens = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_bad_folders_are_refused_by_name(tmp_path, capsys):
    """A model of another family, weights of another size, and a model that no family has."""
    theirs("llama").save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    values = json.loads(file.read_text())
    for changes, message in (
        (dict(model_type="gpt_oss"), "model_type='gpt_oss' cannot be converted"),
        (
            dict(num_key_value_heads=4),
            "k_proj.weight: expected shape [48, 32], got shape [24, 32]",
        ),
        (dict(vocab_size=V + 1), "lm_head.weight: expected shape [97, 32]"),
        (dict(eos_token_id=None), "eos_token_id=[]"),
        (dict(model_type="deepseek_v3"), "switchx has no latent attention (MLA); expected one"),
        (dict(model_type="deepseek_v9"), "model_type='deepseek_v9' cannot be converted; exp"),
    ):
        file.write_text(json.dumps(values | changes))
        (tmp_path / "theirs" / "generation_config.json").unlink(missing_ok=True)
        arguments = [str(tmp_path / "theirs"), str(tmp_path / "run")]
        assert main(["convert", "--from=huggingface", *arguments]) != 0
        assert message in capsys.readouterr().err
    file.write_text(json.dumps(values | dict(pad_token_id=-1)))  # Llama's of none
    assert main(["convert", "--from=huggingface", *arguments]) == 0
    assert switchx.load(arguments[1]).vocabulary.pad_id is None
    capsys.readouterr()
    assert main(["convert", "--from=huggingface", "--overflow=drop", *arguments]) == 2
    assert "overflow='drop' of a llama: expected dropless, as" in capsys.readouterr().err
    assert main(["convert", "--from=huggingface", "--vocabulary=bytes", *arguments]) == 2
    assert "bytes: ids of a decoder-only model stay as they are" in capsys.readouterr().err


def test_tensors_that_transformers_leaves_out_are_named(tmp_path, capsys):
    """Multi-token prediction of ERNIE-4.5, and of GLM-4.5, whose block is behind the last."""
    ernie = "ernie4_5_moe", ["model.mtp_block.0.input_layernorm.weight"], "1 tensors of mtp"
    names = [f"model.layers.2.{name}" for name in ("eh_proj.weight", "enorm.weight")]
    for case, more, said in (ernie, ("glm4_moe", names, "2 tensors of model.layers.2.")):
        folder = tmp_path / case
        theirs(case).save_pretrained(folder / "theirs")
        weights = folder / "theirs/model.safetensors"
        tensors = load_file(weights)
        more = dict.fromkeys(more, np.ones(32, np.float32))
        save_file(tensors | more, weights, {"format": "pt"})
        model = switchx.load(str(converted(folder, "--dtype=bfloat16")))
        assert model.config.switch.router.has_bias
        for name, leaf in named_leaves(model.params).items():
            is_bias = name.endswith("/router_bias_E")
            assert leaf.dtype == ("float32" if is_bias else "bfloat16"), name
        assert f"not read: {said}" in capsys.readouterr().err
    # A block more than config.json counts is no block of that kind.
    file = folder / "theirs/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(num_hidden_layers=1)))
    save_file(tensors, weights, {"format": "pt"})
    assert main(["convert", "--from=huggingface", str(folder / "theirs"), str(folder / "r")])
    said = "model.layers.1.mlp.gate.e_score_correction_bias: expected nothing, got shape [4]"
    assert said in capsys.readouterr().err


def test_tensors_of_other_kinds_are_refused_in_a_line(tmp_path, capsys):
    """Blocks that are dense where all have experts, and FP8 weights."""
    import torch
    from safetensors import torch as tensors_of

    theirs("qwen3_moe").save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(mlp_only_layers=[])))
    arguments = ["convert", "--from=huggingface", str(tmp_path / "theirs"), str(tmp_path / "r")]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "says that of 2 blocks [0, 1] have experts; of the tensors [1] have" in said
    weights = tmp_path / "theirs/model.safetensors"
    tensors = tensors_of.load_file(weights)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    tensors_of.save_file(tensors, weights)
    assert main(arguments) == 2
    assert "lm_head.weight has the type F8_E4M3" in (said := capsys.readouterr().err)
    assert "switchx reads no scales of quantized weights (FP8, MXFP4, AWQ, GPTQ)" in said


def test_prompts_that_see_themselves_whole_are_no_model_of_transformers(tmp_path, capsys):
    """As INIT_FROM with pairs leaves it, unless is_prefix_bidirectional=False."""
    theirs("llama").save_pretrained(tmp_path / "theirs")
    run = converted(tmp_path)
    values = json.loads((run / "config.json").read_text())
    for i, choice in enumerate(({}, {"is_prefix_bidirectional": False})):
        source = {"objective": {"type": "InputsToTargets"} | choice}
        (run / "config.json").write_text(json.dumps(values | {"source": source}))
        assert main(["convert", "--to=huggingface", str(run), str(tmp_path / f"back{i}")]) == 0
        said = capsys.readouterr().err
        assert ("prompts of this run see themselves whole" in said) != i
        assert "prompts of this run end with the id of eos, 2, which switchx puts" in said


def test_a_loss_before_reshaping_is_of_prompts_that_are_read_causally(tmp_path, capsys):
    theirs("llama").save_pretrained(tmp_path / "theirs")
    run, file = converted(tmp_path), tmp_path / "pairs.jsonl"
    texts = [{"inputs": f"5 9 {i}", "targets": f"{i} 7 4"} for i in range(10, 26)]
    file.write_text("\n".join(map(json.dumps, texts)))
    words = ["BATCH_SIZE=8", "INPUTS_LENGTH=8", "TARGETS_LENGTH=8", f"INIT_FROM={run}"]
    words += [f"FILES={file}", "TextFiles.validation_fraction=0.5"]
    gin = [f"--gin_file=configs/{each}.gin" for each in ("runs/finetune", "tasks/pairs")]
    of = f"--model_dir={run}", f"--output={tmp_path / 'sparse'}", "--experts=2", "--every=1"
    gin += [f"--gin.{each}" for each in (*words, "TrainingJob.eval_batches=None")]
    capsys.readouterr()
    assert main(["reshape", *of, *gin, "--json"]) == 0
    printed = capsys.readouterr()
    assert f"{run} reads prompts causally, and so inputs of pairs" in printed.err
    held_out = list(TextFiles(str(file), validation_fraction=0.5).open("validation", None))
    lists = [[[*map(int, each[name].split()), 2] for each in held_out] for name in texts[0]]
    scores = switchx.load(str(run)).score(*lists)
    want = -sum(s.log_likelihood for s in scores) / sum(s.num_tokens for s in scores)
    before, *_ = json.loads(printed.out)["results"]
    assert before["loss_nats"] == pytest.approx(want, rel=1e-5)


def test_positions_that_end_before_the_rope_does_are_named(tmp_path, capsys):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 16
    theirs("llama", max_position_embeddings=32, rope_parameters=rope).save_pretrained(
        tmp_path / "theirs"
    )
    converted(tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "positions go up to max_position_embeddings=32, and the rope's scaling is for 64"
        in said
    )


@pytest.mark.parametrize("part", ["model", "classifier"])
def test_models_without_a_head_are_named(part, tmp_path):
    from transformers import LlamaForSequenceClassification

    whole, folder = theirs("llama", pad_token_id=0), tmp_path / "theirs"
    saved = whole.model if part == "model" else LlamaForSequenceClassification(whole.config)
    saved.save_pretrained(folder)
    with refused(f"{folder} was saved as {type(saved).__name__}, without the lm head of a"):
        read_checkpoint(folder)


def test_an_empty_line_is_a_text_where_it_has_a_token(tmp_path, capsys):
    """As the help of `generate` says: no start stands before these ids."""
    theirs("llama").save_pretrained(tmp_path / "theirs")
    run, lines = converted(tmp_path), tmp_path / "lines.txt"
    lines.write_text("5 9\n\n")
    assert main(["generate", f"--model_dir={run}", f"--input={lines}"]) == 2
    assert "line 2 is empty; give at least one token" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "and those without a token are errors" in " ".join(capsys.readouterr().out.split())


def test_settings_of_training_that_are_not_kept_are_named(tmp_path, capsys):
    theirs("olmoe", router_aux_loss_coef=0.05).save_pretrained(tmp_path / "theirs")
    converted(tmp_path)
    assert (
        "not kept, nor written back: router_aux_loss_coef=0.05; give" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_losses_drift_where_a_first_token_has_none(tmp_path, capsys):
    """A text alone of a vocabulary without a start: nothing predicts its first token."""
    theirs("mixtral").save_pretrained(tmp_path / "theirs")
    run, pairs = str(converted(tmp_path)), tmp_path / "pairs.tsv"
    pairs.write_text("5 9 11\n5\t6 7\n")
    capsys.readouterr()
    assert main(["drift", run, run, f"--input={pairs}", "--json"]) == 0
    *_, losses = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert main(["score", f"--model_dir={run}", f"--input={pairs}", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    want = -sum(x["log_likelihood"] for x in lines) / sum(x["num_tokens"] for x in lines)
    assert losses["loss_a"] == losses["loss_b"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("case", [name for name, kin in DECODERS.items() if kin.num_experts])
def test_fused_experts_are_read_as_those_apart(case, tmp_path):
    if not is_release_5():
        pytest.skip("experts are fused by transformers 5")
    model = theirs(case)
    for name, options in (("theirs", {}), ("fused", dict(save_original_format=False))):
        model.save_pretrained(tmp_path / name, **options)
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    apart, together = (
        named_leaves(read_checkpoint(tmp_path / name).params) for name in ("theirs", "fused")
    )
    assert apart.keys() == together.keys()
    assert all(np.array_equal(apart[name], together[name]) for name in apart)


def test_a_folder_with_a_tokenizer_keeps_it(tmp_path, capsys):
    """Texts are tokenized as transformers does, and the file comes back byte for byte.

    Ids of the table beyond the tokenizer have no text, and are never chosen.
    """
    tokenizers = pytest.importorskip("tokenizers")
    model = theirs("qwen3", vocab_size=400)
    model.save_pretrained(tmp_path / "theirs")
    folder = tokenizer_folder(tmp_path / "theirs", "qwen")
    ours, back = switchx.load(str(converted(tmp_path))), tmp_path / "back"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    ends = list(ours.vocabulary.eos_ids)
    prompt = "hello there 日本"
    ids, size = tokenizer.encode(prompt).ids, ours.vocabulary.size
    unknown = list(range(size, 400))
    assert f"has no texts for ids {size} to 399, which are never" in capsys.readouterr().err
    assert max(their_texts(model, ends, [ids])[0]) >= size
    for way in ({"temperature": 100.0}, {"beam_size": 3}):
        (tokens,) = ours.generate([ids], max_new_tokens=40, **way)
        assert max(tokens) < size
    (ids,) = their_texts(model, ends, [ids], suppress_tokens=unknown)
    assert ours.generate([prompt], max_new_tokens=NEW_TOKENS) == [ours.vocabulary.decode(ids)]
    assert main(["convert", "--to=huggingface", str(tmp_path / "run"), str(back)]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (back / name).read_bytes()
    generation = json.loads((back / "generation_config.json").read_text())
    assert generation["eos_token_id"] == ends and len(ends) == 2
    said = json.loads((folder / "generation_config.json").read_text())
    assert generation["pad_token_id"] == said["pad_token_id"] in ends
    assert generation["bos_token_id"] == 1 != ours.vocabulary.start_id
    theirs("qwen3", vocab_size=size - 1).save_pretrained(folder)
    with refused(f"tokenizer.json has ids up to {size - 1}, the model has {size - 1}"):
        read_checkpoint(folder)
