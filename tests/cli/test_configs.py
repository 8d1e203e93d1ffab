# SPDX-License-Identifier: Apache-2.0
"""`switchx configs`: every file that ships, by the name that --gin_file takes."""

import json

import pytest

from switchx.cli.main import main
from switchx.gin_config.files import configs_dir


def test_every_file_is_listed_with_what_it_says_of_itself(capsys):
    assert main(["configs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        f"configs/{path.relative_to(configs_dir()).as_posix()}"
        for path in configs_dir().rglob("*.gin")
    }
    assert all(len(sentence) > 20 and "\n" not in sentence for sentence in found.values())
    large = found["configs/models/switch_large_released.gin"]
    assert large.startswith("Switch-Large as released") and large.endswith("tied logits.")
    xsum = found["configs/tasks/xsum.gin"]
    assert xsum == "XSum (Narayan et al. 2018): one-sentence summaries of news."
    assert found["configs/runs/finetune.gin"].endswith("(Switch Transformers, section 2.4)?")


@pytest.mark.parametrize(
    "pattern", ["olmoe_1b", "models/ol*", "configs/models/olmoe_1b_7b.gin"]
)
def test_parts_of_names_and_patterns_find_files(pattern, capsys):
    assert main(["configs", pattern]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("configs/models/olmoe_1b_7b.gin  OLMoE-1B-7B")


def test_a_copy_is_the_file_and_nothing_is_written_over(tmp_path, capsys):
    copy = tmp_path / "mine.gin"
    words = ["configs", "runs/pretrain_tiny.gin", f"--copy={copy}"]
    assert main(words) == 0
    assert copy.read_text() == (configs_dir() / "runs/pretrain_tiny.gin").read_text()
    assert main(words) == 2
    assert main(["configs", "runs/", f"--copy={tmp_path / 'other.gin'}"]) == 2
    assert main([*words[:2], f"--copy={tmp_path / 'no/mine.gin'}"]) == 2
    assert main(["configs", "runs/pretrain_tny.gin"]) == 2
    said = capsys.readouterr().err.splitlines()
    ways = ("a file that is not there yet", "give the whole name of one", "make it first",
            "did you mean configs/runs/pretrain_tiny.gin?")  # fmt: skip
    assert all(line.endswith(way) for line, way in zip(said, ways, strict=True))
