"""Bad parameters of a request: a clear error that names the field, and the engine lives on."""

from __future__ import annotations

import pytest
from tiny_models import random_tokens

pytestmark = pytest.mark.engine

BAD = [
    ({"chunks": [[0, 1000]]}, "chunks[0]", "[0, 1000]"),
    ({"chunks": [[-1, 5]]}, "chunks[0]", "[-1, 5]"),
    ({"chunks": [[5, 5]]}, "chunks[0]", "[5, 5]"),
    ({"chunks": [[9, 4]]}, "chunks[0]", "[9, 4]"),
    ({"chunks": [[0, 10], [9, 20]]}, "chunks", "[0, 10] and [9, 20]"),
    ({"chunks": [[0, 10, 20]]}, "chunks[0]", "[0, 10, 20]"),
    ({"chunks": [[0.5, 10]]}, "chunks[0]", "0.5"),
    ({"chunks": "all"}, "chunks", "all"),
    ({"chunks": [[0, 10]], "ratio": 1.5}, "ratio", "1.5"),
    ({"chunks": [[0, 10]], "ratio": -0.1}, "ratio", "-0.1"),
    ({"chunks": [[0, 10]], "ratio": "half"}, "ratio", "half"),
    ({"chunks": [[0, 10]], "method": "magic"}, "method", "magic"),
    ({"chunks": [[0, 10]], "frame": "upside down"}, "frame", "upside down"),
    ({"chunks": [[0, 10]], "method": "epic", "weight": "one"}, "weight", "epic"),
    ({"chunks": [[0, 10]], "method": "epic", "boundary_tokens": -3}, "boundary_tokens", "-3"),
    ({"chunks": [[0, 10]], "methods": "epic"}, "phasekv.methods", "epic"),
    ({"store": True}, "store", "chunks"),
    ({"chunks": [[0, 10]], "store": "yes"}, "store", "yes"),
    ([], "phasekv", "[]"),
]


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine()


@pytest.mark.parametrize(("parameters", "field", "value"), BAD, ids=lambda x: str(x)[:40])
def test_bad_parameters_are_refused_by_name(engine, parameters, field, value):
    from vllm.exceptions import VLLMValidationError

    tokens = random_tokens(30, 1)
    with pytest.raises(VLLMValidationError, match="phasekv") as caught:
        engine.ask([{"tokens": tokens, "phasekv": parameters}])
    assert field in str(caught.value)
    assert value in str(caught.value)
    assert len(engine.one(tokens).tokens) == 1


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"metod": "epic"}, "phasekv.metod"),
        ({"method": "magic"}, "method"),
        ({"ratio": 2}, "ratio"),
        ({"auto": "yes"}, "auto"),
        ({"auto_min_tokens": 2}, "auto_min_tokens"),
        ({"chunk_store_bytes": -1}, "chunk_store_bytes"),
        ({"chunk_store_bits": 3}, "chunk_store_bits"),
        ({"store_directory": 7}, "store_directory"),
        ({"store_on_use": 1}, "store_on_use"),
        ("phaseshift", "phasekv"),
    ],
    ids=str,
)
def test_bad_settings_stop_the_start(model_folder, settings, field):
    from vllm import EngineArgs

    arguments = EngineArgs(
        model=str(model_folder()),
        skip_tokenizer_init=True,
        additional_config={"phasekv": settings},
    )
    with pytest.raises(ValueError, match=field):
        arguments.create_engine_config()


@pytest.mark.parametrize(
    ("arguments", "changes", "feature"),
    [
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 3,
                }
            },
            {},
            "speculative_config",
        ),
        ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "bfloat16", "dtype": "float32"}, {}, "kv_cache_dtype"),
        ({"enable_lora": True}, {}, "enable_lora"),
        ({"data_parallel_size": 2}, {}, "data_parallel_size"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"shared_storage_path": "/tmp"},
                }
            },
            {},
            "kv_transfer_config",
        ),
        ({}, {"num_hidden_layers": 1}, "num_hidden_layers"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_features_that_cannot_be_combined_are_refused(model_folder, arguments, changes, feature):
    from vllm import EngineArgs

    engine_arguments = EngineArgs(
        model=str(model_folder(**changes)),
        skip_tokenizer_init=True,
        additional_config={"phasekv": {}},
        **arguments,
    )
    with pytest.raises(NotImplementedError, match=feature):
        engine_arguments.create_engine_config()


def test_sliding_window_is_refused(model_folder):
    from vllm import EngineArgs

    arguments = EngineArgs(
        model=str(model_folder("mistral", sliding_window=128)),
        skip_tokenizer_init=True,
        additional_config={"phasekv": {}},
    )
    with pytest.raises(NotImplementedError, match="sliding_window"):
        arguments.create_engine_config()
