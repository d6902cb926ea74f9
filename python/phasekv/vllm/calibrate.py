"""Measures a model's queries before RoPE in the engine itself, for ``phasekv.calibration``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from phasekv import _core
from phasekv.calibration import Calibration
from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.environment import prepare_environment

MAX_TOKENS = 32768
"""More change nothing (arXiv 2604.04921)."""


class QueryRecorder:
    """Sums the queries that a model computes from now on, before they are rotated.

    Parameters
    ----------
    model : torch.nn.Module
        The model object of the worker that runs in this process, run without torch.compile: hooks
        see every row that goes through it.
    head_size : int
        Elements of a head.

    Raises
    ------
    UnsupportedError
        For a model whose layers are not built as expected.
    """

    def __init__(self, model: Any, head_size: int) -> None:
        from phasekv.vllm.decoder_hooks import DecoderHooks

        hooks = DecoderHooks(model)
        self._head_size = head_size
        self._layer = 0
        count = len(hooks.layers)
        self.rotary_module = hooks.rotary_module
        self.tokens = [0] * count
        self._sums: list[Any] = [0.0] * count
        self._norms: list[Any] = [0.0] * count
        self._handles = [
            layer.register_forward_pre_hook(self._enter(index))
            for index, layer in enumerate(hooks.layers)
        ]
        # Layers share their rotary module: a hook on each layer would see each query many times.
        for module in {layer.self_attn.rotary_emb for layer in hooks.layers}:
            self._handles.append(module.register_forward_pre_hook(self._take))

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    @property
    def mean_query(self) -> torch.Tensor:
        """float32 [layers, query heads, pairs, 2], as (real, imaginary), on the CPU."""
        return self._means(self._sums)

    @property
    def mean_norm(self) -> torch.Tensor:
        """float32 [layers, query heads, pairs], on the CPU."""
        return self._means(self._norms)

    def _means(self, sums: list[Any]) -> torch.Tensor:
        means = [part / count for part, count in zip(sums, self.tokens, strict=True)]
        return torch.stack(means).float().cpu()

    def _enter(self, index: int) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            self._layer = index

        return hook

    def _take(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        _, query, _ = args
        rows = query.view(len(query), -1, self._head_size)[..., : module.rotary_dim].double()
        if module.is_neox_style:
            pairs = torch.stack(rows.chunk(2, dim=-1), dim=-1)
        else:
            pairs = rows.unflatten(-1, (-1, 2))
        self._sums[self._layer] += pairs.sum(dim=0)
        self._norms[self._layer] += pairs.norm(dim=-1).sum(dim=0)
        self.tokens[self._layer] += len(query)


def calibrate(
    model: str,
    text: Path,
    *,
    max_tokens: int = MAX_TOKENS,
    context: int = 4096,
    dtype: str = "auto",
    say: Callable[[str], None] = print,
) -> Calibration:
    """Run a text through a model and measure its queries.

    Parameters
    ----------
    model : str
        Folder or name of a Hugging Face model, as the engine will be given it.
    text : pathlib.Path
        File of UTF-8 text; what it is about matters little.
    max_tokens : int
        Of the text, in [1, 32768]; the rest is left out.
    context : int
        The text is run in pieces of this many tokens, which do not see each other.
    dtype : str
        Of the model, as vLLM takes it.
    say : callable
        Called with a line of progress at a time.

    Raises
    ------
    InvalidArgumentError
        If the text is no UTF-8 or empty, or a number is out of range.
    UnsupportedError
        For a model that PhaseKV does not serve.
    """
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise InvalidArgumentError("max_tokens", str(max_tokens), f"in [1, {MAX_TOKENS}]")
    if context < 1:
        raise InvalidArgumentError("context", str(context), "at least 1 token")
    content = read_text(text)
    prepare_environment()
    from vllm import LLM

    llm = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        # Each piece gets one more token, of which nothing is looked at.
        max_model_len=context + 1,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    tokens = llm.get_tokenizer().encode(content)[:max_tokens]
    if not tokens:
        raise InvalidArgumentError("text", str(text), "a text of at least one token")
    say(f"running {len(tokens)} tokens in pieces of {context}")
    return measure(llm, tokens, context)


def measure(llm: Any, tokens: Sequence[int], context: int) -> Calibration:
    """Run tokens, in pieces, through an engine in this process; see ``calibrate``."""
    from vllm import SamplingParams

    from phasekv.vllm.rope import rope_parameters_of
    from phasekv.vllm.setup import identity_of

    config = llm.llm_engine.vllm_config
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.model_runner.model
    recorder = QueryRecorder(model, config.model_config.get_head_size())
    try:
        pieces = [list(tokens[i : i + context]) for i in range(0, len(tokens), context)]
        llm.generate(
            [{"prompt_token_ids": piece} for piece in pieces],
            SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
            use_tqdm=False,
        )
    finally:
        recorder.close()
    if recorder.tokens != [len(tokens)] * len(recorder.tokens):
        raise RuntimeError(f"{len(tokens)} tokens became {recorder.tokens} rows of the layers")
    parameters = rope_parameters_of(config.model_config.hf_text_config, recorder.rotary_module)
    frequencies = _core.rope_frequencies(_core.RopeConfig(**parameters))
    return Calibration(
        identity=identity_of(config),
        pairing=parameters["pairing"],
        # cos(0) times the amplitude.
        magnitude=float(recorder.rotary_module.cos_sin_cache[0, 0]),
        tokens=len(tokens),
        mean_query=recorder.mean_query,
        mean_norm=recorder.mean_norm,
        frequencies=torch.tensor(frequencies, dtype=torch.float64),
    )


def read_text(path: Path) -> str:
    """The file's text. Raises ``InvalidArgumentError`` if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("text", str(path), f"a file of UTF-8 text ({error})") from error
