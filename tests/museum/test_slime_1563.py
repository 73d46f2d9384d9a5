"""The loss mask of a conversation is that of a single response."""

from collections.abc import Callable, Iterator

import pytest
from exhibit import Exhibit
from played_policy import Stage, closing

from open_instruct.data_types import Sample

EXHIBIT = Exhibit(
    reports=("THUDM/slime #1563",),
    subject="tokens and turns",
    happened="The loss mask was made as if a conversation were one prompt and one response. With several turns it covered "
    "what users and tools had said, or left turns of the model out.",
    here="Each token of a conversation is marked when it is appended: sampled by the policy or not "
    "(`Sample.loss_mask`, `workflows/conversations/`).",
)
SAID = ("<calculator>12 + 34</calculator>", "<answer>46</answer><end>")
Mask = Callable[[Sample], list[bool]]


def check(stage: Stage, mask_of: Mask) -> None:
    [sample] = stage.roll_out().samples
    mask = mask_of(sample)
    trained = [token for token, is_own in zip(sample.response_ids.tolist(), mask, strict=True) if is_own]
    assert trained == [token for completion in stage.policy.completions for token in completion.token_ids.tolist()]
    assert "output" not in stage.chat.decode(trained)


def theirs(sample: Sample) -> list[bool]:
    assert sample.loss_mask is not None
    num_trained, number = int(sample.loss_mask.sum()), len(sample.response_ids)
    return [position >= number - num_trained for position in range(number)]


def ours(sample: Sample) -> list[bool]:
    assert sample.loss_mask is not None
    return sample.loss_mask.astype(bool).tolist()


@pytest.fixture
def stage() -> Iterator[Stage]:
    spoken = iter(SAID)
    with closing(Stage) as make:
        yield make(lambda *_: next(spoken), tools=["calculator"])


def test_mask_of_one_stretch_is_caught(stage: Stage) -> None:
    with pytest.raises(AssertionError):
        check(stage, theirs)


def test_all_turns_of_the_policy_and_nothing_else_are_trained_on_here(stage: Stage) -> None:
    check(stage, ours)
