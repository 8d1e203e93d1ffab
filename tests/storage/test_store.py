# SPDX-License-Identifier: Apache-2.0
"""Stores and their snapshots: what is written is read, what is damaged is named."""

import errno
import json
import logging
import os
import resource
import shutil
import types

import numpy as np
import pytest

from switchx.storage import snapshot as snapshots
from switchx.storage.record import ArrayType, Record, RecordError, StoreError, StoreLayout
from switchx.storage.snapshot import MANIFEST, Snapshot, part_of, parts_of
from switchx.storage.store import RecordStore, process_folder, remove_stores
from switchx.whole_folders import checksum_of, damages, num_bytes
from tests.data.refusals import refused
from tests.storage.stored import LAYOUT, TYPES, is_same, record

KEYS = range(LAYOUT.num_keys)


@pytest.fixture
def store(tmp_path):
    """A store whose records have had one update, and a snapshot `1` of it."""
    with RecordStore(tmp_path / "store", LAYOUT) as store:
        write_all(store, 1)
        store.snapshot(tmp_path / "1")
        yield store


def write_all(store, updates):
    for key in KEYS:
        store.write(key, record(key, updates))


def all_are(store, updates) -> bool:
    return all(is_same(store.read(key).result(), record(key, updates)) for key in KEYS)


def file_of(tmp_path, key):
    return tmp_path / "store" / "records" / LAYOUT.name(key)


def test_names_and_bytes_are_counted(store, tmp_path):
    assert LAYOUT.name(4) == "decoder_3/00001"
    assert LAYOUT.record_bytes == 15 * 4 + 15 * 2 + 15 * 4 + 4
    sizes = num_bytes(tmp_path / "store" / "records")
    assert (store.bytes_read, store.bytes_written) == (0, sizes)
    assert all_are(store, 1)
    assert (store.bytes_read, store.bytes_written) == (sizes, sizes)


# Reads and writes.


def test_a_read_sees_the_writes_that_were_called_before(store):
    futures = []
    for updates in range(2, 12):
        for key in KEYS:
            store.write(key, record(key, updates))
            futures.append((store.read(key), record(key, updates)))
    assert all(is_same(future.result(), expected) for future, expected in futures)


def test_one_thread_is_enough_for_reads_behind_writes(tmp_path):
    with RecordStore(tmp_path / "store", LAYOUT, num_threads=1) as store:
        write_all(store, 1)
        assert all_are(store, 1)


def test_a_record_of_another_model_is_not_written(store):
    arrays = record(0, 1).arrays | {"params/w_in_DF": np.zeros((4, 5), np.float32)}
    with pytest.raises(RecordError, match=r"encoder_1/00000.*float32\[4,5\]"):
        store.write(0, Record(arrays, 2))
    assert all_are(store, 1)


# Damage in the store.


def change(path, change_bytes):
    """Replaces a file, as links to it are others' copies."""
    data = change_bytes(path.read_bytes())
    path.unlink()
    path.write_bytes(data)


def flipped(data):
    return data[:200] + bytes([data[200] ^ 4]) + data[201:]


@pytest.mark.parametrize(
    ("change_bytes", "words"),
    [(flipped, "bytes have changed"), (lambda data: data[:99], "it has 99 bytes of")],
)
def test_a_damaged_record_is_named_and_not_loaded(store, tmp_path, change_bytes, words):
    change(file_of(tmp_path, 4), change_bytes)
    with pytest.raises(RecordError, match=f"decoder_3/00001: .*{words}.*last checkpoint"):
        store.read(4).result()
    assert is_same(store.read(3).result(), record(3, 1))


def test_an_older_exchanged_or_missing_record_is_named(store, tmp_path):
    old = file_of(tmp_path, 4).read_bytes()
    store.write(4, record(4, 2)).result()
    change(file_of(tmp_path, 4), lambda _: old)
    with pytest.raises(RecordError, match="whole, but not the one that was written last"):
        store.read(4).result()
    data = file_of(tmp_path, 1).read_bytes()
    change(file_of(tmp_path, 4), lambda _: data)
    with pytest.raises(RecordError, match="of 'encoder_1/00001', not of 'decoder_3/00001'"):
        store.read(4).result()
    file_of(tmp_path, 4).unlink()
    with pytest.raises(RecordError, match="decoder_3/00001: it is missing"):
        store.read(4).result()


# Writes that fail.


def test_a_write_that_the_system_refuses_ends_the_store(store, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        error = store.write(4, record(4, 2)).exception()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(error, StoreError) and error.errno == errno.EFBIG
    assert "decoder_3/00001" in str(error) and "are free" in str(error)
    for call in (store.drain, lambda: store.read(0), lambda: store.snapshot(tmp_path / "2")):
        with pytest.raises(StoreError, match="failed before"):
            call()
    assert not (tmp_path / "2").exists()
    with RecordStore(tmp_path / "other", LAYOUT) as other:
        other.restore(tmp_path / "1")
        assert all_are(other, 1)


def test_a_full_disk_is_named_with_bytes_needed_and_free(store, tmp_path, monkeypatch):
    def write(name, data):
        message = f"Failed writing {name}: No space left on device [os_error_code='28']"
        raise ValueError(message)

    monkeypatch.setattr(store, "_files", types.SimpleNamespace(write=write))
    error = store.write(0, record(0, 2)).exception()
    size = file_of(tmp_path, 0).stat().st_size
    assert error.errno == errno.ENOSPC
    assert f"needs {size:,} bytes" in str(error) and "are free" in str(error)


def test_any_error_of_a_write_that_nobody_waits_for_is_raised_later(store, monkeypatch):
    def write(name, data):
        raise MemoryError("none left")

    monkeypatch.setattr(store, "_files", types.SimpleNamespace(write=write))
    store.write(0, record(0, 2))
    with pytest.raises(StoreError, match="failed before: none left"):
        store.drain()


# Snapshots.


def test_a_snapshot_is_links_and_later_writes_leave_it_as_it_is(store, tmp_path):
    before = {key: (tmp_path / "1" / LAYOUT.name(key)).stat().st_ino for key in KEYS}
    assert before == {key: file_of(tmp_path, key).stat().st_ino for key in KEYS}
    write_all(store, 2)
    transfer = store.snapshot(tmp_path / "2")
    assert transfer.copied_bytes == 0
    assert transfer.linked_bytes == num_bytes(tmp_path / "store" / "records")
    for updates in (1, 2):
        store.restore(tmp_path / str(updates))
        assert all_are(store, updates)


def test_manifests_are_those_of_all_checked_folders(store, tmp_path):
    content = json.loads((tmp_path / "1" / MANIFEST).read_text())
    assert len(content["files"]) == len(KEYS)
    assert list(damages(tmp_path / "1", content["files"], "crc32")) == []
    change(tmp_path / "1" / LAYOUT.name(4), flipped)
    (damage,) = damages(tmp_path / "1", content["files"], "crc32")
    assert "decoder_3/00001 has changed" in damage


def test_a_snapshot_reads_no_record(store, tmp_path, monkeypatch):
    monkeypatch.setattr("switchx.whole_folders._of_file", None)
    store.snapshot(tmp_path / "2")
    store.restore(tmp_path / "2")
    assert all_are(store, 1)


def test_a_snapshot_of_records_that_are_not_there_is_refused(tmp_path):
    with RecordStore(tmp_path / "store", LAYOUT) as store:
        store.write(1, record(1, 1))
        with pytest.raises(RecordError, match=r"encoder_1/00000, .*\(5 of 6 are missing\)"):
            store.snapshot(tmp_path / "1")
    assert not (tmp_path / "1").exists()


def test_a_snapshot_is_not_written_over(store, tmp_path):
    with pytest.raises(ValueError, match="exists"):
        store.snapshot(tmp_path / "1")
    store.restore(tmp_path / "1")
    write_all(store, 2)
    assert all_are(store, 2)
    store.restore(tmp_path / "1")
    assert all_are(store, 1)


def test_processes_that_store_parts_are_restored_by_one_and_by_others(tmp_path):
    parts = [KEYS[:2], KEYS[2:]]
    for number, keys in enumerate(parts):
        with RecordStore(tmp_path / f"store_{number}", LAYOUT, keys) as store:
            for key in keys:
                store.write(key, record(key, 5))
            store.snapshot(tmp_path / f"part_{number}")
    folders = [tmp_path / "part_0", tmp_path / "part_1"]
    with RecordStore(tmp_path / "one", LAYOUT) as store:
        store.restore(*folders)
        assert all_are(store, 5)
    with RecordStore(tmp_path / "other", LAYOUT, KEYS[1:4]) as store:
        store.restore(*folders)
        assert is_same(store.read(2).result(), record(2, 5))
        with pytest.raises(RecordError, match="no record encoder_1/00002"):
            store.restore(folders[0])


def test_parts_of_processes_are_one_snapshot(tmp_path):
    folder, parts = tmp_path / "snapshot", [KEYS[:2], KEYS[2:]]
    for index, keys in enumerate(parts):
        with RecordStore(process_folder(tmp_path / "stores", index), LAYOUT, KEYS) as store:
            for key in KEYS:
                store.write(key, record(key, 5))
            store.snapshot(part_of(folder, index, 2), keys)
        if index == 0:
            with pytest.raises(RecordError, match="has process_0_of_2, not a part of each"):
                parts_of(folder)
    snapshot = Snapshot(folder)
    assert all(is_same(snapshot.read(key), record(key, 5)) for key in KEYS)
    of_one = {f"process_0_of_2/{LAYOUT.name(key)}" for key in parts[0]}
    assert of_one < snapshot.files.keys() and len(snapshot.files) == len(KEYS)
    with RecordStore(tmp_path / "one", LAYOUT) as store:
        store.restore(*parts_of(folder))
        assert all_are(store, 5)
    (folder / "process_1_of_2" / LAYOUT.name(KEYS[-1])).unlink()
    with pytest.raises(RecordError, match="process_1_of_2/.*it is missing"):
        snapshot.read(KEYS[-1])


def test_stores_of_processes_stay_apart(tmp_path):
    first, second, third = (process_folder(tmp_path / "stores", i) for i in range(3))
    with (
        RecordStore(first, LAYOUT, KEYS[:2]) as store,
        RecordStore(second, LAYOUT, KEYS[2:]),
        refused("is the store of another run that is not done"),
    ):
        store.write(0, record(0, 1)).result()
        RecordStore(third, LAYOUT).close()
        remove_stores(tmp_path / "stores", first=1)  # the second is in use
        assert second.is_dir() and not third.exists()
        RecordStore(first, LAYOUT)
    with RecordStore(first, LAYOUT):
        remove_stores(tmp_path / "stores", first=1)
    assert sorted(path.name for path in first.iterdir()) == ["records", "store.lock"]


# On another file system.


@pytest.fixture
def no_links(monkeypatch):
    """`os.link` of the third and later files fails as between two file systems."""
    link, calls = os.link, []

    def fail(source, target):
        calls.append(source)
        if len(calls) > 2:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(source, target)

    monkeypatch.setattr(snapshots.os, "link", fail)
    return calls


def test_across_file_systems_records_are_copied_and_it_is_said(
    store, tmp_path, no_links, caplog
):
    with caplog.at_level(logging.INFO):
        transfer = store.snapshot(tmp_path / "2")
    size = file_of(tmp_path, 0).stat().st_size
    assert (transfer.linked_bytes, transfer.copied_bytes) == (2 * size, 4 * size)
    assert f"copying {4 * size:,} bytes" in caplog.text and "cross-device" in caplog.text
    no_links.clear()
    write_all(store, 2)
    assert store.restore(tmp_path / "2").copied_bytes == 4 * size
    assert all_are(store, 1)


def test_without_space_for_copies_nothing_is_left(store, tmp_path, no_links, monkeypatch):
    usage = types.SimpleNamespace(free=7)
    monkeypatch.setattr(snapshots.shutil, "disk_usage", lambda path: usage)
    size = file_of(tmp_path, 0).stat().st_size
    with pytest.raises(StoreError, match=f"{4 * size:,} bytes are left, 7 are free") as error:
        store.snapshot(tmp_path / "2")
    assert error.value.errno == errno.ENOSPC
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "store"]
    assert all_are(store, 1)


def test_a_damaged_record_is_not_copied(store, tmp_path, no_links):
    change(file_of(tmp_path, 5), flipped)
    with pytest.raises(RecordError, match="decoder_3/00002: its bytes have changed"):
        store.snapshot(tmp_path / "2")
    assert not (tmp_path / "2").exists()


# Snapshots that cannot be restored.


def cut(folder):
    change(folder / LAYOUT.name(4), lambda data: data[:-1])


def of_no_layout(data: bytes) -> bytes:
    """A manifest without layers, whose checksum fits."""
    content = {"files": json.loads(data)["files"]}
    return json.dumps(content | {"crc32": checksum_of(content, "crc32")}).encode()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "has no manifest.json"),
        (lambda folder: change(folder / MANIFEST, flipped), "manifest.json is damaged"),
        (lambda folder: change(folder / MANIFEST, of_no_layout), "describes no layout"),
        (lambda folder: (folder / LAYOUT.name(4)).unlink(), "decoder_3/00001 is missing"),
        (cut, "decoder_3/00001 has .* bytes, not"),
    ],
)
def test_a_snapshot_that_is_not_whole_changes_nothing(store, tmp_path, damage, words):
    write_all(store, 2)
    damage(tmp_path / "1")
    with pytest.raises(RecordError, match=words):
        store.restore(tmp_path / "1")
    assert all_are(store, 2)


def test_a_flipped_bit_in_a_snapshot_is_found_when_the_record_is_read(store, tmp_path):
    change(tmp_path / "1" / LAYOUT.name(4), flipped)
    store.restore(tmp_path / "1")
    with pytest.raises(RecordError, match="decoder_3/00001: its bytes have changed"):
        store.read(4).result()


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (StoreLayout(LAYOUT.layers, 4), "number of experts: 3, expected 4"),
        (StoreLayout({"encoder 1": TYPES}, 3), "layers: .*decoder 3.*expected"),
        (
            StoreLayout(
                {"encoder 1": TYPES, "decoder 3": {"w": ArrayType((2,), "int8")}}, 3
            ),
            "arrays of decoder 3: .*float32.*expected .*int8",
        ),
    ],
)  # fmt: skip
def test_a_snapshot_of_another_model_is_refused(store, tmp_path, layout, words):
    with (
        RecordStore(tmp_path / "other", layout) as other,
        pytest.raises(RecordError, match=f"another model or optimizer: its {words}"),
    ):
        other.restore(tmp_path / "1")


# Opening.


def test_a_folder_that_is_no_store_is_left_alone(tmp_path):
    folder = tmp_path / "mine"
    (folder / "records").mkdir(parents=True)
    (folder / "records" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not a store of experts"):
        RecordStore(folder, LAYOUT)
    assert (folder / "records" / "thesis.tex").exists()


def test_a_store_that_was_left_is_opened_empty(tmp_path):
    with RecordStore(tmp_path / "store", LAYOUT) as store:
        write_all(store, 1)
    with RecordStore(tmp_path / "store", LAYOUT) as store:
        assert "never written" in str(store.read(0).exception())
    assert num_bytes(tmp_path / "store") == 0


def test_a_path_may_go_up(tmp_path):
    (tmp_path / "runs").mkdir()
    with RecordStore(tmp_path / "runs" / ".." / "store", LAYOUT) as store:
        write_all(store, 1)
        assert all_are(store, 1)
    assert (tmp_path / "store").is_dir()
