"""What the summed loss of an optimizer step is divided by (`--loss_denominator`)."""

TOKEN = "token"
"""The number of trained tokens: every token weighs the same (DAPO)."""
SEQUENCE = "sequence"
"""The mean over the trained tokens of each response, then over responses: every response weighs the same (GRPO)."""
CONSTANT = "constant"
"""The number of responses times the longest possible response (Dr. GRPO): lengths do not matter."""
KINDS = (TOKEN, SEQUENCE, CONSTANT)


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
