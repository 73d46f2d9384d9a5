"""Watches how many responses are not scored, and ends a run whose rewards cannot be trusted."""

from collections import Counter, deque
from collections.abc import Iterable

from open_instruct.verifiers.scoring_processes import Scored

WINDOW = 1000
"""Number of responses over which the share is computed: the last ones."""
AT_LEAST = 100
"""Number of responses that must have been recorded before the share is checked."""


class TooFewScored(RuntimeError):
    """More than `--max_unscored_share` of the responses were not scored. The text says why they were not."""


class UnscoredShare:
    """Share of the last responses that were not scored. Not thread-safe: the controller's lock guards it."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._causes: deque[str] = deque(maxlen=WINDOW)
        """Why each of the last responses was not scored; "" for a scored response."""

    def record(self, scored: Iterable[Scored]) -> None:
        """Count these responses. Raises `TooFewScored` if too many of the last responses were not scored."""
        self._causes.extend(
            "" if result.score is not None else result.failure or "no reason given" for result in scored
        )
        causes = Counter(filter(None, self._causes))
        share = causes.total() / max(len(self._causes), 1)
        if len(self._causes) >= AT_LEAST and share > self._allowed:
            reasons = "; ".join(f"{number} × {cause}" for cause, number in causes.most_common(3))
            raise TooFewScored(
                f"{share:.0%} of the last {len(self._causes)} responses were not scored, and --max_unscored_share allows "
                f"{self._allowed:.0%}. Why: {reasons}"
            )
