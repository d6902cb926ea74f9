"""The ``phasekv`` command: arguments, errors, and what it hands to vLLM."""

import json
import os
import subprocess
import sys

import pytest

from phasekv import __version__
from phasekv.cli import build_parser, info, main, serve
from phasekv.errors import InvalidArgumentError, MissingCapabilityError


def command_of(*words):
    known, rest = build_parser().parse_known_args(["serve", *words])
    return serve.serve_command(known, rest)


def config_of(command):
    assert command[-2] == "--additional-config"
    return json.loads(command[-1])


def test_flags_become_settings():
    command = command_of(
        "model",
        "--method",
        "agentkvshift",
        "--dtype",
        "float32",
        "--ratio",
        "0.3",
        "--auto",
        "--store-bytes",
        "1048576",
        "--store-directory",
        "/tmp/chunks",
        "--store-bits",
        "4",
        "--no-store-on-use",
        "--port",
        "8001",
    )
    assert command[:-2] == ["serve", "model", "--dtype", "float32", "--port", "8001"]
    assert config_of(command) == {
        "phasekv": {
            "method": "agentkvshift",
            "ratio": 0.3,
            "auto": True,
            "store_on_use": False,
            "chunk_store_bytes": 1048576,
            "store_directory": "/tmp/chunks",
            "chunk_store_bits": 4,
        }
    }


def test_a_python_function_may_be_the_method():
    command = command_of("model", "--method", "function", "--function", "math:fsum")
    assert config_of(command) == {"phasekv": {"method": "function", "function": "math:fsum"}}


def test_without_flags_the_engine_still_gets_phasekv():
    assert config_of(command_of("model")) == {"phasekv": {}}


def test_no_auto_is_not_the_same_as_silence():
    assert config_of(command_of("model", "--no-auto")) == {"phasekv": {"auto": False}}


@pytest.mark.parametrize(
    "words",
    [
        ["--additional-config", '{"other": {"a": 1}, "phasekv": {"ratio": 0.2}}'],
        ['--additional-config={"other": {"a": 1}, "phasekv": {"ratio": 0.2}}'],
        ["--additional_config", '{"other": {"a": 1}, "phasekv": {"ratio": 0.2}}'],
        ["--additional-config.other.a", "1", "--additional-config.phasekv.ratio=0.2"],
    ],
)
def test_the_users_own_configuration_is_merged(words):
    command = command_of("model", *words, "--auto")
    assert command[:-2] == ["serve", "model"]
    assert config_of(command) == {
        "other": {"a": 1},
        "phasekv": {"ratio": 0.2, "auto": True},
    }


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        (["--method", "magic"], "method"),
        (["--ratio", "1.5"], "ratio"),
        (["--ratio", "0.2", "--additional-config.phasekv.ratio", "0.3"], "ratio"),
        (["--additional-config", "{"], "--additional-config"),
        (["--additional-config", "[1]"], "--additional-config"),
        (["--additional-config"], "--additional-config"),
        (["--additional-config", '{"phasekv": 1}'], "phasekv"),
        (["--additional-config", '{"phasekv": {"colour": 1}}'], "phasekv.colour"),
        (["--method", "epic", "--weight", "one"], "weight"),
        (["--method", "function"], "function"),
        (["--method", "prophetkv"], "method"),
    ],
)
def test_a_bad_setting_is_named_before_the_server_starts(words, argument):
    with pytest.raises(InvalidArgumentError) as error:
        command_of("model", *words)
    assert error.value.argument == argument


def test_plugin_must_be_allowed():
    serve.check_plugin({})
    serve.check_plugin({"VLLM_PLUGINS": "other, phasekv"})
    for excluded in ("", "other"):
        with pytest.raises(InvalidArgumentError, match="VLLM_PLUGINS"):
            serve.check_plugin({"VLLM_PLUGINS": excluded})


def test_plugin_must_be_installed(monkeypatch):
    monkeypatch.setattr(serve, "entry_points", lambda **_: ())
    with pytest.raises(MissingCapabilityError, match="pip install"):
        serve.check_plugin({})


def test_serve_becomes_vllm(monkeypatch):
    executed = []
    monkeypatch.setattr(os, "execv", lambda path, words: executed.append((path, words)))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    main(["serve", "model", "--ratio", "0.2", "--max-model-len", "64"])
    ((path, words),) = executed
    assert path == words[0]
    begin = words.index("serve")
    assert words[begin : begin + 4] == ["serve", "model", "--max-model-len", "64"]


def test_errors_are_one_line_and_status_two(capsys):
    assert main(["serve", "model", "--ratio", "7"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == ("phasekv serve: ratio = 7.0: expected a recompute ratio in [0, 1]\n")


def test_only_serve_takes_unknown_options(capsys):
    with pytest.raises(SystemExit) as status:
        main(["info", "--dtype", "float32"])
    assert status.value.code == 2
    assert "--dtype float32" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in ("serve", "demo", "info", "calibrate", "convert"))


def test_module_and_version():
    words = [sys.executable, "-m", "phasekv.cli", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"phasekv {__version__}"


def test_convert_if_missing_leaves_a_complete_folder(tmp_path, capsys, monkeypatch):
    from phasekv import model_conversion

    for name in model_conversion.REQUIRED_FILES:
        (tmp_path / name).write_text("")
    monkeypatch.setattr(model_conversion, "convert_gguf", None)
    assert main(["convert", "--if-missing", str(tmp_path)]) == 0
    assert str(tmp_path) in capsys.readouterr().out


@pytest.mark.slow
def test_info_finds_everything_in_order(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"] is True
    assert found["version"] == __version__
    assert found["core"]["instruction_set"] in found["core"]["supported"]
    assert "scalar" in found["core"]["supported"]
    assert {"phaseshift", "agentkvshift", "cacheblend"} <= set(found["core"]["methods"])
    assert {test["layout"] for test in found["layouts"]["self_tests"]} >= {"vec16"}
    assert found["defaults"]["choice"]["method"] == "agentkvshift"


@pytest.mark.slow
def test_info_says_what_is_wrong(monkeypatch, capsys):
    from phasekv.vllm import layout_check

    def fail(layout, *_):
        raise layout_check.UnsupportedError("block layout", layout, "a layout that is exact")

    monkeypatch.setattr(layout_check, "check_layout", fail)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main(["info"]) == 1
    text = capsys.readouterr().out
    assert "VLLM_PLUGINS leaves it out" in text
    assert "failed (block layout = " in text
    assert text.rstrip().endswith("not ready")


@pytest.mark.parametrize("is_built", [False, True])
def test_info_where_vllm_runs_on_a_gpu(monkeypatch, is_built):
    """Its build for CUDA has no writer for a CPU's blocks."""
    from vllm.platforms import current_platform

    from phasekv import _core
    from phasekv.vllm import layout_check

    monkeypatch.setattr(layout_check, "check_layout", None)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(_core, "cuda_is_built", lambda: is_built)
    monkeypatch.setattr(info, "_engine", lambda: {"name": "vllm", "version": "0.32.0"})
    found = info.collect()
    assert found["ready"] is is_built
    words = "tested when an engine starts" if is_built else "kernels = cuda is not available"
    assert words in info.in_words(found)


def test_a_missing_part_does_not_hide_the_others(monkeypatch):
    def broken():
        raise ImportError("no such library")

    monkeypatch.setattr(info, "_layouts", broken)
    monkeypatch.setattr(info, "_engine", lambda: {"name": "vllm", "version": "0.32.0"})
    found = info.collect()
    assert found["layouts"] == {"error": "no such library"}
    assert found["engine"]["version"] == "0.32.0"
    assert found["ready"] is False
    assert "not available: no such library" in info.in_words(found)
