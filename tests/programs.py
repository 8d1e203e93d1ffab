# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of small runs as text, and which of them differ from another commit's.

  python tests/programs.py BEFORE          in the folder of one checkout
  python tests/programs.py AFTER           in that of another
  python tests/programs.py --compare BEFORE AFTER

A run trains one step on eight simulated devices, for each file of configs/meshes and
configs/storage that they can build; others generate. What JAX has compiled by then, from the
first parameters to evaluation, is written as optimized HLO without names: those of modules,
files, functions and Python variables. It goes by commands alone, so that code may move.
"""

import argparse
import collections
import contextlib
import difflib
import fnmatch
import hashlib
import io
import os
import pathlib
import random
import re
import sys
import tempfile
import time

DEVICES = 8
ROOT = pathlib.Path.cwd()
# Programs of fewer lines are single operations outside of steps; they are counted.
LEAST_LINES = 60
DIFFERENT_LINES = 20

TINY = [
    f"--gin.{each}"
    for each in (
        "FILES=text.txt", "TextFiles.max_characters=500", "VOCAB_SIZE=512", "INPUTS_LENGTH=32",
        "TARGETS_LENGTH=16", "BATCH_SIZE=16", "TRAIN_STEPS=1", "WARMUP_STEPS=10",
        "TrainingJob.eval_batches=1", "ModelConfig.d_model=16", "ModelConfig.d_ff=32",
        "ModelConfig.num_heads=8", "ModelConfig.d_head=4", "NUM_EXPERTS=8",
        "SwitchConfig.every=1", "SwitchConfig.group_size=32",
    )
]  # fmt: skip
STACKS = ("encoder", "decoder")
GENERATE = ["generate", "--input=lines.txt", "--max_new_tokens=4"]


def training_runs() -> dict[str, tuple[int, list[str]]]:
    """Name -> (devices, arguments of `switchx`)."""

    def train(name, mesh, *files, blocks=1):
        files = ["runs/pretrain_tiny", "tasks/text_span_corruption", f"meshes/{mesh}", *files]
        blocks = [f"--gin.ModelConfig.num_{stack}_layers={blocks}" for stack in STACKS]
        gin_files = [f"--gin_file=configs/{file}.gin" for file in files]
        words = ["train", *gin_files, *TINY, *blocks, f"--model_dir={name}"]
        return {"one_device": 1, "model": 4}.get(mesh, DEVICES), words

    found = {}
    for path in sorted(ROOT.glob("configs/meshes/*.gin")):
        # Two stages have a block each.
        blocks = 2 if re.search(r"MeshSpec\.pipe = %", path.read_text()) else 1
        name = f"mesh_{path.stem}"
        found[name] = train(name, path.stem, blocks=blocks)
    for path in sorted(ROOT.glob("configs/storage/*.gin")):
        for mesh in ("one_device", "data_expert"):
            name = f"storage_{path.stem}_{mesh}"
            # Two slots are for two periods.
            found[name] = train(name, mesh, f"storage/{path.stem}", blocks=2)
    return found


def decoding_runs() -> dict[str, tuple[int, list[str]]]:
    """The same, of the model of `mesh_one_device`."""
    run = "--model_dir=mesh_one_device"
    return {
        "decode_greedy": (1, [*GENERATE, run]),
        "decode_beams": (1, [*GENERATE, run, "--beam_size=2"]),
        "decode_samples": (1, [*GENERATE, run, "--temperature=0.8", "--top_p=0.9"]),
        "decode_mesh": (DEVICES, [*GENERATE, run, "--mesh=expert=2,model=2"]),
        "decode_slots": (1, [*GENERATE, run, "--expert_slots=2"]),
        "quantize": (1, ["quantize", run, "--output=int4", "--bits=4"]),
        "decode_int4": (1, [*GENERATE, "--model_dir=int4"]),
    }


def write(folder: pathlib.Path, pattern: str) -> None:
    """Runs what fits the pattern, and the run that others read; writes a file a program."""
    sys.path.insert(0, str(ROOT))
    # They are read when JAX is imported.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0 "
        "--xla_cpu_parallel_codegen_split_count=1"
    )
    import jax
    from jax._src import compiler

    from switchx.cli.main import main

    folder.mkdir(parents=True)
    jax.config.update("jax_enable_compilation_cache", False)
    compile_one, executables, jax_devices = compiler.backend_compile_and_load, [], jax.devices

    def compile_and_keep(*arguments, **options):
        executables.append(compile_one(*arguments, **options))
        return executables[-1]

    compiler.backend_compile_and_load = compile_and_keep
    for name, (devices, words) in (training_runs() | decoding_runs()).items():
        if not fnmatch.fnmatch(name, pattern) and name not in ("mesh_one_device", "quantize"):
            continue
        executables.clear()
        jax.devices = lambda *backend, number=devices: jax_devices(*backend)[:number]
        began, said = time.monotonic(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main(words)
        if status:
            raise SystemExit(f"{name}: switchx {' '.join(words)}\n{said.getvalue()}")
        texts = [nameless(each.hlo_modules()[0].to_string()) for each in executables]
        texts = [text for text in texts if text.count("\n") >= LEAST_LINES]
        for i, text in enumerate(texts):
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            (folder / f"{name}.{i:02}.{digest}.txt").write_text(text)
        small = len(executables) - len(texts)
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{name}: {len(texts)} programs, {small} small ones left out, {took}", flush=True)


def nameless(hlo: str) -> str:
    """A module's text, with numbers in the order of appearance for names."""
    header, _, rest = hlo.partition("\n")
    # Tables of files and functions stand before the first computation.
    body = rest[re.search(r"^(ENTRY )?%[\w.-]+ \(", rest, re.MULTILINE).start() :]
    body = re.sub(r', metadata=\{(?:[^{}"]|"(?:\\.|[^"\\])*")*\}', "", body)
    body = re.sub(r"^(ENTRY )?(%[\w.-]+) \(.*\) -> (.*) \{$", r"\1\2 -> \3 {", body, flags=re.M)
    numbers: dict[str, str] = {}
    body = re.sub(r"%[\w.-]+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), body)
    return re.sub(r"^HloModule [^,]+", "HloModule", header) + "\n" + body


def compare(before: pathlib.Path, after: pathlib.Path) -> int:
    """Prints which runs have other programs; 1 if any has."""
    found = []
    for folder in (before, after):
        of_runs = collections.defaultdict(dict)
        for path in sorted(folder.glob("*.txt")):
            name, number, digest, _ = path.name.split(".")
            of_runs[name][number, digest] = path
        found.append(of_runs)
    differing = 0
    for name in sorted(found[0].keys() | found[1].keys()):
        # In any order: two that are compiled the other way round are the same programs.
        digests = [collections.Counter(digest for _, digest in of[name]) for of in found]
        if digests[0] == digests[1]:
            print(f"{name}: {digests[0].total()} programs, identical")
            continue
        differing += 1
        lost, new = digests[0] - digests[1], digests[1] - digests[0]
        print(
            f"{name}: {lost.total()} programs are not in {after}, {new.total()} are new there"
        )
        paths = [
            next((path for (_, digest), path in of[name].items() if digest in only), None)
            for of, only in zip(found, (lost, new), strict=True)
        ]
        if all(paths):
            texts = [path.read_text().splitlines() for path in paths]
            lines = difflib.unified_diff(*texts, *map(str, paths), n=1, lineterm="")
            print(*(f"  {line:.200}" for line in list(lines)[:DIFFERENT_LINES]), sep="\n")
    print(f"{differing} of {len(found[0].keys() | found[1].keys())} runs differ")
    return int(differing > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--compare", action="store_true", help="two folders")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of runs, as 'mesh_*'")
    arguments = parser.parse_args()
    folders = [folder.absolute() for folder in arguments.folders]
    if arguments.compare:
        sys.exit(compare(*folders))
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        os.environ["XDG_CACHE_HOME"] = work
        draw = random.Random(0)  # as many tokens each time, so as many rows and lengths
        words = ["".join(draw.choices("abcdefghijklmnop", k=5)) for _ in range(3_000)]
        texts = (" ".join(words[i : i + 50]) for i in range(0, len(words), 50))
        pathlib.Path("text.txt").write_text("\n\n".join(texts))
        pathlib.Path("lines.txt").write_text("a gate\nan expert\n")
        write(*folders, arguments.only)
