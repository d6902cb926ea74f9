"""Renders only the new messages of a chat, to be appended to a session.

A chat template renders the whole history anew and may leave out what the model has seen, above all
its thinking. A session holds the turn as it was generated. What follows it is taken from the
template all the same: it renders a stand-in for the assistant's turn and the new messages after it,
and only what comes after the stand-in's end is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phasekv.errors import InvalidArgumentError, UnsupportedError

_STAND_IN = "phasekv-stand-in-for-the-turn"


def render_new_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    turn_ended: bool = True,
    stop_tokens: Sequence[int] | None = None,
    **template_options: Any,
) -> list[int]:
    """Token ids of the messages that follow an assistant's turn which a session holds.

    Send them as the prompt of a completion with ``session`` and ``append``.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        With a chat template.
    messages : sequence of mapping
        The new messages: tools' results, then what the user says. Not the assistant's turn.
    turn_ended : bool
        Whether the model ended its turn by itself (``finish_reason`` "stop" or "tool_calls"): the
        token that ended it is the session's last one then, and is not repeated.
    stop_tokens : sequence of int or None
        Tokens that end a turn, as in the model's generation config; None: the tokenizer's
        ``eos_token_id``.
    template_options
        For ``apply_chat_template``: ``tools``, ``add_generation_prompt`` (True unless told
        otherwise), ``enable_thinking`` and whatever else the template knows.

    Raises
    ------
    InvalidArgumentError
        If there are no messages, or one of them is the assistant's.
    UnsupportedError
        If the template does not render the stand-in's turn with a token that ends it.
    """
    if not messages or any(message["role"] == "assistant" for message in messages):
        raise InvalidArgumentError(
            "messages", str([message["role"] for message in messages]), "messages of tools and user"
        )
    if stop_tokens is None:
        stop_tokens = [tokenizer.eos_token_id]
    options = {"add_generation_prompt": True, **template_options}
    rest = _rendered_after_stand_in(tokenizer, messages, options)
    tokens: list[int] = tokenizer.encode(rest, add_special_tokens=False)
    ends = [index for index, token in enumerate(tokens) if token in stop_tokens]
    if not ends:
        raise UnsupportedError(
            "chat template", repr(rest[:40]), f"the turn's end is none of {list(stop_tokens)}"
        )
    return tokens[ends[0] + 1 :] if turn_ended else tokens[ends[0] :]


def _rendered_after_stand_in(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    failure: Exception | None = None
    for turn in _stand_ins(messages):
        history = [{"role": "user", "content": "."}, turn]
        try:
            text = tokenizer.apply_chat_template([*history, *messages], tokenize=False, **options)
        except Exception as error:  # templates raise what they like
            failure = error
            continue
        _, found, rest = text.rpartition(_STAND_IN)
        if found:
            return str(rest)
    raise UnsupportedError(
        "chat template",
        "no rendering" if failure is None else repr(str(failure)),
        "it has to render an assistant's turn and these messages after it",
    ) from failure


def _stand_ins(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Turns after which the messages may come: tools' results need the calls they answer.

    Templates differ in what content a turn with calls may have, and some know no calls.
    """
    calls = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            break
        function = {"name": message.get("name", "tool"), "arguments": {"text": _STAND_IN}}
        identifier = message.get("tool_call_id", f"call{number:05d}")
        calls.append({"id": identifier, "type": "function", "function": function})
    if calls:
        yield {"role": "assistant", "content": None, "tool_calls": calls}
        yield {"role": "assistant", "content": "", "tool_calls": calls}
    yield {"role": "assistant", "content": _STAND_IN}
