"""The disk tier: exact or a miss, whatever happened to the files."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_samples import IDENTITY, LARGE, assert_same_chunk, examples, sample_chunk

from phasekv import Error, InvalidArgumentError
from phasekv.memory import ChunkKey, DiskTier, StoredChunk

WRITER = Path(__file__).with_name("disk_writer.py")


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "store", IDENTITY)


def stored(tier: DiskTier, chunk: StoredChunk) -> Path:
    """Put a chunk and return its file."""
    assert tier.put(chunk) == (True, [])
    return tier.path_of(chunk.key)


def age(path: Path, seconds: int) -> None:
    """Make a file look unused for a while."""
    then = time.time() - seconds
    os.utime(path, (then, then))


# Round trips


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 300])
def test_chunks_come_back_bit_for_bit(tmp_path: Path, dtype: str, length: int) -> None:
    identity = dataclasses.replace(IDENTITY, dtype=dtype, num_kv_heads=2)
    tier = DiskTier(tmp_path, identity)
    chunk = sample_chunk(1, length, position=131071, identity=identity)
    chunk.keys[0, 0, 0] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
    stored(tier, chunk)
    loaded = tier.load(chunk.key)
    assert_same_chunk(loaded, chunk)
    assert loaded is not None
    assert loaded.nbytes == chunk.nbytes
    assert_same_chunk(DiskTier(tmp_path, identity).load(chunk.key), chunk)


def test_tensors_that_are_not_contiguous_are_stored(tier: DiskTier) -> None:
    chunk = sample_chunk(1, 5)
    strided = dataclasses.replace(
        chunk, keys=chunk.keys.transpose(0, 1).contiguous().transpose(0, 1)
    )
    assert not strided.keys.is_contiguous()
    stored(tier, strided)
    assert_same_chunk(tier.load(chunk.key), chunk)


def test_unknown_key_is_a_silent_miss(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    assert tier.load(sample_chunk(1).key) is None
    assert not tier.contains(sample_chunk(1).key)
    assert not tier.drop(sample_chunk(1).key)
    assert not caplog.records


def test_first_stored_stays(tier: DiskTier) -> None:
    first = sample_chunk(1, position=10)
    stored(tier, first)
    assert tier.put(sample_chunk(1, position=20)) == (True, [])
    assert_same_chunk(tier.load(first.key), first)


def test_dropped_and_cleared_files_are_gone(tier: DiskTier) -> None:
    chunks = [sample_chunk(seed) for seed in range(3)]
    for chunk in chunks:
        stored(tier, chunk)
    assert tier.drop(chunks[0].key)
    assert {scanned.key for scanned in tier.scan()} == {chunk.key for chunk in chunks[1:]}
    tier.clear()
    assert list(tier.scan()) == []
    assert list(tier.directory.iterdir()) == []
    assert tier.nbytes == 0


def test_files_are_private_and_are_safetensors(tier: DiskTier) -> None:
    chunk = sample_chunk(1)
    path = stored(tier, chunk)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tier.directory.iterdir()) == [path]
    with safetensors.safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["keys", "values"]
        assert torch.equal(file.get_tensor("keys"), chunk.keys)
        assert torch.equal(file.get_tensor("values"), chunk.values)
        assert json.loads(file.metadata()["tokens"]) == chunk.tokens.tolist()


def test_scan_reads_headers_only(tier: DiskTier) -> None:
    chunks = {(c := sample_chunk(seed, 5 + seed, position=seed)).key: c for seed in range(8)}
    for chunk in chunks.values():
        path = stored(tier, chunk)
        with path.open("r+b") as file:  # the tensors' last byte
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
    found = list(tier.scan())
    assert len(found) == 8
    for key, tokens, position in found:
        assert tokens.dtype == np.int32
        assert tokens.tolist() == chunks[key].tokens.tolist()
        assert position == chunks[key].position
        assert tier.load(key) is None


def test_dtypes_that_are_not_stored_are_refused_by_name(tmp_path: Path) -> None:
    identity = dataclasses.replace(IDENTITY, dtype="float64")
    with pytest.raises(InvalidArgumentError, match="bfloat16"):
        DiskTier(tmp_path, identity).put(sample_chunk(1, identity=identity))


def test_a_chunk_of_another_shape_is_refused_by_name(tier: DiskTier) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        tier.put(sample_chunk(1, identity=LARGE))
    assert caught.value.argument == "chunk"


# Several models and ranks in one directory


@pytest.mark.parametrize("field", ["model", "adapter", "rope", "dtype"])
def test_models_do_not_see_each_other(tmp_path: Path, field: str) -> None:
    value = "bfloat16" if field == "dtype" else "other"
    identity = dataclasses.replace(IDENTITY, **{field: value})
    one, other = DiskTier(tmp_path, IDENTITY), DiskTier(tmp_path, identity)
    chunk = sample_chunk(1)
    path = stored(one, chunk)
    assert other.load(chunk.key) is None
    assert list(other.scan()) == []
    other.clear()
    assert path.exists()


def test_ranks_keep_their_own_part(tmp_path: Path) -> None:
    """LMCache#1379: what one rank stores or loses must not pass for the other's."""
    identity = dataclasses.replace(IDENTITY, num_kv_heads=4, tensor_parallel_size=2)
    ranks = [DiskTier(tmp_path, identity, rank) for rank in range(2)]
    chunk = sample_chunk(1, identity=identity)
    halves = [dataclasses.replace(chunk, keys=chunk.keys + rank) for rank in range(2)]
    for rank, half in zip(ranks, halves, strict=True):
        assert not rank.contains(chunk.key)
        stored(rank, half)
    for rank, half in zip(ranks, halves, strict=True):
        assert_same_chunk(rank.load(chunk.key), half)
        assert len(list(rank.scan())) == 1
    ranks[0].drop(chunk.key)
    assert ranks[1].contains(chunk.key)


@pytest.mark.parametrize("rank", [-1, 1])
def test_rank_out_of_range_is_refused_by_name(tmp_path: Path, rank: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"rank = {rank}"):
        DiskTier(tmp_path, IDENTITY, rank)


# Damage


def foreign_header(**changes: str) -> Callable[[bytes], bytes]:
    """Rewrite a file's metadata with a header checksum that is right."""

    def rewrite(data: bytes) -> bytes:
        from phasekv.memory import disk

        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header["__metadata__"] |= changes
        header["__metadata__"]["header_checksum"] = disk._header_checksum(header["__metadata__"])
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return rewrite


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "seven bytes": lambda data: data[:7],
    "length only": lambda data: data[:8],
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "text": lambda _: b"this is not a chunk at all",
    "huge length": lambda data: b"\xff" * 8 + data[8:],
    "zeros": lambda data: bytes(len(data)),
    "json list": lambda _: struct.pack("<Q", 2) + b"[]",
    "json object": lambda _: struct.pack("<Q", 2) + b"{}",
    "deep json": lambda _: struct.pack("<Q", 100000) + b"[" * 100000,
    "no metadata": lambda _: safetensors.torch.save({"keys": torch.zeros(2, 3, 1, 4)}),
    "other version": foreign_header(format_version="2"),
    "other format": foreign_header(format="something else"),
    "other model": foreign_header(identity="00" * 32),
    "other rank": foreign_header(rank="1"),
    "other key": foreign_header(key="ab" * 32),
    "other tokens": foreign_header(tokens="[1,2]"),
    "no tokens": foreign_header(tokens="[]"),
    "nested tokens": foreign_header(tokens="[[1,2,3]]"),
    "large tokens": foreign_header(tokens="[1,2,4294967296]"),
    "word tokens": foreign_header(tokens='"abc"'),
    "fractional tokens": foreign_header(tokens="[1.5,2,3]"),
    "negative position": foreign_header(position="-1"),
    "word position": foreign_header(position="first"),
    "other checksum": foreign_header(checksum="00"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_or_foreign_file_is_a_miss_with_one_warning(
    tier: DiskTier, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = sample_chunk(1)
    path = stored(tier, chunk)
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    for _ in range(3):
        assert tier.load(chunk.key) is None
        for _ in tier.scan():
            pass
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "phasekv"
    assert str(path) in record.getMessage()
    assert tier.statistics().damaged == 1
    assert not tier.contains(chunk.key)
    # The next time the chunk is encoded, it replaces the damaged file.
    stored(tier, chunk)
    assert tier.contains(chunk.key)
    assert_same_chunk(tier.load(chunk.key), chunk)


def test_a_renamed_file_is_a_miss(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    one, other = sample_chunk(1), sample_chunk(2)
    stored(tier, one).rename(tier.path_of(other.key))
    assert tier.load(other.key) is None
    assert list(tier.scan()) == []
    assert "another chunk" in caplog.text


def test_a_directory_in_place_of_a_file_is_a_miss(
    tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = sample_chunk(1)
    tier.path_of(chunk.key).mkdir()
    assert tier.load(chunk.key) is None
    assert list(tier.scan()) == []
    assert tier.put(chunk) == (False, [])
    assert str(tier.path_of(chunk.key)) in caplog.text


def test_every_flipped_byte_is_a_miss_or_harmless(tier: DiskTier) -> None:
    chunk = sample_chunk(1)
    path = stored(tier, chunk)
    whole = path.read_bytes()
    generator = random.Random(2)
    misses = 0
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        loaded = tier.load(chunk.key)
        if loaded is None:
            misses += 1
        else:  # another space in the padding of the header
            assert_same_chunk(loaded, chunk)
    assert misses > len(whole) - 8


def test_every_truncation_is_a_miss(tier: DiskTier) -> None:
    chunk = sample_chunk(1)
    path = stored(tier, chunk)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert tier.load(chunk.key) is None
        assert list(tier.scan()) == []


@examples(200)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.binary(max_size=40), st.integers(0, 40)),
        min_size=1,
        max_size=4,
    )
)
def test_random_damage_is_a_miss_or_harmless(cuts: list[tuple[float, bytes, int]]) -> None:
    chunk = sample_chunk(1)
    with tempfile.TemporaryDirectory() as directory:
        tier = DiskTier(directory, IDENTITY)
        path = stored(tier, chunk)
        data = path.read_bytes()
        for where, inserted, removed in cuts:
            begin = int(where * len(data))
            data = data[:begin] + inserted + data[begin + removed :]
        path.write_bytes(data)
        for scanned in tier.scan():
            assert scanned.tokens.tolist() == chunk.tokens.tolist()
        loaded = tier.load(chunk.key)
        if loaded is not None:
            assert_same_chunk(loaded, chunk)


# Killed writers


class Writers:
    """Starts and kills processes that store chunks, see disk_writer.py."""

    def __init__(self) -> None:
        self.starter = subprocess.Popen(
            [sys.executable, str(WRITER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.running: set[int] = set()

    def start(self, **job: object) -> int:
        assert self.starter.stdin is not None
        assert self.starter.stdout is not None
        self.starter.stdin.write(json.dumps(job, default=str) + "\n")
        self.starter.stdin.flush()
        process = int(self.starter.stdout.readline())
        self.running.add(process)
        return process

    def kill(self, process: int) -> None:
        os.kill(process, signal.SIGKILL)
        self.running.remove(process)
        while Path(f"/proc/{process}").exists():
            time.sleep(0.001)

    def close(self) -> None:
        for process in list(self.running):
            self.kill(process)
        self.starter.communicate()


@pytest.fixture(scope="module")
def all_writers() -> Iterator[Writers]:
    writers = Writers()
    yield writers
    writers.close()


@pytest.fixture
def writers(all_writers: Writers) -> Iterator[Writers]:
    yield all_writers
    for process in list(all_writers.running):
        all_writers.kill(process)


def seeds_of_whole_files(directory: Path, first: int = 0) -> set[int]:
    """Check a directory that writers left behind: there are only chunks, from `first` on whole."""
    tier = DiskTier(directory, LARGE)
    seeds = {}
    for scanned in tier.scan():
        seed = scanned.position
        if seed >= first:
            assert_same_chunk(tier.load(scanned.key), sample_chunk(seed, 30, seed, LARGE))
        seeds[seed] = tier.path_of(scanned.key)
    assert set(directory.iterdir()) == set(seeds.values())
    assert tier.statistics().damaged == 0
    return set(seeds)


def test_kill_during_a_store_loses_only_that_chunk(tmp_path: Path, writers: Writers) -> None:
    generator = random.Random(1)
    directory, log = tmp_path / "store", tmp_path / "log"
    log.touch()

    def noted() -> set[int]:
        return {int(line) for line in log.read_text().splitlines()}

    for round_number in range(12):
        first = 100 * round_number
        enough = len(noted()) + generator.randrange(4)
        process = writers.start(directory=directory, first=first, last=first + 100, log=log)
        while len(noted()) < enough:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.02))  # somewhere in the next store
        writers.kill(process)
        found = seeds_of_whole_files(directory, first)
        assert noted() <= found
        # At most one each round was renamed and not yet noted.
        assert len(found - noted()) <= round_number + 1
    assert len(found) > 10
    assert seeds_of_whole_files(directory) == found


def test_a_killed_writers_temporary_file_is_swept_and_a_living_ones_is_not(
    tmp_path: Path, writers: Writers
) -> None:
    directory, log = tmp_path / "store", tmp_path / "log"
    process = writers.start(directory=directory, first=0, last=1, log=log, stall=True)
    while not log.exists():
        time.sleep(0.01)
    (living,) = directory.iterdir()
    assert living.name.endswith(".tmp")
    assert list(DiskTier(directory, LARGE).scan()) == []
    assert list(directory.iterdir()) == [living]
    writers.kill(process)
    assert list(directory.iterdir()) == [living]
    DiskTier(directory, LARGE)
    assert list(directory.iterdir()) == []


def test_processes_share_a_directory(tmp_path: Path, writers: Writers) -> None:
    directory = tmp_path / "store"
    tier = DiskTier(directory, LARGE)
    expected = [sample_chunk(seed, 30, seed, LARGE) for seed in range(5)]
    for number in range(2):
        log = tmp_path / f"log {number}"
        writers.start(directory=directory, first=0, last=5, log=log, again=True)
    found = dict.fromkeys((chunk.key for chunk in expected), 0)
    while min(found.values()) < 10:  # pytest's time limit ends this
        for chunk in expected:
            loaded = tier.load(chunk.key)
            if loaded is not None:
                assert_same_chunk(loaded, chunk)
                found[chunk.key] += 1
    for process in list(writers.running):
        writers.kill(process)
    assert tier.statistics().damaged == 0
    assert seeds_of_whole_files(directory) <= set(range(5))


def test_threads_share_a_tier(tier: DiskTier) -> None:
    chunks = [sample_chunk(seed, 20) for seed in range(10)]
    failures = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(60):
            chunk = generator.choice(chunks)
            action = generator.randrange(3)
            if action == 0:
                tier.put(chunk)
            elif action == 1:
                tier.drop(chunk.key)
            else:
                loaded = tier.load(chunk.key)
                if loaded is not None and not torch.equal(loaded.keys, chunk.keys):
                    failures.append(chunk.key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tier.statistics().damaged == 0
    assert not list(tier.directory.glob(".*.tmp"))


# Disks that refuse


def assert_put_fails_softly(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    """A chunk that cannot be written is logged and counted, and leaves nothing behind."""
    chunk = sample_chunk(99, 200)
    before = sorted(tier.directory.iterdir())
    assert tier.put(chunk) == (False, [])
    assert tier.statistics().failures == 1
    assert str(tier.path_of(chunk.key)) in caplog.text
    assert sorted(tier.directory.iterdir()) == before
    assert not tier.contains(chunk.key)
    assert tier.load(chunk.key) is None


def test_a_full_file_system(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mount = tmp_path / "mount"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        tier = DiskTier(mount, IDENTITY)
        small = sample_chunk(1)
        stored(tier, small)
        (mount / "filler").write_bytes(bytes(12 * 1024))
        assert_put_fails_softly(tier, caplog)
        assert_same_chunk(tier.load(small.key), small)
        # A full disk does not keep an engine from starting with what is stored.
        with contextlib.suppress(OSError):
            (mount / "more filler").write_bytes(bytes(100 * 1024))
        assert_same_chunk(DiskTier(mount, IDENTITY).load(small.key), small)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_file_size_limit(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert_put_fails_softly(tier, caplog)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failing_system_call(
    tier: DiskTier,
    call: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert_put_fails_softly(tier, caplog)
    assert os.strerror(code) in caplog.text
    stored(tier, sample_chunk(99, 200))


def test_a_directory_that_vanished(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(tier.directory)
    assert tier.put(sample_chunk(1)) == (False, [])
    assert tier.load(sample_chunk(1).key) is None
    assert list(tier.scan()) == []
    assert str(tier.directory) in caplog.text


@pytest.mark.parametrize("below", [".", "deeper/still"])
def test_a_file_in_place_of_the_directory_is_refused_by_name(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    path = file / below
    with pytest.raises(InvalidArgumentError) as caught:
        DiskTier(path, IDENTITY)
    assert isinstance(caught.value, Error)
    assert caught.value.argument == "store_directory"
    assert caught.value.value == str(path)


@pytest.mark.parametrize("name", ["", "new"])
def test_a_directory_without_permission_is_refused_by_name(name: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o555)
        user = os.geteuid()
        if user == 0:  # nothing is forbidden to root
            os.seteuid(65534)
        try:
            with pytest.raises(InvalidArgumentError) as caught:
                DiskTier(Path(directory, name), IDENTITY)
        finally:
            os.seteuid(user)
        assert caught.value.argument == "store_directory"
        assert "Permission denied" in str(caught.value)


# Capacity


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    chunks = [sample_chunk(seed) for seed in range(5)]
    probe = DiskTier(tmp_path / "probe", IDENTITY)
    size = max(stored(probe, chunk).stat().st_size for chunk in chunks)
    tier = DiskTier(tmp_path / "store", IDENTITY, capacity_bytes=3 * size)
    for index, chunk in enumerate(chunks[:3]):
        age(stored(tier, chunk), 1000 - index)
    assert tier.load(chunks[0].key) is not None  # used: no longer the oldest
    assert tier.put(chunks[3]) == (True, [chunks[1].key])
    assert tier.put(chunks[4]) == (True, [chunks[2].key])
    assert {scanned.key for scanned in tier.scan()} == {chunks[index].key for index in (0, 3, 4)}
    assert tier.nbytes <= 3 * size
    assert tier.statistics().evictions == 2
    # A smaller capacity holds from the start on.
    assert DiskTier(tmp_path / "store", IDENTITY, capacity_bytes=size).nbytes <= size


def test_a_chunk_above_the_capacity_is_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, IDENTITY, capacity_bytes=3000)
    small = sample_chunk(1)
    stored(tier, small)
    assert_put_fails_softly(tier, caplog)
    assert tier.contains(small.key)


def test_a_negative_capacity_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="capacity_bytes = -1"):
        DiskTier(tmp_path, IDENTITY, capacity_bytes=-1)


@examples(50)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), max_size=25), st.integers(0, 9000)
)
def test_the_capacity_holds_after_every_put(puts: list[tuple[int, int]], capacity: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tier = DiskTier(directory, IDENTITY, capacity_bytes=capacity)
        present: set[ChunkKey] = set()
        for seed, length in puts:
            chunk = sample_chunk(seed, length)
            is_stored, removed = tier.put(chunk)
            present -= set(removed)
            if is_stored:
                present.add(chunk.key)
            assert tier.nbytes <= capacity
            assert {scanned.key for scanned in tier.scan()} == present
