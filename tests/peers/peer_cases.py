"""Inputs on which this project and its peers are compared: random and adversarial micro-batches, and groups of rewards.

NumPy alone, because both sides import this file: the tests, and `ask_peers.py` in the environment of the peers.
Shapes: B sequences, T tokens, N responses.
"""

from dataclasses import dataclass, replace

import numpy as np

CLIP_LOWER, CLIP_HIGHER, DUAL_CLIP = 0.2, 0.272, 3.0
MAX_LENGTH = 16
RHO_UPPER, RHO_LOWER = 2.0, 0.5
OFF_POLICY_THRESHOLD = 0.1
BETA = 0.05


@dataclass(frozen=True)
class Case:
    """One micro-batch, padded: float32, (B, T), and (B, 1) for the advantages."""

    new: np.ndarray
    old: np.ndarray
    behaviour: np.ndarray
    ref: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray


def make_case(seed: int, lengths: list[int], *, spread: float, largest: float | None = None) -> Case:
    """Log-probs whose logarithms of ratios have the standard deviation `spread`, or are ±`largest` on every third token."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(1, *lengths))
    behaviour = -rng.exponential(1.0, shape)

    def moved() -> np.ndarray:
        shift = rng.normal(0.0, spread, shape)
        if largest is not None:
            shift = np.where(np.arange(shape[1]) % 3 == 0, rng.choice([-largest, largest], shape), shift)
        return shift

    old = behaviour + moved() / 2
    new = old + moved()
    # Between the new and the old policy, if they are far apart: the KL of a token is cut at a difference of 40.
    ref = old + (rng.normal(0.0, 0.5, shape) if largest is None else 0.5 * np.sign(new - old))
    arrays = {"new": new, "old": old, "behaviour": behaviour, "ref": ref}
    return Case(
        **{name: array.astype(np.float32) for name, array in arrays.items()},
        advantages=rng.normal(0.0, 1.0, (len(lengths), 1)).astype(np.float32),
        mask=np.arange(shape[1]) < np.array(lengths)[:, None],
    )


CASES: dict[str, Case] = {
    "on policy": make_case(0, [5, 9, 3, 16], spread=0.0),
    "near": make_case(1, [5, 9, 3, 16], spread=0.05),
    "far": make_case(2, [5, 9, 3, 16, 1, 7], spread=0.8),
    "one token": make_case(3, [1], spread=0.3),
    "tokens alone": make_case(4, [1, 1, 1], spread=0.3),
    "some sequences masked": make_case(5, [4, 0, 6, 0], spread=0.3),
    "log-ratios of 19": make_case(6, [7, 4, 9], spread=0.3, largest=19.0),
}
FURTHER_CASES: dict[str, Case] = {"log-ratios of 40": make_case(7, [7, 4, 9], spread=0.3, largest=40.0)}
"""What verl answers differently on purpose: it cuts log-ratios at 20."""


def with_engine_as_old_policy(case: Case) -> Case:
    """For dppo_tv: verl's trust region is about the old policy, which is the engine's where it runs without an old policy of its
    own. Here the trust region is about the engine's policy, as in the paper, whatever the old policy is."""
    return replace(case, old=case.behaviour)


VOCAB = 40


def make_logits(seed: int, num_tokens: int, *, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the policy and of a teacher: (tokens, VOCAB) float32 each."""
    policy, teacher = np.random.default_rng(seed).normal(0.0, spread, (2, num_tokens, VOCAB)).astype(np.float32)
    return policy, teacher


# --- losses together with the head of the model --------------------------------------------------------------------------

TEMPERATURE = 0.7


@dataclass(frozen=True)
class HeadCase:
    """A micro-batch before the head of the model: hidden states (B, T, H) and the head's weight (V, H), float32, sampled tokens
    (B, T) int64, and what `Case` has, with the log-probs of these tokens as `new`."""

    hidden: np.ndarray
    weight: np.ndarray
    tokens: np.ndarray
    case: Case


def make_head_case(seed: int, lengths: list[int], *, spread: float, num_hidden: int = 24) -> HeadCase:
    rng = np.random.default_rng(seed)
    case = make_case(seed, lengths, spread=spread)
    hidden = rng.normal(0.0, 1.0, (*case.mask.shape, num_hidden)).astype(np.float32)
    weight = rng.normal(0.0, 0.5, (VOCAB, num_hidden)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, case.mask.shape)
    logits = (hidden.astype(np.float64) @ weight.T.astype(np.float64)) / TEMPERATURE
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    new = np.take_along_axis(logprobs, tokens[..., None], -1)[..., 0].astype(np.float32)
    moved = {name: getattr(case, name) - case.new + new for name in ("new", "old", "behaviour", "ref")}
    return HeadCase(hidden, weight, tokens, replace(case, **moved))


HEADS: dict[str, HeadCase] = {
    "on policy": make_head_case(10, [5, 9, 3, 16], spread=0.0),
    "near": make_head_case(11, [5, 9, 3, 16], spread=0.05),
    "far": make_head_case(12, [5, 9, 3, 16, 1, 7], spread=0.8),
    "one token": make_head_case(13, [1], spread=0.3),
}

TEACHERS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "near": make_logits(0, 12, spread=0.1),
    "far": make_logits(1, 12, spread=3.0),
    "one token": make_logits(2, 1, spread=1.0),
    "logits of 40": make_logits(3, 8, spread=40.0),
}
TOP_KS = 1, 8, VOCAB


REWARDS: dict[str, list[list[float]]] = {
    "four groups": [[1, 0, 0, 0], [1, 1, 0, 1], [0.5, 0.25, 1, 0], [0, 0, 0, 0]],
    "unequal sizes": [[1, 0], [1, 0, 0, 1, 1], [0.3, 0.3, 0.9]],
    "a group of one": [[1], [0, 1], [10, 0, 0, 10]],
}


def lengths_of(groups: list[list[float]]) -> list[np.ndarray]:
    """Response lengths of each group's responses."""
    rng = np.random.default_rng(0)
    return [rng.integers(1, MAX_LENGTH + 1, len(group)) for group in groups]
