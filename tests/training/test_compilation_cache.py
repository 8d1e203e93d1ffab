# SPDX-License-Identifier: Apache-2.0
"""The persistent compilation cache: where it is by default, and what leaves it off."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchx.training.compilation_cache import compiled_programs_kept, cpu_kind
from tests.compilation import compiled_once


@pytest.fixture(autouse=True)
def no_folder_is_given(tmp_path, monkeypatch):
    """As of a user who has set nothing, but where the home is, and that all is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with compiled_once(None):
        yield


def compiled_in(shared=None, factor=3.0) -> tuple[list[str], np.ndarray]:
    """What is said where a program is compiled, and what that computes."""
    notes = []
    with compiled_programs_kept(shared, notes.append):
        result = jax.jit(lambda x: jnp.tanh(x @ x) * factor)(jnp.eye(8) / 3)
    return notes, np.asarray(result)


def test_programs_are_kept_and_read_again_bit_for_bit(tmp_path):
    folder = tmp_path / "cache" / "switchx" / "compiled"
    without = np.asarray(jax.jit(lambda x: jnp.tanh(x @ x) * 3.0)(jnp.eye(8) / 3))
    notes, first = compiled_in()
    assert notes == [f"compiled programs: kept in {folder / cpu_kind()}"]
    assert folder.stat().st_mode & 0o777 == 0o700
    kept = {path.name for path in folder.glob("cpu_*/jit__lambda*-cache")}
    assert len(kept) == 1
    assert jax.config.jax_compilation_cache_dir is None
    hits = []

    def listen(event, **about):
        hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        notes, again = compiled_in()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert "/jax/compilation_cache/cache_hits" in hits
    assert without.tobytes() == first.tobytes() == again.tobytes()


def test_a_folder_that_is_given_to_jax_stands(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "given"))
    notes, _ = compiled_in(factor=4.0)
    assert notes == [f"compiled programs: kept in {tmp_path / 'given'}"]
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "given")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name, value", [("compilation_cache_dir", ""), ("enable", False)])
def test_it_can_be_turned_off(name, value, tmp_path):
    name = "jax_enable_compilation_cache" if name == "enable" else f"jax_{name}"
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        notes, _ = compiled_in(factor=5.0)
    finally:
        jax.config.update(name, before)
    assert notes == ["compiled programs: not kept"]
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_others_may_write_is_not_used(tmp_path):
    folder = tmp_path / "cache" / "switchx" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    (note,), _ = compiled_in(factor=6.0)
    assert note == (
        f"compiled programs: not kept, as {folder} is not this user's alone to write; "
        "JAX_COMPILATION_CACHE_DIR=DIR names another folder"
    )
    assert not any(folder.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "cache").write_text("a file")
    (note,), _ = compiled_in(factor=7.0)
    assert note.startswith("compiled programs: not kept, ") and str(tmp_path) in note


def test_several_processes_keep_them_where_all_see_them_but_not_of_cpus(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    notes, _ = compiled_in(tmp_path / "run" / "compiled", factor=8.0)
    assert notes == ["compiled programs: not kept, of several processes on CPUs"]
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    notes, _ = compiled_in(tmp_path / "run" / "compiled", factor=8.0)
    assert notes == [f"compiled programs: kept in {tmp_path / 'run' / 'compiled' / cpu_kind()}"]
    assert list((tmp_path / "run" / "compiled").glob("cpu_*/jit__lambda*-cache"))


def test_a_machine_of_another_cpu_compiles_its_own(tmp_path, monkeypatch):
    compiled_in(factor=10.0)
    here = cpu_kind()
    read_text = pathlib.Path.read_text

    def other(path, **options):
        return read_text(path, **options).replace("flags\t\t:", "flags\t\t: avx1024")

    monkeypatch.setattr(pathlib.Path, "read_text", other)
    if cpu_kind() == here:
        pytest.skip("this machine has no /proc/cpuinfo of an x86 CPU")
    compiled_in(factor=10.0)
    kept = (tmp_path / "cache" / "switchx" / "compiled").glob("*/jit__lambda*-cache")
    assert {path.parent.name for path in kept} == {here, cpu_kind()}


def test_an_entry_that_a_killed_process_left_half_is_compiled_again(tmp_path):
    _, want = compiled_in(factor=9.0)
    (path,) = (tmp_path / "cache" / "switchx" / "compiled").glob("cpu_*/jit__lambda*-cache")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        _, got = compiled_in(factor=9.0)
    assert got.tobytes() == want.tobytes()
