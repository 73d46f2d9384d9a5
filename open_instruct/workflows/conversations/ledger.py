"""The tokens of a conversation, and who wrote each of them. Sampled tokens never change.

prompt   | policy        | template and tool | policy            ids are only ever added at the end
         | log-probs     |                   | log-probs
         | versions      |                   | versions
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from open_instruct.data_types import Completion, Sample

Writer = Literal["policy", "tool"]
"""Who wrote a span: the model; or a tool or environment, with the template's text around it."""


@dataclass(frozen=True)
class Span:
    """Tokens that one writer has added at once."""

    writer: Writer
    token_ids: np.ndarray  # (S,) int32
    logprobs: np.ndarray  # (S,) float32, as sampled; 0 where the policy did not sample
    version_spans: list[tuple[int, int]]
    """As in `Completion`. Tokens that the policy did not sample get the version of the policy's last token before them."""
    kv_age: int | None = None
    """As in `Completion`; None if the policy did not sample the span."""

    @property
    def is_sampled(self) -> bool:
        return self.writer == "policy"


class Ledger:
    """The tokens of one sample: its prompt, and all spans after the prompt."""

    def __init__(self, prompt_ids: "np.ndarray | Sequence[int]") -> None:
        self.prompt_ids = np.asarray(prompt_ids, np.int32)  # (Q,)
        self.spans: list[Span] = []

    def sampled(self, completion: Completion) -> None:
        """Add what the policy has sampled."""
        if len(completion.token_ids):
            spans = list(completion.version_spans)
            self.spans.append(
                Span("policy", completion.token_ids, completion.logprobs, spans, kv_age=completion.kv_age)
            )

    def inserted(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the policy did not sample. They are never trained on, and always follow a token of the policy."""
        assert self.spans, "the policy speaks first"
        if len(token_ids):
            ids = np.asarray(token_ids, np.int32)
            version, _ = self.spans[-1].version_spans[-1]
            self.spans.append(Span("tool", ids, np.zeros(len(ids), np.float32), [(version, len(ids))]))

    def behind(self, num_spans: int) -> "Ledger":
        """The same tokens, with the first spans as a part of the prompt."""
        ledger = Ledger(np.concatenate([self.prompt_ids, *(span.token_ids for span in self.spans[:num_spans])]))
        ledger.spans = self.spans[num_spans:]
        return ledger

    @property
    def token_ids(self) -> np.ndarray:
        """(Q + R,) int32: prompt and response, as they are sent to the engine for the next turn."""
        return np.concatenate([self.prompt_ids, *(span.token_ids for span in self.spans)])

    @property
    def num_response_tokens(self) -> int:
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(span.token_ids) for span in self.spans if span.is_sampled)

    def sample(self, *, finish_reason: str, goes_on: bool = False, environment_reward: float | None = None) -> Sample:
        """The conversation as a sample. All tokens after the prompt are the response; only the policy's tokens are trained on."""
        begins, answer_start = 0, 0
        for span in self.spans:
            if span.is_sampled:
                answer_start = begins
            begins += len(span.token_ids)
        empty = [np.zeros(0, np.int32)]
        return Sample(
            prompt_ids=self.prompt_ids,
            response_ids=np.concatenate(empty + [span.token_ids for span in self.spans]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(span.logprobs for span in self.spans)]),
            finish_reason=finish_reason,
            version_spans=merged([pair for span in self.spans for pair in span.version_spans]),
            loss_mask=np.concatenate(
                [np.zeros(0, bool), *(np.full(len(span.token_ids), span.is_sampled) for span in self.spans)]
            ),
            answer_start=answer_start,
            is_judged=not goes_on,
            goes_on=goes_on,
            environment_reward=environment_reward,
            kv_age=max((span.kv_age for span in self.spans if span.kv_age is not None), default=None),
        )


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Version spans with neighbours of the same version as one: `[(3, 10), (3, 2), (4, 1)]` becomes `[(3, 12), (4, 1)]`."""
    result: list[tuple[int, int]] = []
    for version, length in spans:
        if result and result[-1][0] == version:
            result[-1] = (version, result[-1][1] + length)
        else:
            result.append((version, length))
    return result
