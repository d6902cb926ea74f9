"""The policy triattention in the real engine: its definition, its file, its refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eviction_reference import EvictingReference, ReferencePolicy, triattention
from tiny_models import random_tokens

from commands import run_checked
from phasekv.calibration import load_calibration

pytestmark = pytest.mark.engine

BUDGET, STRIDE, CHUNK, RECENT = 128, 32, 128, 16
WISH = {"policy": "triattention", "budget": BUDGET, "recent": RECENT}


def eviction(path):
    return {"eviction": {"budget": 512, "stride": STRIDE, "calibration": str(path)}}


@pytest.fixture(scope="module")
def calibrate(model_folder, tmp_path_factory):
    """Makes a file for a model, with statistics that tell keys apart better than measured ones."""
    folder = tmp_path_factory.mktemp("calibrations")

    def make(family, rope):
        path = folder / f"{family}-{rope}"
        program = Path(__file__).with_name("measure_queries.py")
        tokens = json.dumps(random_tokens(50, 1))
        run_checked(sys.executable, program, model_folder(family, rope), path, tokens, "50")
        measured = load_calibration(str(path))
        generator = torch.Generator().manual_seed(4)
        mean_query = torch.randn(measured.mean_query.shape, generator=generator)
        extra = torch.rand(measured.mean_norm.shape, generator=generator)
        drawn = replace(measured, mean_query=mean_query, mean_norm=mean_query.norm(dim=-1) + extra)
        drawn.save(path)
        return path, drawn

    return make


def reference_policy(reference, calibration):
    score = triattention(
        reference, torch.view_as_complex(calibration.mean_query), calibration.mean_norm
    )
    return ReferencePolicy(score, recent=RECENT)


def check(engine, folder, calibration):
    """One request, its survivors of all ranks beside the reference."""
    engine.llm.collective_rpc("watch_survivors")
    tokens = random_tokens(300, 2)
    answer = engine.one(tokens, max_tokens=70, eviction=WISH)
    assert answer.report["eviction"]["compactions"] == 4
    ranks = [next(iter(recorded.values())) for recorded in engine.llm.collective_rpc("survivors")]
    survivors = [
        [
            torch.cat([torch.tensor(part).view(2 // len(ranks), -1) for part in layer])
            for layer in zip(*event, strict=True)
        ]
        for event in zip(*ranks, strict=True)
    ]
    reference = EvictingReference(str(folder))
    logprobs = reference.run_window(
        tokens + answer.tokens,
        [128, 256, *range(300, 370)],
        BUDGET,
        STRIDE,
        reference_policy(reference, calibration),
        survivors,
    )
    torch.testing.assert_close(answer.logprobs, logprobs[-70:].float(), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("family", "rope"), [("llama", "default"), ("qwen3", "yarn"), ("qwen2", "llama3")]
)
def test_it_follows_its_definition(start_engine, calibrate, model_folder, family, rope):
    path, calibration = calibrate(family, rope)
    engine = start_engine(
        family,
        rope,
        phasekv=eviction(path),
        max_num_batched_tokens=CHUNK,
        worker_extension_cls="survivor_probe.SurvivorProbe",
    )
    check(engine, model_folder(family, rope), calibration)
    engine.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_rank_takes_the_statistics_of_its_heads(start_engine, calibrate, model_folder):
    path, calibration = calibrate("llama", "default")
    engine = start_engine(
        tensor_parallel_size=2,
        phasekv=eviction(path),
        max_num_batched_tokens=CHUNK,
        worker_extension_cls="survivor_probe.SurvivorProbe",
    )
    check(engine, model_folder(), calibration)
    engine.close()


def test_statistics_of_another_model_are_refused_at_start(calibrate, model_folder):
    from vllm.engine.arg_utils import EngineArgs

    path, _ = calibrate("llama", "default")
    arguments = EngineArgs(
        model=str(model_folder("qwen3")),
        skip_tokenizer_init=True,
        block_size=32,
        # Not even when the policy is asked for by requests only.
        additional_config={"phasekv": eviction(path)},
    )
    with pytest.raises(ValueError, match=r"calibration.model = .*llama.*qwen3"):
        arguments.create_engine_config()


@pytest.mark.parametrize("content", [None, b"", b"nothing of the kind"])
def test_an_unreadable_file_is_refused_at_start(model_folder, tmp_path, content):
    from vllm.engine.arg_utils import EngineArgs

    path = tmp_path / "statistics"
    if content is not None:
        path.write_bytes(content)
    arguments = EngineArgs(
        model=str(model_folder()),
        skip_tokenizer_init=True,
        block_size=32,
        additional_config={"phasekv": eviction(path)},
    )
    with pytest.raises(ValueError, match=r"calibration = .*statistics"):
        arguments.create_engine_config()
