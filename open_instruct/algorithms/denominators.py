"""The divisors of an optimizer step's summed loss (`--loss_denominator`) and of its parts (`--kl_denominator`)."""

from dataclasses import dataclass

TOKEN = "token"
"""The number of trained tokens: every token weighs the same (DAPO)."""
SEQUENCE = "sequence"
"""The mean over the trained tokens of each response, then over responses: every response weighs the same (GRPO). The samples of
a conversation are one response."""
CONSTANT = "constant"
"""The number of responses times the longest possible response (Dr. GRPO): lengths do not matter."""
KINDS = (TOKEN, SEQUENCE, CONSTANT)


@dataclass(frozen=True)
class Scales:
    """Factors of parts of the loss. The divisor of the policy loss divides the whole sum, so these factors give each part its own
    denominator. Example: if the policy loss is divided by 100 and the KL by 50, the scale of the KL is 2."""

    kl: float = 1.0
    ce: float = 0.0
    """Factor of each token whose cross-entropy is trained on; it includes the coefficient."""


def loss_divisor(denominator: float | str, *, num_tokens: int, num_sequences: int, response_length: int) -> float:
    """The divisor of the summed loss. With `sequence` each token's loss has already been divided by the length of its response.

    Args:
        denominator: one of `KINDS`, or the divisor itself.
        num_tokens, num_sequences: trained tokens, and responses with a trained token, of an optimizer step over all ranks. A
            conversation of several samples is one response.
        response_length: tokens of the longest possible response, or conversation.
    """
    if denominator == TOKEN:
        return max(num_tokens, 1)
    if denominator == SEQUENCE:
        return max(num_sequences, 1)
    if denominator == CONSTANT:
        return max(num_sequences, 1) * response_length
    return float(denominator)
