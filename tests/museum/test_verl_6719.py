"""What a model said is tokenized again, and comes out as other tokens."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from exhibit import Exhibit
from played_policy import Stage, closing

EXHIBIT = Exhibit(
    reports=("verl-project/verl #6719", "stanford-cs336/assignment5-alignment #15"),
    subject="tokens and turns",
    happened="The text of a response, or of a whole conversation at each turn, was tokenized anew. The tokens are then not"
    " always those that were sampled (a response that was cut off at its limit came out longer), and log-probs "
    "and masks belong to a text that no engine has seen.",
    here="A conversation only grows: sampled tokens are kept as they came, and only what tools and users say is "
    "tokenized (`workflows/conversations/`).",
)
SAID = ("<calculator>1+1</calculator>", "  so <calculator>2+2</calculator>", "no tags <end>")
Prompts = Callable[[Stage], list[list[int]]]
"""The prompt of each turn."""


def check(stage: Stage, prompts_of: Prompts) -> None:
    """Each prompt begins with the prompt before it and with the very tokens that were sampled from it."""
    prompts = prompts_of(stage)
    sampled = [completion.token_ids.tolist() for completion in stage.policy.completions]
    assert len(prompts) == len(sampled) == len(SAID)
    for before, turn, after in zip(prompts, sampled, prompts[1:], strict=False):
        assert after[: len(before) + len(turn)] == before + turn


def ours(stage: Stage) -> list[list[int]]:
    assert not stage.roll_out().error
    return [np.asarray(prompt).tolist() for prompt in stage.policy.prompts]


def theirs(stage: Stage) -> list[list[int]]:
    """The same texts, encoded as a whole."""
    backend = stage.chat
    texts = [backend.decode_all(prompt).replace("  ", " ") for prompt in ours(stage)]  # as a template that strips does
    return [backend.encode(text) for text in texts]


@pytest.fixture
def stage() -> Iterator[Stage]:
    spoken = iter(SAID)
    with closing(Stage) as make:
        yield make(lambda *_: next(spoken), tools=["calculator"])


def test_tokens_of_a_rendered_text_are_caught(stage: Stage) -> None:
    with pytest.raises(AssertionError):
        check(stage, theirs)


def test_sampled_tokens_are_never_made_again_here(stage: Stage) -> None:
    check(stage, ours)
