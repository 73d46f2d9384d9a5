"""What the summed loss of an optimizer step is divided by (`--loss_denominator`), and its parts (`--kl_denominator`)."""

from dataclasses import dataclass

TOKEN = "token"
"""The number of trained tokens: every token weighs the same (DAPO)."""
SEQUENCE = "sequence"
"""The mean over the trained tokens of each response, then over responses: every response weighs the same (GRPO)."""
CONSTANT = "constant"
"""The number of responses times the longest possible response (Dr. GRPO): lengths do not matter."""
KINDS = (TOKEN, SEQUENCE, CONSTANT)


@dataclass(frozen=True)
class Scales:
    """What parts of the loss are multiplied by before all is divided by the divisor of the policy loss, so that each has a
    denominator of its own. A KL that is divided by 50 beside a policy loss that is divided by 100 has the scale 2."""

    kl: float = 1.0
    ce: float = 0.0
    """For each token whose cross-entropy is trained on; with its coefficient."""


def loss_divisor(denominator: float | str, *, num_tokens: int, num_sequences: int, response_length: int) -> float:
    """The divisor of the summed loss; with `sequence` the loss of a token was divided by the length of its response before.

    Args:
        denominator: one of `KINDS`, or the divisor itself.
        num_tokens, num_sequences: trained tokens, and responses with a trained token, of an optimizer step over all ranks.
        response_length: tokens of the longest possible response.
    """
    if denominator == TOKEN:
        return max(num_tokens, 1)
    if denominator == SEQUENCE:
        return max(num_sequences, 1)
    if denominator == CONSTANT:
        return max(num_sequences, 1) * response_length
    return float(denominator)
