"""One conversation, written in the format of every model family, and where its phases lie.

The texts are ours; only the formats are the models'. Phases are found by regular expressions over
the whole text, by no rule that the tracker uses.
"""

import re
from dataclasses import dataclass, field

THOUGHT = "The ticket comes first; a call like <tool_call> or to=functions.x is only text here."
SECOND_THOUGHT = "It has shipped. Tell them, { and all."
CALL = '{"name": "find_order", "arguments": {"number": 4711}}'
ARGUMENTS = '{"number": 4711}'
RESULT = '{"state": "shipped", "note": "left at the neighbour\'s, \u00fcber dem Hof"}'
OTHER_RESULT = '["no second parcel"]'
QUESTION = "Where is my order 4711?"
REPLY = "Let me look that up.\n"
ANSWER = "It has shipped and lies at your neighbour's."
THANKS = "Thank you! What does <think> or [TOOL_CALLS] mean?"
CLOSING = "Nothing you need to know."


@dataclass(frozen=True)
class Family:
    """A format and its phases.

    ``phases`` has (phase, where, what): in group 1 of each match of ``where``, group 1 of each
    match of ``what`` has the phase. ``markers`` has (where, what): whole matches of ``what`` are
    markers. ``control`` and ``tags`` are the tokens that models of the family have.
    """

    table: str
    text: str
    phases: list[tuple[str, str, str]]
    markers: list[tuple[str, str]]
    control: list[str]
    tags: list[str] = field(default_factory=list)


def labels_of(family: Family) -> tuple[list[str], list[bool]]:
    """Phase and whether it is part of a marker, for each byte of the text."""
    byte_at = [0]
    for character in family.text:
        byte_at.append(byte_at[-1] + len(character.encode()))
    phases = ["others"] * byte_at[-1]
    is_marker = [False] * byte_at[-1]
    for phase, where, what in family.phases:
        for begin, end in _spans(family.text, where, what, 1):
            phases[byte_at[begin] : byte_at[end]] = [phase] * (byte_at[end] - byte_at[begin])
    for where, what in family.markers:
        for begin, end in _spans(family.text, where, what, 0):
            is_marker[byte_at[begin] : byte_at[end]] = [True] * (byte_at[end] - byte_at[begin])
    return phases, is_marker


def _spans(text: str, where: str, what: str, group: int) -> list[tuple[int, int]]:
    return [
        (outer.start(1) + inner.start(group), outer.start(1) + inner.end(group))
        for outer in re.finditer(where, text, re.DOTALL)
        for inner in re.finditer(what, outer[1], re.DOTALL)
    ]


ANYWHERE = r"\A(.*)\Z"
INSTRUCTIONS = (
    "You help with orders. Call tools as <tool_call>\n{...}\n</tool_call>, think as "
    "<think>...</think>; results come as <tool_response>...</tool_response>."
)

# ---- ChatML

CHATML_ASSISTANT = r"<\|im_start\|>assistant\n(.*?(?:<\|im_end\|>|\Z))"
CHATML_RESPONSES = r"<\|im_start\|>user\n(<tool_response>.*?)<\|im_end\|>"
CHATML_TURNS = (ANYWHERE, r"<\|im_start\|>(?:system|user|assistant)\n|<\|im_end\|>")
THINK = ("think", CHATML_ASSISTANT, r"<think>(.*?</think>)")
ACT = ("act", CHATML_ASSISTANT, r"(?<!like )<tool_call>(.*?</tool_call>)")
TOOL = ("tool", CHATML_RESPONSES, r"<tool_response>(.*?</tool_response>)")
TOOL_TURN = ("tool", ANYWHERE, r"<\|im_start\|>tool\n(.*?<\|im_end\|>)")


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{body}<|im_end|>\n" for role, body in turns)


def tagged_responses(*results: str) -> str:
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def tagged_call(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


QWEN3 = Family(
    "qwen3",
    chatml(
        ("system", INSTRUCTIONS),
        ("user", QUESTION),
        ("assistant", thought(THOUGHT) + REPLY + tagged_call(CALL) + "\n" + tagged_call(CALL)),
        ("user", tagged_responses(RESULT, OTHER_RESULT)),
        ("assistant", thought(SECOND_THOUGHT) + ANSWER),
        ("user", THANKS),
        ("assistant", "<think>\n\n</think>\n\n" + CLOSING),
    )
    + "<|im_start|>assistant\n<think>\nAnd n",
    [THINK, ("think", r"(<\|im_start\|>assistant\n<think>[^<]*)\Z", r"<think>(.*)"), ACT, TOOL],
    [
        CHATML_TURNS,
        (CHATML_ASSISTANT, r"(?<!like )(?<!or )</?(?:think|tool_call)>"),
        (CHATML_RESPONSES, r"<tool_response>|</tool_response>(?:\n<tool_response>)?"),
    ],
    ["<|im_start|>", "<|im_end|>"],
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
)

CODER_CALL = "<function=find_order>\n<parameter=number>\n4711\n</parameter>\n</function>\n"
QWEN3_CODER = Family(
    "qwen3_coder",
    chatml(
        ("system", INSTRUCTIONS + " Write <function=name> in a call."),
        ("user", QUESTION),
        ("assistant", REPLY + "<tool_call>\n" + CODER_CALL + "</tool_call>"),
        ("user", tagged_responses(RESULT) + "\n"),
        ("assistant", CODER_CALL + "</tool_call>"),
        ("user", tagged_responses(OTHER_RESULT) + "\n"),
        ("assistant", ANSWER),
    ),
    [
        ("act", CHATML_ASSISTANT, r"<tool_call>(.*?</tool_call>)"),
        ("act", r"assistant\n(<function=.*?</tool_call>)", r"\A<function=(.*)"),
        TOOL,
    ],
    [
        CHATML_TURNS,
        (CHATML_ASSISTANT, r"</?tool_call>"),
        (r"assistant\n(<function=)", r".*"),
        (CHATML_RESPONSES, r"<tool_response>|</tool_response>(?:\n<tool_response>)?"),
    ],
    ["<|im_start|>", "<|im_end|>"],
    QWEN3.tags,
)

QWEN2_5 = Family(
    "qwen2_5",
    chatml(
        ("system", INSTRUCTIONS),
        ("user", QUESTION),
        ("assistant", REPLY + tagged_call(CALL)),
        ("user", tagged_responses(RESULT, OTHER_RESULT)),
        ("assistant", ANSWER),
        ("user", "What does <tool_response> mean?"),
    ),
    [ACT, TOOL],
    [
        CHATML_TURNS,
        (CHATML_ASSISTANT, r"</?tool_call>"),
        (CHATML_RESPONSES, r"<tool_response>|</tool_response>(?:\n<tool_response>)?"),
    ],
    ["<|im_start|>", "<|im_end|>"],
    ["<tool_call>", "</tool_call>"],
)

SMOLLM2 = Family(
    "smollm2",
    chatml(
        ("system", INSTRUCTIONS),
        ("user", QUESTION),
        ("assistant", f"<tool_call>[{CALL}]</tool_call>"),
        ("tool", RESULT),
        ("assistant", tagged_call(CALL)),
        ("user", tagged_responses(OTHER_RESULT)),
        ("assistant", ANSWER),
        ("user", THANKS),
        ("assistant", CLOSING),
    ),
    [ACT, TOOL, TOOL_TURN],
    [
        (ANYWHERE, r"<\|im_start\|>(?:system|user|assistant|tool)\n|<\|im_end\|>"),
        (CHATML_ASSISTANT, r"</?tool_call>"),
        (CHATML_RESPONSES, r"<tool_response>|</tool_response>(?:\n<tool_response>)?"),
    ],
    ["<|im_start|>", "<|im_end|>"],
)

SMOLLM3 = Family(
    "smollm3",
    chatml(
        ("system", INSTRUCTIONS),
        ("user", QUESTION),
        ("assistant", thought(THOUGHT) + REPLY + tagged_call(CALL)),
        ("user", RESULT),
        ("user", OTHER_RESULT),
        ("assistant", thought(SECOND_THOUGHT) + ANSWER),
        ("user", THANKS),
        ("assistant", CLOSING),
    ),
    [
        THINK,
        ACT,
        ("tool", ANYWHERE, r"<\|im_start\|>user\n((?:\{|\[).*?<\|im_end\|>)"),
    ],
    [CHATML_TURNS, (CHATML_ASSISTANT, r"(?<!like )(?<!or )</?(?:think|tool_call)>")],
    ["<|im_start|>", "<|im_end|>"],
    ["<think>", "</think>", "<tool_call>", "</tool_call>"],
)

HERMES = Family(
    "hermes",
    chatml(
        ("system", INSTRUCTIONS),
        ("user", QUESTION),
        ("assistant", thought(THOUGHT) + tagged_call(CALL)),
        ("tool", tagged_responses(RESULT, OTHER_RESULT)),
        ("assistant", ANSWER),
        ("user", THANKS),
        ("assistant", CLOSING),
    ),
    [THINK, ACT, TOOL_TURN],
    [
        (ANYWHERE, r"<\|im_start\|>(?:system|user|assistant|tool)\n|<\|im_end\|>"),
        (CHATML_ASSISTANT, r"(?<!like )(?<!or )</?(?:think|tool_call)>"),
        (r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", r"</?tool_response>"),
    ],
    ["<|im_start|>", "<|im_end|>"],
    QWEN3.tags,
)

# ---- Llama 3 headers

LLAMA_ASSISTANT = r"assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"


def headers(*turns: tuple[str, str]) -> str:
    return "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{body}"
        + ("" if body.endswith("<|eom_id|>") else "<|eot_id|>")
        for role, body in turns
    )


LLAMA_CALL = '{"name": "find_order", "parameters": {"number": 4711}}'
LLAMA3 = Family(
    "llama3",
    headers(
        ("system", "Environment: ipython\nYou help with orders."),
        ("user", 'Reply as {"name": function, "parameters": values}.\n\n' + QUESTION),
        ("assistant", LLAMA_CALL),
        ("ipython", RESULT),
        ("assistant", '{"type": "function", ' + LLAMA_CALL[1:]),
        ("ipython", OTHER_RESULT),
        ("assistant", '<|python_tag|>find_order.call(number="4711")<|eom_id|>'),
        ("ipython", RESULT),
        ("assistant", ANSWER + " {}"),
        ("user", THANKS),
        ("assistant", '{"colour": "no call"}'),
    ),
    [
        ("act", LLAMA_ASSISTANT, r'\A(?:\{"name"|\{"type": "function")(.*)'),
        ("act", ANYWHERE, r"<\|python_tag\|>(.*?<\|eom_id\|>)"),
        ("tool", ANYWHERE, r"ipython<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"),
    ],
    [
        (ANYWHERE, r"<\|start_header_id\|>\w+<\|end_header_id\|>\n\n|<\|eo[tm]_id\|>"),
        (LLAMA_ASSISTANT, r'\A(?:\{"name"|\{"type": "function"|<\|python_tag\|>)'),
    ],
    ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"],
)

NEMOTRON_SUPER = Family(
    "nemotron_super",
    headers(
        ("system", "Call tools as <TOOLCALL>[...]</TOOLCALL>; <TOOL_RESPONSE>[...] answers."),
        ("user", QUESTION),
        ("assistant", thought(THOUGHT) + f"{REPLY}<TOOLCALL>[{CALL}]</TOOLCALL>"),
        ("tool", f"<TOOL_RESPONSE>[{RESULT}, {OTHER_RESULT}]</TOOL_RESPONSE>"),
        ("assistant", thought(SECOND_THOUGHT) + ANSWER),
        ("user", THANKS),
        ("assistant", "<think>\n\n</think>\n\n" + CLOSING),
    ),
    [
        ("think", LLAMA_ASSISTANT, r"<think>(.*?</think>)"),
        ("act", LLAMA_ASSISTANT, r"<TOOLCALL>(.*?</TOOLCALL>)"),
        ("tool", ANYWHERE, r"tool<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"),
    ],
    [
        (ANYWHERE, r"<\|start_header_id\|>\w+<\|end_header_id\|>\n\n|<\|eot_id\|>"),
        (LLAMA_ASSISTANT, r"(?<!or )</?(?:think|TOOLCALL)>"),
        (r"tool<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>", r"</?TOOL_RESPONSE>"),
    ],
    ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
)

# ---- Formats of their own

MISTRAL = Family(
    "mistral",
    "[SYSTEM_PROMPT]You help with orders. Think as [THINK]...[/THINK].[/SYSTEM_PROMPT]"
    f'[AVAILABLE_TOOLS][{{"name": "find_order"}}][/AVAILABLE_TOOLS][INST]{QUESTION}[/INST]'
    f"[THINK]{THOUGHT}[/THINK]{REPLY}[TOOL_CALLS]find_order[CALL_ID]a1[ARGS]{ARGUMENTS}"
    f"[TOOL_CALLS]find_order[ARGS]{ARGUMENTS}</s>"
    f"[TOOL_RESULTS]a1[TOOL_CONTENT]{RESULT}[/TOOL_RESULTS]"
    f"[TOOL_RESULTS]{OTHER_RESULT}[/TOOL_RESULTS]"
    f"{ANSWER}</s>[INST]{THANKS}[/INST]{CLOSING}</s>",
    [
        ("think", r"\[/INST\](.*?)</s>", r"\[THINK\](.*?\[/THINK\])"),
        ("act", r"\[/INST\](.*?</s>)", r"\[TOOL_CALLS\](.*)"),
        ("tool", ANYWHERE, r"\[TOOL_RESULTS\](.*?\[/TOOL_RESULTS\])"),
    ],
    [
        (ANYWHERE, r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS)\]|</s>"),
        (r"\[/INST\](.*?)</s>", r"\[/?(?:THINK|TOOL_CALLS|CALL_ID|ARGS)\]"),
        (r"\[TOOL_RESULTS\](.*?)\[/TOOL_RESULTS\]", r"\[TOOL_CONTENT\]"),
    ],
    [
        *("</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        *("[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
    ],
)

DEEPSEEK_CALL = (
    "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>find_order\n```json\n"
    + ARGUMENTS
    + "\n```<\uff5ctool▁call▁end\uff5c>"
)
DEEPSEEK_R1 = Family(
    "deepseek_r1",
    f"You help with orders.<\uff5cUser\uff5c>{QUESTION}<\uff5cAssistant\uff5c>"
    f"{thought(THOUGHT)}{REPLY}"
    f"<\uff5ctool▁calls▁begin\uff5c>{DEEPSEEK_CALL}\n{DEEPSEEK_CALL}<\uff5ctool▁calls▁end\uff5c>"
    "<\uff5cend▁of▁sentence\uff5c><\uff5ctool▁outputs▁begin\uff5c>"
    f"<\uff5ctool▁output▁begin\uff5c>{RESULT}"
    f"<\uff5ctool▁output▁end\uff5c>\n<\uff5ctool▁output▁begin\uff5c>{OTHER_RESULT}<\uff5ctool▁output▁end\uff5c>"
    f"<\uff5ctool▁outputs▁end\uff5c>{ANSWER}<\uff5cend▁of▁sentence\uff5c><\uff5cUser\uff5c>{THANKS}<\uff5cAssistant\uff5c>"
    f"</think>{CLOSING}<\uff5cend▁of▁sentence\uff5c>",
    [
        (
            "think",
            r"<\uff5cAssistant\uff5c>(.*?)<\uff5cend▁of▁sentence\uff5c>",
            r"<think>(.*?</think>)",
        ),
        ("act", ANYWHERE, r"<\uff5ctool▁call▁begin\uff5c>(.*?<\uff5ctool▁call▁end\uff5c>)"),
        ("tool", ANYWHERE, r"<\uff5ctool▁output▁begin\uff5c>(.*?<\uff5ctool▁output▁end\uff5c>)"),
    ],
    [
        (ANYWHERE, r"<\uff5c[^\uff5c]+\uff5c>"),
        (r"<\uff5cAssistant\uff5c>(.*?)<\uff5cend▁of▁sentence\uff5c>", r"(?<!or )</?think>"),
    ],
    ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"],
    [
        *("<think>", "</think>", "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"),
        *("<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>", "<\uff5ctool▁sep\uff5c>"),
        *("<\uff5ctool▁outputs▁begin\uff5c>", "<\uff5ctool▁outputs▁end\uff5c>"),
        *("<\uff5ctool▁output▁begin\uff5c>", "<\uff5ctool▁output▁end\uff5c>"),
    ],
)

GPT_OSS = Family(
    "gpt_oss",
    "<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>"
    "<|start|>developer<|message|>You help with orders; write to=functions.x to call.<|end|>"
    f"<|start|>user<|message|>{QUESTION}<|end|>"
    f"<|start|>assistant<|channel|>analysis<|message|>{THOUGHT}<|end|>"
    f"<|start|>assistant<|channel|>commentary<|message|>{REPLY}<|end|>"
    f"<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
    f"<|start|>functions.find to=assistant<|channel|>commentary<|message|>{RESULT}<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|>"
    f"<|start|>functions.find to=assistant<|channel|>commentary<|message|>{OTHER_RESULT}<|end|>"
    "<|start|>assistant<|channel|>analysis to=python code<|message|>print(4711)<|call|>"
    "<|start|>python to=assistant<|channel|>analysis<|message|>4711\n<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>{ANSWER}<|end|>"
    f"<|start|>user<|message|>{THANKS}<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>{CLOSING}<|return|>",
    [
        ("think", ANYWHERE, r"assistant<\|channel\|>analysis<\|message\|>([^|]*<\|end\|>)"),
        ("act", ANYWHERE, r"assistant to=(.*?<\|call\|>)"),
        ("act", ANYWHERE, r"assistant<\|channel\|>(?:commentary|analysis) to=(.*?<\|call\|>)"),
        ("tool", ANYWHERE, r"to=assistant<\|channel\|>\w+<\|message\|>(.*?<\|end\|>)"),
    ],
    [
        (ANYWHERE, r"<\|start\|>(?:system|developer|user|assistant)?"),
        (ANYWHERE, r"<\|channel\|>(?:analysis|commentary|final)|<\|constrain\|>|<\|message\|>"),
        (ANYWHERE, r"<\|(?:end|call|return)\|>"),
        (r"<\|start\|>(assistant(?:<\|channel\|>[a-z]+)? to=)", " to="),
    ],
    ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"],
    ["<|return|>"],
)

GEMMA_MODEL = r"<start_of_turn>model\n(.*?<end_of_turn>)"
GEMMA3 = Family(
    "gemma3",
    "".join(
        f"<start_of_turn>{role}\n{body}<end_of_turn>\n"
        for role, body in [
            ("user", "Call tools in ```tool_code blocks.\n\n" + QUESTION),
            ("model", f"{REPLY}```tool_code\nfind_order(number=4711)\n```\nWait."),
            ("user", f"```tool_output\n{RESULT}\n```"),
            ("model", "[find_order(number=4711)]"),
            ("user", f"<tool_response>\n{OTHER_RESULT}\n</tool_response>"),
            ("model", ANSWER),
            ("user", THANKS),
            ("model", CLOSING + " ```python\nprint()\n``` [1]"),
        ]
    ),
    [
        ("act", GEMMA_MODEL, r"```tool_code(.*?```)"),
        ("act", GEMMA_MODEL, r"\A\[(.*)"),
        ("tool", r"user\n(```tool_output.*?```)", r"\A```tool_output(.*)"),
        ("tool", r"user\n(<tool_response>.*?</tool_response>)", r"\A<tool_response>(.*)"),
    ],
    [
        (ANYWHERE, r"<start_of_turn>(?:user|model)\n|<end_of_turn>"),
        (r"model\n[^`]*?(```tool_code.*?```)", r"```(?:tool_code)?"),
        (r"user\n(```tool_output.*?```)", r"```(?:tool_output)?"),
        (r"user\n(<tool_response>.*?</tool_response>)", r"</?tool_response>"),
        (GEMMA_MODEL, r"\A\["),
    ],
    ["<start_of_turn>", "<end_of_turn>"],
)

GLM_ANSWER = r"<\|assistant\|>(.*?)(?=<\|(?:user|observation)\|>|\Z)"
GLM4 = Family(
    "glm4",
    f"[gMASK]<sop><|system|>\n{INSTRUCTIONS}<|user|>\n{QUESTION}<|assistant|>\n"
    f"<think>{THOUGHT}</think>\n{REPLY}<tool_call>find_order\n<arg_key>number</arg_key>\n"
    f"<arg_value>4711</arg_value>\n</tool_call>\n<tool_call>find_order\n</tool_call>"
    f"<|observation|>\n{tagged_responses(RESULT, OTHER_RESULT)}<|assistant|>\n"
    f"<think></think>\n{ANSWER}<|user|>\n{THANKS}<|assistant|>\n{CLOSING}",
    [
        ("think", GLM_ANSWER, r"<think>(.*?</think>)"),
        ("act", GLM_ANSWER, r"(?<!like )<tool_call>(.*?</tool_call>)"),
        (
            "tool",
            r"<\|observation\|>(.*?)<\|assistant\|>",
            r"<tool_response>(.*?</tool_response>)",
        ),
    ],
    [
        (ANYWHERE, r"<\|(?:system|user|assistant|observation)\|>"),
        (GLM_ANSWER, r"(?<!like )(?<!or )</?(?:think|tool_call)>"),
        (r"<\|observation\|>(.*?)<\|assistant\|>", r"</?tool_response>"),
    ],
    ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    QWEN3.tags,
)

KIMI_ANSWER = r"<\|im_assistant\|>assistant<\|im_middle\|>(.*?)<\|im_end\|>"
KIMI_K2 = Family(
    "kimi_k2",
    f"<|im_system|>tool_declare<|im_middle|>[...]<|im_end|><|im_system|>system<|im_middle|>"
    f"{INSTRUCTIONS} ## Return of the parcel<|im_end|><|im_user|>user<|im_middle|>{QUESTION}"
    f"<|im_end|><|im_assistant|>assistant<|im_middle|><think>{THOUGHT}</think>{REPLY}"
    "<|tool_calls_section_begin|>"
    f"<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
    f"<|tool_call_begin|>functions.find:1<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
    "<|tool_calls_section_end|><|im_end|>"
    f"<|im_system|>tool<|im_middle|>## Return of functions.find:0\n{RESULT}<|im_end|>"
    f"<|im_system|>find<|im_middle|>## Return of functions.find:1\n{OTHER_RESULT}<|im_end|>"
    f"<|im_assistant|>assistant<|im_middle|>{ANSWER}<|im_end|>"
    f"<|im_user|>user<|im_middle|>{THANKS}<|im_end|>",
    [
        ("think", KIMI_ANSWER, r"<think>(.*?</think>)"),
        ("act", KIMI_ANSWER, r"<\|tool_call_begin\|>(.*?<\|tool_call_end\|>)"),
        ("tool", ANYWHERE, r"<\|im_middle\|>## Return of (.*?<\|im_end\|>)"),
    ],
    [
        (ANYWHERE, r"<\|im_middle\|>## Return of |<\|[a-z_]+\|>"),
        (KIMI_ANSWER, r"(?<!or )</?think>"),
    ],
    ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"],
    [
        *("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
)

FAMILIES = [
    *(QWEN3, QWEN3_CODER, QWEN2_5, SMOLLM2, SMOLLM3, HERMES, LLAMA3, NEMOTRON_SUPER),
    *(MISTRAL, DEEPSEEK_R1, GPT_OSS, GEMMA3, GLM4, KIMI_K2),
]
