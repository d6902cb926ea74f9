"""Calibration files: what was written is read, and nothing else is."""

import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasekv.calibration import Calibration, load_calibration, load_statistics
from phasekv.cli import main
from phasekv.errors import InvalidArgumentError
from phasekv.memory.keys import ModelIdentity

IDENTITY = ModelIdentity(
    model="models/tiny@0123",
    dtype="float32",
    rope='{"rope_type": "default"}',
    num_layers=3,
    num_kv_heads=2,
    head_size=8,
)


def calibration():
    generator = torch.Generator().manual_seed(3)
    mean_query = torch.randn(3, 4, 4, 2, generator=generator)
    return Calibration(
        identity=IDENTITY,
        pairing="neox",
        magnitude=1.1386294,
        tokens=77,
        mean_query=mean_query,
        mean_norm=mean_query.norm(dim=-1) * 2.0,
        frequencies=torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64),
    )


@pytest.fixture
def path(tmp_path):
    calibration().save(tmp_path / "file")
    return tmp_path / "file"


def test_round_trip(path):
    expected = calibration()
    read = load_calibration(str(path))
    for name in ("identity", "pairing", "magnitude", "tokens"):
        assert getattr(read, name) == getattr(expected, name)
    for name in ("mean_query", "mean_norm", "frequencies"):
        assert torch.equal(getattr(read, name), getattr(expected, name))
    assert read.concentration == pytest.approx(0.5)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_file_is_read_once_until_it_changes(path):
    first = load_statistics(str(path))
    assert load_statistics(str(path)) is first
    replace(calibration(), tokens=78).save(path)
    os.utime(path, ns=(1, 1))
    assert load_calibration(str(path)).tokens == 78


def test_heads_of_a_rank(path):
    whole = load_calibration(str(path))
    part = whole.of_heads(1, 3)
    assert part.query_heads == 2
    assert torch.equal(part.mean_query, whole.mean_query[:, 1:3])
    assert torch.equal(part.mean_norm, whole.mean_norm[:, 1:3])
    assert part.statistics is not whole.statistics


def test_the_same_model_under_another_path_is_accepted():
    moved = replace(IDENTITY, model="/somewhere/models/tiny@0123", tensor_parallel_size=2)
    calibration().check_model(replace(moved, dtype="bfloat16"), 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "models/tiny@4567"),
        ("rope", "{}"),
        ("num_layers", 4),
        ("num_kv_heads", 1),
        ("head_size", 16),
    ],
)
def test_another_model_is_refused_by_name(field, value):
    with pytest.raises(InvalidArgumentError) as caught:
        calibration().check_model(replace(IDENTITY, **{field: value}), 4)
    assert caught.value.argument == f"calibration.{field}"
    assert str(getattr(IDENTITY, field)) == caught.value.value
    assert str(value) in str(caught.value)


def test_another_number_of_heads_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"calibration.query_heads = 4: .*8"):
        calibration().check_model(IDENTITY, 8)


def test_a_missing_file(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"nowhere.*No such file"):
        load_statistics(str(tmp_path / "nowhere"))


def test_every_damaged_byte_is_noticed(path, tmp_path):
    content = path.read_bytes()
    for offset in [0, 9, *range(20, len(content), 37), len(content) - 1]:
        damaged = tmp_path / f"damaged-{offset}"
        damaged.write_bytes(
            content[:offset] + bytes([content[offset] ^ 0x15]) + content[offset + 1 :]
        )
        with pytest.raises(InvalidArgumentError, match="calibration"):
            load_statistics(str(damaged))


def test_a_file_that_was_cut_off(path):
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InvalidArgumentError, match="whole file"):
        load_statistics(str(path))


@pytest.mark.parametrize(
    ("metadata", "field"),
    [(None, "format"), ({"format": "other"}, "format"), ({"version": "7"}, "version")],
)
def test_a_foreign_file_is_named(path, tmp_path, metadata, field):
    tensors = load_file(path)
    whole = {"format": "phasekv calibration", "version": "1"}
    foreign = tmp_path / "foreign"
    save_file(tensors, foreign, metadata=None if metadata is None else {**whole, **metadata})
    with pytest.raises(InvalidArgumentError) as caught:
        load_statistics(str(foreign))
    assert caught.value.argument == f"calibration.{field}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "nowhere.txt", "--out", "x"], "nowhere.txt"),
        (["--text", "empty.txt", "--out", "no/folder/x"], "no/folder/x"),
        (["--text", "empty.txt", "--out", "x", "--max-tokens", "40000"], "40000"),
        (["--text", "empty.txt", "--out", "x", "--context", "0"], "context = 0"),
        (["--text", "binary", "--out", "x"], "UTF-8"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    monkeypatch.chdir(tmp_path)
    # What it sets would hold for the tests that follow.
    monkeypatch.setattr("phasekv.cli.calibrate.prepare_environment", lambda: None)
    assert main(["calibrate", "model", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
