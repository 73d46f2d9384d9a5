"""Shows responses in the log as the model wrote them: its prompt, the rewards, and what each verifier says (`--show_samples`).

    2 of the 8 responses to train-3, train.jsonl line 12:
    prompt      │ <|user|>12 + 34 = ?<|end|><|assistant|>
    label       │ 46
    rule        │ gsm8k: 1 if the last number after the thoughts equals the label: `$1,234.50.` is 1234.5, `7` equals `7.0`.
    ──── response 3: reward 10, stop, 6 tokens
    sampled v0  │ <answer>46</answer><|end|>
    verifier    │ gsm8k: score 1, read 46

The prompt is what the engine was given, with everything that the chat template added.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset, PromptRow
from open_instruct.report.isolation import Isolation
from open_instruct.rollouts.transcripts import HEAD, Decode, block, transcript, verdicts
from open_instruct.scored_groups import ScoredGroup
from open_instruct.system.counted import counted
from open_instruct.verifiers.registry import right_answers, scoring_rule
from open_instruct.verifiers.row_verifiers import checks_of_row

LONGEST_TEXT = 1200
"""Characters of a text that is shown whole. Of a longer text the beginning and the end are shown, because the answer is often at
the end."""
LONGEST_LABEL = 300
MOST_HELD = 20


class SampleDisplay:
    """Decides which responses are shown, and holds their texts until the driver takes them. Thread-safe."""

    def __init__(self, args: GRPOConfig, dataset: PromptDataset, decode: Decode) -> None:
        self._args = args
        self._dataset = dataset
        self._decode = decode
        self._isolation = Isolation("showing samples")
        self._texts: deque[str] = deque(maxlen=MOST_HELD)
        self._last_step: int | None = None
        """The newest step of which responses were shown; None before the first."""

    def look_at(self, training_step: int, rollouts: Sequence[ScoredGroup]) -> None:
        """Show some of these rollouts if they are the first of the run, or the first of a step that is due."""
        with_tokens = [rollout for rollout in rollouts if rollout.samples and not rollout.left_out_as]
        if with_tokens and self._is_due(training_step):
            self._last_step = training_step
            with self._isolation:
                self._texts.append(self._text(with_tokens))

    def _is_due(self, training_step: int) -> bool:
        every, last_step = self._args.show_samples_every, self._last_step
        if self._args.show_samples == 0 or last_step == training_step:
            return False
        return last_step is None or (every > 0 and training_step % every == 0)

    def take(self) -> list[str]:
        """The texts since the last call, oldest first."""
        texts = []
        while self._texts:
            texts.append(self._texts.popleft())
        return texts

    def _text(self, rollouts: Sequence[ScoredGroup]) -> str:
        texts, budget = [], self._args.show_samples
        for rollout in sorted(rollouts, key=lambda rollout: rollout.has_zero_std):  # groups that teach something first
            if budget > 0:
                number = min(budget, len(rollout.samples))
                texts.append(self.shown(rollout, number))
                budget -= number
        return "\n".join(texts)

    def shown(self, rollout: ScoredGroup, number: int) -> str:
        """`number` of the responses of a rollout: the best, the worst, and then the others by reward; different ones first."""
        row = self._dataset[rollout.result.index]
        rewards = rollout.rewards(self._args.verification_reward)
        best_first = np.argsort(-rewards, kind="stable").tolist()
        order = [*best_first[:1], *best_first[:0:-1][:1], *best_first[1:-1]]
        positions = _different_first(order, rollout)[:number]
        first = rollout.samples[positions[0]]
        source = f"{rollout.result.prompt_id}, {row.place}"
        lines = [f"{number} of the {counted(len(rollout.samples), 'response')} to {source}:"]
        lines += [
            block("prompt", self._readable(first.prompt_ids.tolist())),
            *(_label_and_rule(row) if rollout.by_verifier else []),
        ]
        for position in positions:
            sample = rollout.samples[position]
            num_tokens = counted(len(sample.response_ids), "token")
            lines.append(
                f"{HEAD}response {position + 1}: reward {rewards[position]:.4g}, {_ending(sample.finish_reason)}, {num_tokens}"
            )
            text = transcript(sample, None, self._readable, verdicts=verdicts(rollout, position))
            same_prompt = np.array_equal(sample.prompt_ids, first.prompt_ids)
            lines.append(text.removeprefix(lines[1] + "\n") if same_prompt else text)
        return "\n".join(lines)

    def _readable(self, token_ids: list[int]) -> str:
        return shortened(self._decode(token_ids))


def _different_first(positions: Sequence[int], rollout: ScoredGroup) -> list[int]:
    """The positions in their order, but those of repeated responses at the end."""
    first_with = {rollout.samples[position].response_ids.tobytes(): position for position in reversed(positions)}
    originals = set(first_with.values())
    return sorted(positions, key=lambda position: position not in originals)


def _ending(finish_reason: str) -> str:
    return "cut off at its length limit" if finish_reason == "length" else finish_reason


def _label_and_rule(row: PromptRow) -> Iterator[str]:
    for name, label in checks_of_row(row.dataset, row.ground_truth):
        answers = " or ".join(right_answers(name, label)) or str(label)
        yield block("label", shortened(answers, LONGEST_LABEL))
        yield block("rule", shortened(f"{name}: {rule_in_words(name, label)}", LONGEST_LABEL))


def rule_in_words(name: str, label: object) -> str:
    """What a verifier looks for, as it says itself."""
    try:
        return scoring_rule(name, label) or "its verifier does not say what it looks for"
    except Exception as error:  # a user's verifier may raise anything, and must not stop the run here
        return f"its verifier does not say what it looks for: {error!r}"


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """A text of bounded length that changes nothing on a terminal: control characters and half characters are shown as escapes,
    line ends as they are."""
    if len(text) > longest:
        third = longest // 3
        text = f"{text[:third]} … ({len(text):,} characters) … {text[-2 * third :]}"
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )
