"""The recorders on a small model, against the model's own output."""

import pytest
import torch

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.recorder import AnswerRecorder, RowRecorder


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 20, bias=False)

    def forward(self, rows):
        return self.body(rows)

    def compute_logits(self, hidden):
        return self.head(hidden)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def rows():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(2))


def test_rows_are_those_of_the_prompt(model, rows):
    recorder = AnswerRecorder(model)
    with recorder.record(6, 3, 5):
        model(rows)
        model(torch.zeros(1, 8))  # a decode step of the same request
    expected = torch.log_softmax(model.head(model.body(rows[3:5])), dim=-1)
    assert torch.allclose(recorder.log_probs(), expected, atol=1e-6)


def test_nothing_is_kept_outside(model, rows):
    recorder = AnswerRecorder(model)
    model(rows)
    with pytest.raises(RuntimeError, match="no prompt was recorded"):
        recorder.log_probs()


def test_a_split_prompt_is_refused(model, rows):
    recorder = AnswerRecorder(model)
    with recorder.record(7, 5, 6), pytest.raises(RuntimeError, match="max_num_batched_tokens"):
        model(rows)


def test_close_takes_the_hook_off(model, rows):
    recorder = AnswerRecorder(model)
    recorder.close()
    with recorder.record(6, 0, 1):
        model(rows)
    with pytest.raises(RuntimeError, match="no prompt was recorded"):
        recorder.log_probs()


@pytest.mark.parametrize(("begin", "end"), [(3, 3), (-1, 2), (4, 7)])
def test_rows_outside_the_prompt(model, begin, end):
    with (
        pytest.raises(InvalidArgumentError, match="rows"),
        AnswerRecorder(model).record(6, begin, end),
    ):
        pass


class StepModel(Model):
    """Called as vLLM calls its models."""

    def forward(self, input_ids, positions):
        return super().forward(input_ids)


def run_steps(model, rows, begins):
    for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True):
        model(input_ids=rows[begin:end], positions=torch.arange(begin, end))


def test_rows_of_several_steps_are_those_of_one(rows):
    model = StepModel()
    recorder = RowRecorder(model)
    with recorder.record([0, 2, 3, 5]):
        run_steps(model, rows, [0, 2, 3])
        model(input_ids=torch.zeros(1, 8), positions=torch.tensor([6]))  # a decode step
    hidden = recorder.hidden()
    assert torch.allclose(hidden, model.body(rows[[0, 2, 3, 5]]), atol=1e-6)
    expected = torch.log_softmax(model.head(hidden), dim=-1)
    assert torch.allclose(recorder.log_probs(hidden), expected, atol=1e-6)
    run_steps(model, torch.zeros(6, 8), [0])
    assert torch.equal(recorder.hidden(), hidden)


def test_steps_of_another_request_are_refused(rows):
    model = StepModel()
    recorder = RowRecorder(model)
    with recorder.record([3]), pytest.raises(RuntimeError, match="one request at a time"):
        model(input_ids=rows, positions=torch.tensor([0, 1, 2, 0, 1, 2]))


@pytest.mark.parametrize("positions", [[], [-1], [2, 2], [3, 1]])
def test_positions_ascend(positions):
    with (
        pytest.raises(InvalidArgumentError, match="positions"),
        RowRecorder(StepModel()).record(positions),
    ):
        pass


def test_a_closed_row_recorder_keeps_nothing(rows):
    model = StepModel()
    recorder = RowRecorder(model)
    recorder.close()
    with recorder.record([0]):
        run_steps(model, rows, [0])
    with pytest.raises(RuntimeError, match="no prompt was recorded"):
        recorder.hidden()
