# SPDX-License-Identifier: Apache-2.0
"""`convert --from=peft` with a base that the adapters name, and with another; without PEFT."""

import json

import jax
import pytest

from switchx.checkpoint.run_folder import RunFolder, write_converted
from switchx.data.tokenizers import ByteVocabulary
from switchx.interop.peft import CONFIG, write_adapters
from switchx.models.adapters import LoRASpec, init_adapters
from switchx.models.config import ModelConfig
from switchx.models.params import init_params

# The block of Llama.
CONFIG_OF_BASE = ModelConfig(
    "decoder_only", 384, 16, 24, 2, 8, 1, activation="swiglu", positions="rotary",
    scale_attention=True, scale_tied_logits=False, scan_layers=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("named", "is_same"),
    [("hub/theirs", True), ("{base}", True), (None, True), ("hub/others", False)],
)
def test_a_base_of_another_name_is_said(named, is_same, tmp_path, cli):
    base, adapters, key = RunFolder(tmp_path / "base"), tmp_path / "adapters", jax.random.key(0)
    adapters.mkdir()
    params = init_params(CONFIG_OF_BASE, key)
    base.create()
    write_converted(base, CONFIG_OF_BASE, params, ByteVocabulary(), "huggingface: theirs")
    spec = LoRASpec(str(base.path), 0, rank=2)
    trained = init_adapters(CONFIG_OF_BASE, spec, key)
    write_adapters(adapters, CONFIG_OF_BASE, trained, spec, str(base.path))
    values = json.loads((adapters / CONFIG).read_text())
    values["base_model_name_or_path"] = named and named.format(base=base.path)
    (adapters / CONFIG).write_text(json.dumps(values))
    words = ["convert", "--from=peft", adapters, tmp_path / "run", f"--base={base.path}"]
    said = cli(*words).err
    of_names = f"name {named!r} as their base, and --base={base.path} is of 'theirs': only the"
    assert (of_names in said) != is_same and ("as their base" in said) != is_same
