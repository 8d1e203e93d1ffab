# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness on a converted model: the numbers of its own `hf` on transformers'.

Tasks are local files; nothing is downloaded.
"""

import functools
import json
import subprocess
import sys
import types

import numpy as np
import pytest

from switchx.cli.main import main
from tests.data.tokenizer_files import tokenizer_folder, trained
from tests.interop.decoder_models import theirs
from tests.processes import child_environment

pytestmark = pytest.mark.hf
pytest.importorskip("lm_eval", reason="needs lm_eval, of the extra harness")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

QUESTIONS = [
    {"question": "hello there", "choices": ["world", "日本", "hello hello"], "answer": 1},
    {"question": "one two three ", "choices": ["four", "the the"], "answer": 0},
    {"question": "", "choices": ["hello", "two"], "answer": 1},
]
DATA = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test",
    "metadata": {"version": 1},
}
TASKS = {
    "local_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{choices | join(' ') * 9}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "local_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}?",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(params=["qwen", "llama_2"])
def folder(request, tmp_path, monkeypatch):
    """A converted model in `run`, transformers' in `theirs`, tasks in `tasks`."""
    kind = {"qwen": "qwen3", "llama_2": "llama"}[request.param]
    theirs(kind, vocab_size=trained(request.param).get_vocab_size()).save_pretrained(
        tmp_path / "theirs"
    )
    tokenizer_folder(tmp_path / "theirs", request.param)
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps(each) + "\n" for each in QUESTIONS)
    (tmp_path / "questions.jsonl").write_text(lines)
    (tmp_path / "tasks").mkdir()
    for name, about in TASKS.items():  # JSON is YAML
        text = json.dumps({"task": name, **DATA, **about})
        (tmp_path / f"tasks/{name}.yaml").write_text(text)
    assert main(["convert", "--from=huggingface", "theirs", "run"]) == 0
    return tmp_path


def asked(lm):
    """Results of all tasks, and what was answered to each request."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path="tasks", include_defaults=False)
    found = simple_evaluate(lm, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0)
    answers = {
        name: [each["resps"] for each in samples] for name, samples in found["samples"].items()
    }
    return found["results"], answers


def test_numbers_are_those_of_transformers(folder, capsys, monkeypatch):
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    from switchx.harness import SwitchxLM

    ours = SwitchxLM("run", batch_size=2, max_length=24)
    start = ours.model.ids.start_id
    piece = None if start is None else ours.model.vocabulary.piece(start).text
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file="theirs/tokenizer.json", eos_token="<|im_end|>", bos_token=piece,
        pad_token="<|endoftext|>",
    )  # fmt: skip
    their = HFLM(
        "theirs", tokenizer=tokenizer, device="cpu", dtype="float32", batch_size=1,
        max_length=24, add_bos_token=start is not None,
    )  # fmt: skip

    # What has learnt nothing writes bytes that are no text; of them ours keeps what is whole
    # (tests/data/test_bpe.py).
    def by_library(vocabulary, ids):
        return vocabulary._tokenizer.decode(ids, skip_special_tokens=False)

    monkeypatch.setattr(type(ours.model.vocabulary), "_text", by_library)
    (want, their_answers), (got, our_answers) = asked(their), asked(ours)
    assert our_answers["local_answers"] == their_answers["local_answers"]
    for name in ("local_choices", "local_texts"):
        got_values, want_values = (
            np.hstack([np.hstack(list(map(np.hstack, each))) for each in answers[name]])
            for answers in (our_answers, their_answers)
        )
        np.testing.assert_allclose(got_values, want_values, rtol=1e-4, atol=1e-4)
    for name, metrics in want.items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert got[name][metric] == pytest.approx(value, rel=1e-4)
    capsys.readouterr()
    words = ["eval", "--model_dir=run", "--json", "--harness_path=tasks"]
    assert main([*words, "--harness=local_choices"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["local_choices"]["acc,none"] == want["local_choices"]["acc,none"]
    assert main([*words, "--harness=no_such_task"]) == 2
    assert "lm_eval has no task no_such_task" in capsys.readouterr().err
    group = {"group": "local_group", "task": ["local_choices"]}
    group["aggregate_metric_list"] = [{"metric": "acc", "weight_by_size": True}]
    (folder / "tasks/group.yaml").write_text(json.dumps(group))
    capsys.readouterr()
    assert main([*words, "--harness=local_group"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["local_group"]["acc,none"] == said["local_choices"]["acc,none"]
    assert main([*words[:-1], "--harness_path=nowhere", "--harness=local_choices"]) == 2
    assert "no folder nowhere" in capsys.readouterr().err
    # As tasks write them: a greedy choice with settings of samples, and neutral ones.
    write = functools.partial(ours._written, ["hello", "one"])
    likeliest = write({"max_gen_toks": 4})
    greedy = {"do_sample": False, "temperature": 0.0, "top_p": 0.95, "top_k": 50}
    assert write({"max_completion_tokens": 4, **greedy}) == likeliest
    sampled = {"do_sample": True, "temperature": 0.7, "max_gen_toks": 4}
    assert write({**sampled, "top_p": 1.0, "top_k": 0}) == write(sampled)
    with pytest.raises(ValueError, match="do_sample=True without a temperature"):
        write({"do_sample": True})


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("folder", ["qwen"], indirect=True)
def test_prompts_end_as_they_were_trained(folder):
    """With eos, of a decoder that learnt pairs."""
    from switchx.harness import SwitchxLM

    values = json.loads((folder / "run/config.json").read_text())
    source = {"objective": {"type": "InputsToTargets"}}
    (folder / "run/config.json").write_text(json.dumps(values | {"source": source}))
    lm = SwitchxLM(model_dir="run", batch_size=1)
    (read, wanted), encode = lm._pair("what", " is"), lm.model.vocabulary.encode
    assert read == [*lm.model.prompt(encode("what")), lm.model.ids.eos_id]
    assert wanted == encode("what is")[len(encode("what")) :]
    assert lm._inputs("what") == lm.model.prompts(["what"])[0]
    ids = {"is (": [7, 8], "is (A": [7, 9]}  # the last token spans both
    model = types.SimpleNamespace(vocabulary=types.SimpleNamespace(encode=ids.get))
    merging = types.SimpleNamespace(
        _has_encoder=False, model=model, _inputs=lambda _, read: read
    )
    assert SwitchxLM._pair(merging, "is (", "A") == ([7], [9])


def test_the_harness_has_its_own_flags_and_needs_no_network_for_local_files(folder):
    words = [*"-m switchx.harness run --model switchx --model_args".split(), "model_dir=run"]
    words += "--tasks local_choices --include_path tasks".split()
    environment = child_environment(folder, devices=1) | OFFLINE
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "local_choices" in done.stdout and "acc_norm" in done.stdout
    about = {
        "task": "far_away",
        **DATA,
        **TASKS["local_choices"],
        "dataset_path": "switchx/none",
    }
    del about["dataset_kwargs"]
    (folder / "tasks/far_away.yaml").write_text(json.dumps(about))
    words = ["eval", "--model_dir=run", "--harness_path=tasks", "--harness=far_away"]
    done = subprocess.run(
        [sys.executable, "-m", "switchx", *words], cwd=folder, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    error = done.stderr[done.stderr.index("error: ") :]
    assert "the data of far_away cannot be had" in error and "without a network, use" in error


@pytest.mark.parametrize(
    "flag",
    ["--beam_size=4", "--max_new_tokens=3", "--length_penalty=2.0", "--bootstrap=10"]
    + ["--rank_choices", "--gin.NUM_EXPERTS=3", "--step=all", "--metrics=bleu"],
)
def test_what_the_harness_does_not_read_is_refused(flag, tmp_path, capsys):
    words = ["eval", f"--model_dir={tmp_path}", flag]
    assert main([*words, "--harness=local_choices"]) == 2
    error = capsys.readouterr().err
    assert "--harness" in error and flag.partition("=")[0] in error


def test_a_folder_of_tasks_needs_the_harness(tmp_path, capsys):
    assert main(["eval", f"--model_dir={tmp_path}", "--harness_path=tasks"]) == 2
    assert "--harness_path is for --harness" in capsys.readouterr().err
