# SPDX-License-Identifier: Apache-2.0
"""`switchx configs`: every file that ships, by the name that --gin_file takes."""

import pytest

from switchx.gin_config.files import configs_dir


def test_every_file_is_listed_with_what_it_says_of_itself(cli):
    found = cli.json("configs", "--json")
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
def test_parts_of_names_and_patterns_find_files(pattern, cli):
    (line,) = cli("configs", pattern).out.splitlines()
    assert line.startswith("configs/models/olmoe_1b_7b.gin  OLMoE-1B-7B")


def test_a_copy_is_the_file_and_nothing_is_written_over(tmp_path, cli):
    copy, tiny = tmp_path / "mine.gin", "runs/pretrain_tiny.gin"
    cli("configs", tiny, f"--copy={copy}")
    assert copy.read_text() == (configs_dir() / tiny).read_text()
    for words, way in (
        ([tiny, f"--copy={copy}"], "a file that does not exist"),
        (["runs/", f"--copy={tmp_path / 'other.gin'}"], "give the whole name of one"),
        ([tiny, f"--copy={tmp_path / 'no/mine.gin'}"], "make it first"),
        (["runs/pretrain_tny.gin"], "did you mean configs/runs/pretrain_tiny.gin?"),
    ):
        assert cli.refused("configs", *words).endswith(f"{way}\n")
