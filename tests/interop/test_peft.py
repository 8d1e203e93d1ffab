# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's format, through the commands: PEFT on small models is the oracle."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import switchx
from switchx.checkpoint.adapter_run import AdapterRecord
from switchx.checkpoint.restore import checkpoint_fingerprint
from switchx.checkpoint.run_folder import RunFolder, read_model_config, write_converted
from switchx.cli.main import main
from switchx.data.vocabularies import load_vocabulary
from switchx.models.adapters import LoRASpec, abstract_adapters
from switchx.models.params import abstract_params
from tests.interop import decoder_models, transformers_models

pytestmark = [pytest.mark.hf, pytest.mark.slow]
peft = pytest.importorskip("peft")

TOKENS = np.array([[5, 9, 11, 4, 7], [6, 8, 31, 3, 17]])


def base_of(case: str, folder):
    """A random model of transformers, and the run folder that it is converted to."""
    if case in decoder_models.CASES:
        model = decoder_models.theirs(case)
    else:
        model = transformers_models.build(*transformers_models.MODELS[case])
    model.eval().save_pretrained(folder / "theirs")
    words = ["convert", "--from=huggingface", str(folder / "theirs"), str(folder / "base")]
    assert main(words) == 0
    return model, RunFolder(folder / "base")


def their_logits(model):
    import torch

    tokens = {"input_ids": torch.tensor(TOKENS)}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = torch.tensor(TOKENS)
    with torch.no_grad():
        return model(**tokens).logits.numpy()


def our_logits(folder):
    model = switchx.load(str(folder))
    given = (TOKENS, TOKENS) if model.config.is_encoder_decoder else (TOKENS,)
    return np.asarray(model.logits(*given))


def require_close(ours, theirs, plain):
    assert np.abs(ours - plain).max() > 0.1  # the adapters do something
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def write_run(base: RunFolder, folder, spec: LoRASpec) -> None:
    """A run of random adapters."""
    config = dataclasses.replace(read_model_config(base), scan_layers=False)
    shapes = abstract_adapters(abstract_params(config), spec)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(lambda leaf: np.float32(rng.normal(size=leaf.shape) * 0.2), shapes)
    folder.mkdir()
    vocabulary = load_vocabulary(base.root)
    write_converted(RunFolder(folder), config, adapters, vocabulary, "test", shapes=shapes)
    found = checkpoint_fingerprint(base, spec.step, vocabulary)
    AdapterRecord(spec, found).write(RunFolder(folder))


@pytest.mark.parametrize(
    ("case", "targets", "is_shared"),
    [
        ("llama", None, False),
        ("t5_1_1", None, False),
        ("mixtral", ("attention", "experts"), False),
        ("qwen3_moe", ("experts",), True),
        ("ernie4_5_moe", ("attention",), False),
        ("switch_all_sparse", None, False),
    ],
)
def test_peft_computes_what_a_run_of_adapters_does(case, targets, is_shared, tmp_path, capsys):
    model, base = base_of(case, tmp_path)
    plain = our_logits(base.path)
    spec = LoRASpec(str(base.path), 0, 3, 5.0, targets=targets, shared_by_experts=is_shared)
    write_run(base, tmp_path / "run", spec)
    words = ["convert", "--to=peft", str(tmp_path / "run")]
    assert main([*words, str(tmp_path / "peft")]) == 0
    assert "which PEFT cannot open by itself" in capsys.readouterr().err
    named = str(tmp_path / "theirs")
    assert main([*words, str(tmp_path / "named"), f"--base={named}"]) == 0
    assert peft.PeftConfig.from_pretrained(tmp_path / "named").base_model_name_or_path == named
    assert "cannot open" not in capsys.readouterr().err
    with_adapters = peft.PeftModel.from_pretrained(model, tmp_path / "peft").eval()
    ours = our_logits(tmp_path / "run")
    require_close(ours, their_logits(with_adapters), plain)
    words = ["convert", "--from=peft", str(tmp_path / "peft"), str(tmp_path / "again")]
    assert main([*words, f"--base={base.path}"]) == 0
    np.testing.assert_allclose(our_logits(tmp_path / "again"), ours, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "modules"),
    [
        ("llama", ["q_proj", "v_proj", "down_proj"]),
        ("t5", ["q", "v"]),
        ("ernie4_5_moe", ["q_proj", "k_proj"]),
    ],
)
def test_what_peft_saved_is_read(case, modules, tmp_path, capsys):
    import torch

    model, base = base_of(case, tmp_path)
    plain = our_logits(base.path)
    kind = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=modules, task_type=kind, use_rslora=case == "llama"
    )
    theirs = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    theirs.save_pretrained(tmp_path / "peft")
    words = ["convert", "--from=peft", str(tmp_path / "peft"), str(tmp_path / "run")]
    assert main(words) == 2
    assert "--from=peft needs --base=DIR" in capsys.readouterr().err
    assert main([*words, f"--base={base.path}"]) == 0
    assert "without adapters there, and with fresh ones here" in capsys.readouterr().err
    require_close(our_logits(tmp_path / "run"), their_logits(theirs), plain)
    spec = AdapterRecord.read(RunFolder(tmp_path / "run")).spec
    assert spec.rank == 4 and "attention" in spec.targets and len(spec.targets) < 3
    file = tmp_path / "peft/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    assert main([*words[:-1], str(tmp_path / "x"), f"--base={base.path}"]) == 2
    assert "use_dora=True cannot be read" in capsys.readouterr().err
    values = json.loads(file.read_text()) | {"use_dora": False, "init_lora_weights": "pissa"}
    file.write_text(json.dumps(values))
    assert main([*words[:-1], str(tmp_path / "x"), f"--base={base.path}"]) == 2
    assert "init_lora_weights='pissa' cannot be read" in capsys.readouterr().err
    values["init_lora_weights"] = True
    for wrong in ({"r": 10**9}, {"r": 4.0}, {"lora_alpha": "x"}, {"lora_dropout": "0.1"}):
        file.write_text(json.dumps(values | wrong))
        assert main([*words[:-1], str(tmp_path / "x"), f"--base={base.path}"]) == 2
        assert "have [(4,)] rows; expected" in capsys.readouterr().err
    file.write_text(json.dumps(values))
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    head = {f"base_model.model.lm_head.lora_{x}.weight": np.ones((4, 4)) for x in "AB"}
    save_file(tensors | head, tmp_path / "peft/adapter_model.safetensors", {"format": "pt"})
    assert main([*words[:-1], str(tmp_path / "x"), f"--base={base.path}"]) == 2
    assert "lm_head.lora_A.weight'], adapters of embeddings" in capsys.readouterr().err
    name, half = sorted(tensors)[-1], dict(tensors)
    del half[name.replace("lora_B", "lora_A")]
    save_file(half, tmp_path / "peft/adapter_model.safetensors", {"format": "pt"})
    assert main([*words[:-1], str(tmp_path / "x"), f"--base={base.path}"]) == 2
    assert "lora_A.weight" in capsys.readouterr().err
    tensors[name][1, 2] = np.nan
    save_file(tensors, tmp_path / "peft/adapter_model.safetensors", {"format": "pt"})
    assert main([*words[:-1], str(tmp_path / "x"), f"--base={base.path}"]) == 2
    name = name.removeprefix("base_model.model.")
    said = f"1 of the {tensors[f'base_model.model.{name}'].size} numbers of the tensor {name} "
    assert f"{said}are not finite" in capsys.readouterr().err


def test_adapters_of_granite_do_not_fit_weights_with_its_factors(tmp_path, capsys):
    """Those of a run beside them do, and come back."""
    model, base = base_of("granitemoe", tmp_path)
    write_run(base, tmp_path / "run", LoRASpec(str(base.path), 0, 3, targets=("attention",)))
    assert main(["convert", "--to=peft", str(tmp_path / "run"), str(tmp_path / "peft")]) == 0
    words = ["convert", "--from=peft", str(tmp_path / "peft"), str(tmp_path / "again")]
    assert main([*words, f"--base={base.path}"]) == 0
    ours = our_logits(tmp_path / "run")
    np.testing.assert_allclose(our_logits(tmp_path / "again"), ours, rtol=1e-6, atol=1e-6)
    # Beside Granite's own weights they are another model.
    to_peft = ["convert", "--to=peft", str(tmp_path / "run"), str(tmp_path / "y")]
    (tmp_path / "granite").mkdir()
    model.config.save_pretrained(tmp_path / "granite")
    for named in ("ibm-granite/granite", str(tmp_path / "granite")):
        assert main([*to_peft, f"--base={named}"]) == 2
        assert "do not fit its own; give what --to=huggingface" in capsys.readouterr().err
    assert main(["convert", "--to=huggingface", str(base.path), str(tmp_path / "written")]) == 0
    assert main([*to_peft, f"--base={tmp_path / 'written'}"]) == 0
    theirs = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    theirs.save_pretrained(tmp_path / "theirs_peft")
    words = ["convert", "--from=peft", str(tmp_path / "theirs_peft"), str(tmp_path / "x")]
    assert main([*words, f"--base={base.path}"]) == 2
    assert "has the factors of granitemoe" in capsys.readouterr().err


# A step on documents of token ids.
STEP = (
    "--gin_file=configs/runs/finetune.gin", "--gin_file=configs/tasks/text_causal_lm.gin",
    *(f"--gin.{binding}" for binding in (
        "BATCH_SIZE=8", "INPUTS_LENGTH=8", "TARGETS_LENGTH=8", "TRAIN_STEPS=1",
        "CHECKPOINT_EVERY=1", "TextFiles.validation_fraction=0.5",
    )),
)  # fmt: skip


def test_what_is_made_of_granite_has_its_factors(tmp_path, capsys):
    """Training on, fewer experts and merged adapters: its own adapters fit none of them."""
    model, base = base_of("granitemoe", tmp_path)
    rows = np.random.default_rng(0).integers(3, 90, (60, 15)).tolist()
    lines = [json.dumps({"text": " ".join(map(str, row))}) for row in rows]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    theirs = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    theirs.save_pretrained(tmp_path / "peft")
    tuned, job = tmp_path / "tuned", [*STEP, f"--gin.FILES={tmp_path / 'docs.jsonl'}"]
    job.append(f"--gin.INIT_FROM={base.path}")
    assert main(["train", *job, f"--model_dir={tuned}"]) == 0
    words = f"--model_dir={tuned}", f"--output={tmp_path / 'fewer'}", "--experts=2"
    assert main(["reshape", *job, *words, "--reduce=drop"]) == 0
    write_run(RunFolder(tuned), tmp_path / "adapters", LoRASpec(str(tuned), 1, 3))
    words = f"--model_dir={tmp_path / 'adapters'}", f"--output={tmp_path / 'merged'}"
    assert main(["reshape", "--merge_adapter", *words]) == 0
    for name in ("tuned", "fewer", "merged"):
        words = "convert", "--from=peft", str(tmp_path / "peft"), str(tmp_path / "x")
        assert main([*words, f"--base={tmp_path / name}"]) == 2
        assert f"{name} has the factors of granitemoe" in capsys.readouterr().err, name
