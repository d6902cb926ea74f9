"""Agent trajectories whose phases are known, as tokens for teacher-forced replays.

A file has one trajectory per line: a JSON object with ``source``, ``id`` and ``segments``, each of
a ``phase`` (one of `SEGMENT_PHASES`) and its ``text``. Other fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasekv.errors import InvalidArgumentError
from phasekv.phases import TokenVocabulary, phase_names

SEGMENT_PHASES = ("system", "user", "think", "tool_call", "tool_result", "answer")
"""What a segment of a trajectory may be."""

_ASSISTANT = ("think", "tool_call", "answer")


@dataclass(frozen=True)
class Segment:
    """A stretch of a trajectory; ``phase`` is one of `SEGMENT_PHASES`."""

    phase: str
    text: str


@dataclass(frozen=True)
class Trajectory:
    """One run of an agent: where it comes from, and what was said and done."""

    source: str
    id: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class LabelledTokens:
    """A trajectory's tokens and what they are.

    Parameters
    ----------
    tokens : numpy.ndarray
        ``[tokens]`` of int32.
    phases : numpy.ndarray
        ``[tokens]`` of uint8, index in `phasekv.phases.phase_names`. They come from the
        trajectory's segments and not from a tracker, and follow the tracker's rules: a token has
        the phase of its first byte, and a marker's bytes belong to the phase that it ends.
    is_marker : numpy.ndarray
        ``[tokens]`` of bool: any byte of the token belongs to the template's markers.
    """

    tokens: npt.NDArray[np.int32]
    phases: npt.NDArray[np.uint8]
    is_marker: npt.NDArray[np.bool_]

    def content(self, phase: str) -> npt.NDArray[np.bool_]:
        """``[tokens]`` of bool: tokens of this phase that belong to no marker."""
        result: npt.NDArray[np.bool_] = (
            self.phases == phase_names().index(phase)
        ) & ~self.is_marker
        return result


def load_trajectories(path: Path) -> list[Trajectory]:
    """All trajectories of a file, in its order.

    Raises
    ------
    InvalidArgumentError
        If the file cannot be read or a line is no trajectory: the error names line and field.
    """
    try:
        # Only at line feeds: JSON may hold other line separators as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            "trajectories", str(path), f"a file with a JSON object on each line ({error})"
        ) from error
    return [
        _read_trajectory(line, f"{path.name} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _read_trajectory(line: str, where: str) -> Trajectory:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidArgumentError(where, line[:80], f"JSON ({error})") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("segments"), list):
        raise InvalidArgumentError(where, line[:80], "an object with a list of segments")
    segments = tuple(
        _read_segment(segment, f"{where}: segments[{index}]")
        for index, segment in enumerate(entry["segments"])
    )
    return Trajectory(str(entry.get("source", "")), str(entry.get("id", "")), segments)


def _read_segment(segment: Any, where: str) -> Segment:
    if not isinstance(segment, dict):
        raise InvalidArgumentError(where, json.dumps(segment)[:80], "an object")
    phase, text = segment.get("phase"), segment.get("text")
    if phase not in SEGMENT_PHASES:
        raise InvalidArgumentError(
            f"{where}.phase", json.dumps(phase), f"one of {', '.join(SEGMENT_PHASES)}"
        )
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{where}.text", json.dumps(text)[:80], "text")
    return Segment(phase, text)


@dataclass(frozen=True)
class _Piece:
    text: str
    phase: str = "others"
    is_marker: bool = False


def render_trajectory(trajectory: Trajectory) -> str:
    """The trajectory in ChatML, with the tags of Qwen3 for thoughts, calls and responses.

    The tables ``qwen3`` and ``smollm2``, among others, know them. Segments of the assistant that
    follow each other are one turn, as are tool results.
    """
    return "".join(piece.text for piece in _pieces(trajectory))


def _pieces(trajectory: Trajectory) -> Iterator[_Piece]:
    """The rendered text, cut where its phase changes or a marker begins or ends."""
    previous: str | None = None
    for segment in trajectory.segments:
        role = _role(segment.phase)
        if role == _role(previous) and role in ("assistant", "tool"):
            # Between two tool results the line break is part of the marker.
            yield _Piece("\n", is_marker=role == "tool")
        else:
            if previous is not None:
                yield from _turn_end()
            header = "user" if role == "tool" else role
            yield _Piece(f"<|im_start|>{header}\n", is_marker=True)
        yield from _body(segment)
        previous = segment.phase
    if previous is not None:
        yield from _turn_end()


def _role(phase: str | None) -> str | None:
    if phase in _ASSISTANT:
        return "assistant"
    return "tool" if phase == "tool_result" else phase


def _turn_end() -> Iterator[_Piece]:
    yield _Piece("<|im_end|>", is_marker=True)
    yield _Piece("\n")


def _body(segment: Segment) -> Iterator[_Piece]:
    tagged = {
        "think": ("think", "think"),
        "tool_call": ("tool_call", "act"),
        "tool_result": ("tool_response", "tool"),
    }
    if segment.phase not in tagged:
        yield _Piece(segment.text)
        return
    tag, phase = tagged[segment.phase]
    yield _Piece(f"<{tag}>", is_marker=True)
    yield _Piece(f"\n{segment.text}\n", phase)
    yield _Piece(f"</{tag}>", phase, is_marker=True)
    if segment.phase == "think":
        yield _Piece("\n")


def label_trajectory(
    trajectory: Trajectory, tokenizer: Any, vocabulary: TokenVocabulary, max_tokens: int
) -> LabelledTokens:
    """Tokens of the rendered trajectory, each with its phase.

    Parameters
    ----------
    trajectory : Trajectory
        From `load_trajectories`.
    tokenizer : Any
        A tokenizer of transformers; no special tokens are added to the rendered text.
    vocabulary : TokenVocabulary
        The tokenizer's, from `phasekv.phases.token_vocabulary`.
    max_tokens : int
        At least 1. What is longer is cut there.

    Raises
    ------
    InvalidArgumentError
        If ``max_tokens`` is smaller, or the tokenizer changes the text. Bytes for which it has no
        token may be missing, as SmolLM2's has none for some control characters.
    """
    if max_tokens < 1:
        raise InvalidArgumentError("max_tokens", str(max_tokens), "at least 1")
    pieces = list(_pieces(trajectory))
    text = "".join(piece.text for piece in pieces).encode()
    byte_phases = np.empty(len(text), dtype=np.uint8)
    byte_is_marker = np.empty(len(text), dtype=np.bool_)
    end = 0
    for piece in pieces:
        begin, end = end, end + len(piece.text.encode())
        byte_phases[begin:end] = phase_names().index(piece.phase)
        byte_is_marker[begin:end] = piece.is_marker

    tokens = tokenizer.encode(text.decode(), add_special_tokens=False)[:max_tokens]
    begins, ends = _token_ranges(tokens, vocabulary, text)
    markers_before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(byte_is_marker)])
    return LabelledTokens(
        tokens=np.array(tokens, dtype=np.int32),
        phases=byte_phases[begins],
        is_marker=markers_before[ends] > markers_before[begins],
    )


def _token_ranges(
    tokens: list[int], vocabulary: TokenVocabulary, text: bytes
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First byte of each token in the text, and the byte after its last."""
    names = {token: name.encode() for name, token in vocabulary.added_tokens.items()}
    pieces = {vocabulary.bytes_of(token) for token in range(len(vocabulary))}
    without_token = bytes(byte for byte in range(256) if bytes([byte]) not in pieces)
    begins = np.empty(len(tokens), dtype=np.int64)
    ends = np.empty(len(tokens), dtype=np.int64)
    end = 0
    for index, token in enumerate(tokens):
        piece = names.get(token) or vocabulary.bytes_of(token)
        begin = text.find(piece, end)
        if begin < 0 or text[end:begin].strip(without_token):
            raise InvalidArgumentError(
                "tokenizer",
                f"token {token} ({piece!r}) at byte {end}",
                f"tokens that spell the text, {text[end : end + 20]!r}",
            )
        begins[index], ends[index] = begin, begin + len(piece)
        end = begin + len(piece)
    return begins, ends
