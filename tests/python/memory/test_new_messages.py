"""New messages are what the whole chat's rendering has after the assistant's turn."""

import pytest

from phasekv.errors import InvalidArgumentError, UnsupportedError
from phasekv.memory import render_new_messages

TURN = "It is blue, I think."
USER = {"role": "user", "content": "And the door?"}
RESULTS = [
    {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "green"},
    {"role": "tool", "name": "look", "tool_call_id": "call00002", "content": "red"},
]
# Each drops the thinking of earlier turns, or knows no tools, or refuses what models refuse.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ (m.content or '').split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments.text }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls "
    "and messages[loop.index0 - 1].role != 'tool' %}{{ raise_exception('no call') }}{% endif %}"
    "{% if m.tool_calls and m.content is none %}{{ raise_exception('no content') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
)
NO_TURNS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}<|im_end|>"
NO_END = "{% for m in messages %}{{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


@pytest.mark.parametrize("template", [None, CHATML], ids=["own", "chatml"])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}])
def test_it_is_the_rest_of_the_whole_rendering(tokenizer, template, options):
    if template is not None:
        options = {**options, "chat_template": template}
    history = [{"role": "user", "content": "The wall?"}, {"role": "assistant", "content": TURN}]
    whole = tokenizer.apply_chat_template(
        [*history, USER], tokenize=False, **{"add_generation_prompt": True, **options}
    )
    rest = whole[whole.index(TURN) + len(TURN) :]
    assert rest.startswith("<|im_end|>\n")
    new = render_new_messages(tokenizer, [USER], **options)
    assert tokenizer.decode(new) == rest.removeprefix("<|im_end|>")
    unended = render_new_messages(tokenizer, [USER], turn_ended=False, **options)
    assert tokenizer.decode(unended) == rest


@pytest.mark.parametrize("template", [None, CHATML, STRICT], ids=["own", "chatml", "strict"])
def test_results_of_tools(tokenizer, template):
    options = {} if template is None else {"chat_template": template}
    text = tokenizer.decode(render_new_messages(tokenizer, [*RESULTS, USER], **options))
    assert text.index("green") < text.index("red") < text.index("And the door?")
    assert "stand-in" not in text
    assert "call00001" not in text  # of the call, which the session holds
    if template is not STRICT:
        assert text.startswith("\n<|im_start|>tool\ngreen<|im_end|>\n")


def test_stop_tokens_of_ones_own(tokenizer):
    stop = tokenizer.encode(";", add_special_tokens=False)
    new = render_new_messages(tokenizer, [USER], stop_tokens=stop, chat_template=NO_END)
    assert tokenizer.decode(new) == "And the door?;"


@pytest.mark.parametrize("messages", [[], [USER, {"role": "assistant", "content": TURN}]])
def test_only_new_messages_are_taken(tokenizer, messages):
    with pytest.raises(InvalidArgumentError, match="messages"):
        render_new_messages(tokenizer, messages)


@pytest.mark.parametrize("template", [NO_TURNS, NO_END, "{{ raise_exception('never') }}"])
def test_a_template_that_tells_no_turn_is_refused(tokenizer, template):
    with pytest.raises(UnsupportedError, match="chat template"):
        render_new_messages(tokenizer, [USER], chat_template=template)
