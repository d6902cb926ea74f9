"""A reuse method written in Python: in both engines what the same rule in C++ gives."""

from __future__ import annotations

import pytest
import python_methods
import torch
from reuse_case import ReuseCase
from test_transformers_reuse import Memory, _Store
from transformers import AutoModelForCausalLM
from vllm.exceptions import VLLMValidationError

from phasekv.errors import InvalidArgumentError
from phasekv.reuse.choice import MethodChoice, parse_choice
from phasekv.reuse.function_method import FunctionMethod

pytestmark = pytest.mark.engine

TWINS = {
    "like_phaseshift": "phaseshift",
    "two_sets": "agentkvshift",
    "most_diverged_values": "cacheblend",
}
BAD = {"too_few": "probes", "not_a_number": "weights", "raises": "no idea"}


def named(function):
    return {"method": "function", "function": f"python_methods:{function}"}


@pytest.fixture(scope="module")
def memory(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    found = Memory(model, None)
    return found, ReuseCase(_Store(found), model_folder(), 100)


@pytest.mark.parametrize(("function", "twin"), TWINS.items())
def test_in_transformers_it_equals_the_method_in_cpp(memory, function, twin):
    found, case = memory
    expected, theirs = found.logprobs(case, method=twin, ratio=0.2)
    ours, report = found.logprobs(case, **named(function), ratio=0.2)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    assert report == {**theirs, "method": "function"}
    # The function itself does as well as its name.
    rule = getattr(python_methods, function)
    again, _ = found.logprobs(case, method="function", function=rule, ratio=0.2)
    assert torch.equal(again, ours)


def test_frames_are_the_methods_own(memory):
    found, case = memory
    expected, _ = found.logprobs(case, method="phaseshift", frame="unrotated", ratio=0.2)
    ours, _ = found.logprobs(case, **named("like_phaseshift"), frame="unrotated", ratio=0.2)
    rotated, _ = found.logprobs(case, **named("like_phaseshift"), ratio=0.2)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    assert (ours - rotated).abs().max() > 1e-2


@pytest.mark.parametrize(("function", "says"), BAD.items())
def test_a_mistake_recomputes_everything_and_is_told(memory, function, says):
    found, case = memory
    exact, _ = found.logprobs(case, method="full_recompute", ratio=0.2)
    ours, report = found.logprobs(case, **named(function), ratio=0.2)
    torch.testing.assert_close(ours, exact, atol=1e-4, rtol=0)
    assert says in report["failure"]
    assert report["tokens_reused"] == 0


def test_in_vllm_it_equals_the_method_in_cpp(start_engine):
    twins = {}
    for function, twin in TWINS.items():
        engine = start_engine(phasekv={"function": f"python_methods:{function}"})
        case = ReuseCase(engine, engine.folder, seed=100)
        expected = engine.one(case.tokens, chunks=case.ranges, method=twin, ratio=0.2)
        ours = engine.one(case.tokens, chunks=case.ranges, method="function", ratio=0.2)
        torch.testing.assert_close(ours.logprobs, expected.logprobs, atol=1e-5, rtol=0)
        assert ours.report == {**expected.report, "method": "function"}
        twins[function] = ours.logprobs
        engine.close()
    assert (twins["two_sets"] - twins["like_phaseshift"]).abs().max() > 1e-2


def test_vllm_survives_a_mistake_and_refuses_another_function(start_engine):
    engine = start_engine(phasekv={"method": "function", "function": "python_methods:raises"})
    case = ReuseCase(engine, engine.folder, seed=100)
    ours = engine.one(case.tokens, chunks=case.ranges)
    exact = engine.one(case.tokens, chunks=case.ranges, method="full_recompute")
    torch.testing.assert_close(ours.logprobs, exact.logprobs, atol=1e-4, rtol=0)
    assert "no idea" in ours.report["failure"]
    assert "failure" not in exact.report
    for wish, argument in (
        ({"method": "function", "function": "os:system"}, "function"),
        ({"method": "prophetkv"}, "method"),
    ):
        with pytest.raises(VLLMValidationError, match=argument):
            engine.one(case.tokens, chunks=case.ranges, **wish)
    engine.close()


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"method": "function"}, "function"),
        ({"method": "function", "function": "python_methods"}, "function"),
        ({"method": "function", "function": "python_methods:nothing"}, "function"),
        ({"method": "function", "function": 3}, "function"),
        ({**named("raises"), "weight": "one"}, "weight"),
        ({**named("raises"), "frame": "sideways"}, "frame"),
    ],
)
def test_bad_settings_are_named(settings, argument):
    with pytest.raises(InvalidArgumentError) as error:
        parse_choice(settings, MethodChoice())
    assert error.value.argument == argument


@pytest.mark.parametrize(
    ("returned", "argument"),
    [
        (torch.ones(3, dtype=torch.bool), "function"),
        ((torch.ones(3, 2, dtype=torch.bool), None), "probes"),
        ((torch.ones(3), None), "probes.dtype"),
        ((torch.ones(3, dtype=torch.bool), torch.ones(2)), "weights"),
    ],
)
def test_what_a_function_returns_is_checked(returned, argument):
    method = FunctionMethod(lambda *_: returned)
    with pytest.raises(InvalidArgumentError) as error:
        method.select(
            segments=[(3, 0, 3)], key_divergence=[1.0] * 3, value_divergence=[1.0] * 3, ratio=0.5
        )
    assert error.value.argument == argument
