"""The chunk store: below its limit, last used stays longest, pinned stays always."""

import contextlib
import dataclasses
import logging
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from memory_samples import IDENTITY, assert_same_chunk, examples, sample_chunk

from phasekv import InvalidArgumentError
from phasekv.memory import ChunkKey, ChunkStore, DiskTier, StoredChunk, chunk_key

UNIT = sample_chunk(0, 1).nbytes
"""Bytes of a chunk of one token; a chunk of n tokens has n times as many."""


def measured_bytes(chunk: StoredChunk) -> int:
    """Memory behind a chunk, asked from torch."""
    storages = [chunk.keys.untyped_storage(), chunk.values.untyped_storage()]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) + chunk.tokens.nbytes


# Chunks


def test_bytes_of_a_chunk_are_those_of_its_storages() -> None:
    chunk = sample_chunk(1, 7)
    assert chunk.nbytes == 7 * UNIT == 2 * chunk.keys.numel() * 4 + 7 * 4
    whole = torch.zeros(2, 100, 1, 4)
    view = dataclasses.replace(chunk, keys=whole[:, 10:17], values=whole[:, 20:27])
    assert view.nbytes == whole.nbytes + 7 * 4


def test_stored_views_do_not_keep_a_prompt_alive() -> None:
    whole = torch.randn(2, 100, 1, 4)
    chunk = dataclasses.replace(sample_chunk(1, 7), keys=whole[:, 10:17], values=whole[:, 20:27])
    store = ChunkStore(100 * UNIT)
    store.put(chunk)
    assert store.nbytes == 7 * UNIT
    whole_before = whole.clone()
    assert_same_chunk(store.get(chunk.key), chunk)
    whole.zero_()  # the engine goes on using its memory
    found = store.get(chunk.key)
    assert found is not None
    assert torch.equal(found.keys, whole_before[:, 10:17])
    assert torch.equal(found.values, whole_before[:, 20:27])


def test_two_halves_of_one_tensor_are_not_copied() -> None:
    both = torch.randn(2, 2, 7, 1, 4)
    chunk = dataclasses.replace(sample_chunk(1, 7), keys=both[0], values=both[1])
    assert chunk.nbytes == 7 * UNIT
    assert chunk.compact() is chunk


def test_a_chunk_of_one_token() -> None:
    store = ChunkStore(UNIT)
    chunk = sample_chunk(1, 1)
    store.put(chunk)
    assert_same_chunk(store.get(chunk.key), chunk)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, 2]}, "keys"),
        ({"tokens": [1, 2, -3]}, "tokens"),
        ({"position": -1}, "position"),
        ({"position": 2**31}, "position"),
        ({"keys": torch.zeros(2, 3, 4)}, "keys"),
        ({"keys": torch.zeros(2, 4, 1, 4)}, "keys"),
        ({"keys": torch.zeros(0, 3, 1, 4)}, "keys"),
        ({"values": torch.zeros(2, 3, 2, 4)}, "values"),
        ({"values": torch.zeros(2, 3, 1, 4, dtype=torch.float16)}, "values"),
        ({"values": torch.zeros(2, 3, 1, 4, device="meta")}, "values"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(
    changes: dict[str, object], argument: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        dataclasses.replace(sample_chunk(1), **changes)
    assert caught.value.argument == argument


# The store against a model of it

seeds = st.integers(0, 5)
KEYS = [sample_chunk(seed, seed + 1).key for seed in range(6)]


class StoreAgainstModel(RuleBasedStateMachine):
    """Random operations, each also done on a list and two dictionaries."""

    @initialize(capacity=st.integers(0, 20), has_disk=st.booleans(), write_behind=st.booleans())
    def begin(self, capacity: int, has_disk: bool, write_behind: bool) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.tier = DiskTier(self.directory.name, IDENTITY) if has_disk else None
        self.store = ChunkStore(capacity * UNIT, self.tier, write_behind)
        self.capacity = capacity
        self.memory: list[StoredChunk] = []  # last used last
        self.disk: dict[ChunkKey, StoredChunk] = {}
        self.pins: Counter[ChunkKey] = Counter()
        self.gone: set[ChunkKey] = set()
        self.hits = self.misses = self.evictions = self.refused = 0

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.cleanup()

    def in_memory(self, key: ChunkKey) -> StoredChunk | None:
        return next((chunk for chunk in self.memory if chunk.key == key), None)

    def is_stored(self, key: ChunkKey) -> bool:
        return self.in_memory(key) is not None or key in self.disk

    def insert(self, chunk: StoredChunk) -> None:
        pinned = [other for other in self.memory if self.pins[other.key]]
        if sum(len(other.tokens) for other in [*pinned, chunk]) > self.capacity:
            self.refused += 1
            if not self.is_stored(chunk.key):
                self.gone.add(chunk.key)
            return
        while sum(len(other.tokens) for other in [*self.memory, chunk]) > self.capacity:
            victim = next(other for other in self.memory if not self.pins[other.key])
            self.memory.remove(victim)
            self.evictions += 1
            if victim.key not in self.disk:
                self.gone.add(victim.key)
        self.memory.append(chunk)

    def forget(self, key: ChunkKey) -> None:
        self.memory = [chunk for chunk in self.memory if chunk.key != key]
        self.disk.pop(key, None)

    @rule(seed=seeds, position=st.integers(0, 3), replace=st.booleans(), works=st.booleans())
    def put(self, seed: int, position: int, replace: bool, works: bool) -> None:
        chunk = sample_chunk(seed, seed + 1, position)
        disk_works = works or seed % 2 == 0
        with pytest.MonkeyPatch.context() as patch:
            if not disk_works:

                def fail(*_: object) -> None:
                    raise OSError(28, "No space left on device")

                patch.setattr(DiskTier, "_write", fail)
            gone = self.store.put(chunk, replace=replace)
            self.store.flush()
        if replace and not self.pins[chunk.key]:
            self.forget(chunk.key)
        if not self.is_stored(chunk.key):
            if self.tier is not None and disk_works:
                self.disk[chunk.key] = chunk
            self.insert(chunk)
        assert len(gone) == len(set(gone))
        assert set(gone) == {key for key in self.gone if not self.is_stored(key)}
        self.gone.clear()

    @rule(seed=seeds)
    def get(self, seed: int) -> None:
        key = KEYS[seed]
        expected = self.in_memory(key)
        if expected is not None:
            self.memory.remove(expected)
            self.memory.append(expected)
        elif key in self.disk:
            expected = self.disk[key]
            self.insert(expected)
        found = self.store.get(key)
        if expected is None:
            self.misses += 1
            assert found is None
        else:
            self.hits += 1
            assert_same_chunk(found, expected)

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([chunk.key for chunk in self.memory]))
        assert self.store.pin(key)
        self.pins[key] += 1

    @precondition(lambda self: self.pins.total() > 0)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key in self.pins if self.pins[key])))
        self.store.unpin(key)
        self.pins[key] -= 1

    @rule(seed=seeds)
    def pin_or_unpin_what_is_not_there(self, seed: int) -> None:
        key = KEYS[seed]
        if self.in_memory(key) is None:
            assert not self.store.pin(key)
        if not self.pins[key]:
            with pytest.raises(InvalidArgumentError):
                self.store.unpin(key)

    @rule(seed=seeds)
    def drop(self, seed: int) -> None:
        key = KEYS[seed]
        expected = self.is_stored(key) and not self.pins[key]
        assert self.store.drop(key) == expected
        if expected:
            self.forget(key)

    @rule(disk=st.booleans())
    def clear(self, disk: bool) -> None:
        self.store.clear(disk=disk)
        self.memory = [chunk for chunk in self.memory if self.pins[chunk.key]]
        if disk:
            self.disk.clear()

    @precondition(lambda self: self.tier is not None)
    @rule()
    def restart(self) -> None:
        """A new process on the same directory knows what is on disk."""
        for scanned in DiskTier(self.directory.name, IDENTITY).scan():
            assert scanned.key in self.disk
            assert scanned.position == self.disk[scanned.key].position

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.nbytes <= self.store.capacity_bytes
        # In order of use, and measured.
        held = list(self.store._chunks.values())
        assert [chunk.key for chunk in held] == [chunk.key for chunk in self.memory]
        assert self.store.nbytes == sum(measured_bytes(chunk) for chunk in held)
        for one, other in zip(held, self.memory, strict=True):
            assert one.position == other.position
        for key in KEYS:
            assert self.store.contains(key) == self.is_stored(key)
        statistics = self.store.statistics()
        assert statistics.chunks == len(self.store) == len(self.memory)
        assert statistics.bytes == self.store.nbytes
        assert statistics.pinned == sum(1 for count in self.pins.values() if count)
        assert statistics.hits == self.hits
        assert statistics.misses == self.misses
        assert statistics.evictions == self.evictions
        assert statistics.refused == self.refused
        assert statistics.damaged_files == 0


TestStoreAgainstModel = StoreAgainstModel.TestCase
TestStoreAgainstModel.settings = examples(100)


# One by one


def test_a_chunk_above_the_capacity_is_refused_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ChunkStore(4 * UNIT)
    small, large = sample_chunk(1, 2), sample_chunk(2, 5)
    assert store.put(small) == []
    assert store.put(large) == [large.key]
    assert store.get(large.key) is None
    assert_same_chunk(store.get(small.key), small)
    statistics = store.statistics()
    assert statistics.refused == 1
    assert f"{5 * UNIT} bytes" in statistics.last_refusal
    assert f"{4 * UNIT} bytes" in statistics.last_refusal
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    store.put(large)
    assert len(caplog.records) == 1  # later ones are only counted


def test_a_chunk_above_the_capacity_goes_to_disk(tmp_path: Path) -> None:
    store = ChunkStore(4 * UNIT, DiskTier(tmp_path, IDENTITY))
    large = sample_chunk(2, 5)
    assert store.put(large) == []
    assert len(store) == 0
    assert_same_chunk(store.get(large.key), large)
    assert len(store) == 0


def test_pinned_chunks_stay_and_the_new_one_is_refused() -> None:
    store = ChunkStore(4 * UNIT)
    used, new = sample_chunk(1, 3), sample_chunk(2, 2)
    store.put(used)
    assert store.pin(used.key)
    assert store.put(new) == [new.key]
    assert f"{3 * UNIT} are in use" in store.statistics().last_refusal
    assert not store.drop(used.key)
    store.clear()
    store.put(dataclasses.replace(used, position=9), replace=True)
    assert_same_chunk(store.get(used.key), used)
    store.unpin(used.key)
    assert store.put(new) == [used.key]
    assert store.contains(new.key)


def test_a_pinned_chunk_is_passed_over_when_it_is_the_oldest() -> None:
    store = ChunkStore(4 * UNIT)
    chunks = [sample_chunk(seed, 2) for seed in range(3)]
    store.put(chunks[0])
    store.put(chunks[1])
    assert store.pin(chunks[0].key)
    assert store.pin(chunks[0].key)
    assert store.put(chunks[2]) == [chunks[1].key]
    store.unpin(chunks[0].key)  # still pinned once
    assert store.put(chunks[1]) == [chunks[2].key]
    store.unpin(chunks[0].key)
    assert store.put(chunks[2]) == [chunks[0].key]


def test_the_first_chunk_of_a_key_stays_unless_replaced(tmp_path: Path) -> None:
    store = ChunkStore(10 * UNIT, DiskTier(tmp_path, IDENTITY))
    first, second = sample_chunk(1, position=1), sample_chunk(1, position=2)
    for expected, replace in ((first, False), (second, True)):
        assert store.put(first) == []
        assert store.put(second, replace=replace) == []
        assert_same_chunk(store.get(first.key), expected)
        store.clear()  # only from memory
        assert_same_chunk(store.get(first.key), expected)


def test_a_damaged_file_is_a_miss_and_is_stored_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, IDENTITY)
    store = ChunkStore(10 * UNIT, tier)
    chunk = sample_chunk(1)
    store.put(chunk)
    store.clear()
    tier.path_of(chunk.key).write_bytes(b"rubbish")
    assert store.get(chunk.key) is None
    assert not store.contains(chunk.key)
    assert store.statistics().damaged_files == 1
    again = dataclasses.replace(chunk, position=5)
    assert store.put(again) == []
    store.clear()
    assert_same_chunk(store.get(chunk.key), again)


def test_a_disk_failure_keeps_the_chunk_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = ChunkStore(3 * UNIT, DiskTier(tmp_path, IDENTITY))
    chunk, other = sample_chunk(1, 2), sample_chunk(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_write", fail)
        assert store.put(chunk) == []
    assert_same_chunk(store.get(chunk.key), chunk)
    assert store.statistics().disk_failures == 1
    # It was only in memory, so leaving memory it is gone, and that is told.
    assert store.put(other) == [chunk.key]


def test_files_that_the_disk_tier_evicts_are_told(tmp_path: Path) -> None:
    probe = DiskTier(tmp_path / "probe", IDENTITY)
    chunks = [sample_chunk(seed, 2) for seed in range(3)]
    for chunk in chunks:
        probe.put(chunk)
    room_for_two = probe.nbytes - 1
    tier = DiskTier(tmp_path / "store", IDENTITY, capacity_bytes=room_for_two)
    store = ChunkStore(0, tier)
    told: list[ChunkKey] = []
    for chunk in chunks:
        told += store.put(chunk)
    kept = {scanned.key for scanned in tier.scan()}
    assert len(kept) == 2
    assert set(told) == {chunk.key for chunk in chunks} - kept


def test_what_a_get_from_disk_pushes_out_is_told_by_the_next_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = ChunkStore(2 * UNIT, DiskTier(tmp_path, IDENTITY))
    on_disk, memory_only = sample_chunk(1, 2), sample_chunk(2, 2)
    store.put(on_disk)
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_write", fail)
        assert store.put(memory_only) == []
    assert_same_chunk(store.get(on_disk.key), on_disk)
    assert store.put(sample_chunk(3, 1)) == [memory_only.key]


# Writing behind


class Gate:
    """Holds every write to disk back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        write = DiskTier._write

        def gated(*arguments: Any) -> None:
            assert self.opened.wait(60)
            write(*arguments)

        monkeypatch.setattr(DiskTier, "_write", gated)


def test_a_put_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    tier = DiskTier(tmp_path, IDENTITY)
    store = ChunkStore(4 * UNIT, tier, write_behind=True)
    chunks = [sample_chunk(seed, 2) for seed in range(2)]
    for chunk in chunks:
        assert store.put(chunk) == []
        assert_same_chunk(store.get(chunk.key), chunk)
        assert not tier.contains(chunk.key)
    assert store.statistics().writing == 2
    store.put(chunks[0])  # known, though not yet written
    gate.opened.set()
    store.flush()
    assert store.statistics().writing == 0
    for chunk in chunks:
        assert_same_chunk(tier.load(chunk.key), chunk)


@pytest.mark.parametrize("call", ["put", "replace", "drop", "clear", "put large"])
def test_what_must_wait_for_the_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    gate = Gate(monkeypatch)
    tier = DiskTier(tmp_path, IDENTITY)
    store = ChunkStore(4 * UNIT, tier, write_behind=True)
    first, other, large = sample_chunk(1, 3), sample_chunk(2, 2), sample_chunk(3, 5)
    second = dataclasses.replace(first, position=9)
    store.put(first)
    work: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(other),  # no room before the first one is written
        "replace": lambda: store.put(second, replace=True),
        "drop": lambda: store.drop(first.key),
        "clear": lambda: store.clear(disk=True),
        "put large": lambda: store.put(large),
    }
    thread = threading.Thread(target=work[call])
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert_same_chunk(store.get(first.key), first)
    gate.opened.set()
    thread.join()
    store.flush()
    expected = {
        "put": {first.key: first, other.key: other},
        "replace": {first.key: second},
        "drop": {},
        "clear": {},
        "put large": {first.key: first, large.key: large},
    }[call]
    assert {scanned.key for scanned in tier.scan()} == expected.keys()
    for key, chunk in expected.items():
        assert_same_chunk(store.get(key), chunk)
    assert store.nbytes <= 4 * UNIT


def test_a_failed_write_behind_is_told_when_the_chunk_leaves_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not even an OSError")

    store = ChunkStore(4 * UNIT, DiskTier(tmp_path, IDENTITY), write_behind=True)
    chunk, other = sample_chunk(1, 3), sample_chunk(2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_write", fail)
        assert store.put(chunk) == []
        store.flush()
    assert chunk.key in caplog.text
    assert_same_chunk(store.get(chunk.key), chunk)
    assert store.put(other) == [chunk.key]
    store.flush()
    store.clear()
    assert_same_chunk(store.get(other.key), other)


def test_a_process_that_ends_writes_its_chunks_first(tmp_path: Path) -> None:
    program = (
        "import sys; from memory_samples import *; from phasekv.memory import *\n"
        "store = ChunkStore(10**6, DiskTier(sys.argv[1], IDENTITY), write_behind=True)\n"
        "for seed in range(20): store.put(sample_chunk(seed, 50))\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parent, check=True
    )
    tier = DiskTier(tmp_path, IDENTITY)
    for seed in range(20):
        chunk = sample_chunk(seed, 50)
        assert_same_chunk(tier.load(chunk.key), chunk)


def test_a_negative_capacity_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="capacity_bytes = -1"):
        ChunkStore(-1)


@pytest.mark.parametrize("write_behind", [False, True])
def test_threads_share_a_store(tmp_path: Path, write_behind: bool) -> None:
    chunks = [sample_chunk(seed, 1 + seed % 4) for seed in range(12)]
    store = ChunkStore(12 * UNIT, DiskTier(tmp_path, IDENTITY), write_behind)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(300):
            chunk = generator.choice(chunks)
            action = generator.randrange(10)
            if action < 4:
                found = store.get(chunk.key)
                if found is not None and not torch.equal(found.keys, chunk.keys):
                    failures.append("wrong chunk")
            elif action < 7:
                store.put(chunk)
            elif action == 7:
                store.drop(chunk.key)
            elif store.pin(chunk.key):
                if store.get(chunk.key) is None:
                    failures.append("a pinned chunk is missing")
                store.unpin(chunk.key)
            if store.nbytes > store.capacity_bytes:
                failures.append("above the capacity")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.nbytes == sum(measured_bytes(chunk) for chunk in store._chunks.values())
    assert store.statistics().pinned == 0


# What others' users met


def test_reordered_chunks_are_all_found() -> None:
    """LMCache#938: request 2 = all cached chunks of request 1, reordered."""
    store = ChunkStore(100 * UNIT)
    chunks = {name: sample_chunk(seed, 3 + seed, 10 * seed) for seed, name in enumerate("ABC")}
    for chunk in chunks.values():
        store.put(chunk)
    prompt = np.concatenate([chunks[name].tokens for name in "BAC"])
    begin = 0
    for name in "BAC":
        end = begin + len(chunks[name].tokens)
        found = store.get(chunk_key(IDENTITY, prompt[begin:end]))
        assert_same_chunk(found, chunks[name])
        begin = end
    assert store.statistics().misses == 0


def test_reuse_lasts_under_load() -> None:
    """LMCache#4663: reuse decayed within 90 queries of 14 documents in shuffled order."""
    generator = np.random.default_rng(3)
    documents = [sample_chunk(seed, 4) for seed in range(14)]
    # Room for the documents and for one query's new text.
    store = ChunkStore(14 * 4 * UNIT + 4 * UNIT)
    for document in documents:
        store.put(document)
    for query in range(90):
        for index in generator.permutation(14):
            key = chunk_key(IDENTITY, documents[index].tokens)
            assert_same_chunk(store.get(key), documents[index])
        store.put(sample_chunk(1000 + query, 4))
    assert store.statistics().misses == 0


def test_pinning_under_load_never_loses_a_chunk_in_use() -> None:
    """vllm#46014: what a running request reads must not be given to another."""
    store = ChunkStore(8 * UNIT)
    used = sample_chunk(0, 4)
    store.put(used)
    assert store.pin(used.key)
    for seed in range(1, 50):
        store.put(sample_chunk(seed, 1 + seed % 6))
        assert_same_chunk(store.get(used.key), used)
    with contextlib.ExitStack() as stack:
        stack.callback(store.unpin, used.key)
    assert store.drop(used.key)
