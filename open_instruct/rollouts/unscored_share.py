"""Watches how many responses go unscored: a run whose rewards cannot be trusted ends."""

from collections import Counter, deque
from collections.abc import Iterable

from open_instruct.verifiers.scoring_processes import Scored

WINDOW = 1000
"""Responses that are looked at, the last ones."""
AT_LEAST = 100
"""Responses before anything is said."""


class TooFewScored(RuntimeError):
    """More than `--max_unscored_share` of the responses were not scored. The text says why they were not."""


class UnscoredShare:
    """Not thread-safe: the controller's lock guards it."""

    def __init__(self, allowed: float) -> None:
        self._allowed = allowed
        self._causes: deque[str] = deque(maxlen=WINDOW)
        """"" for a response that was scored."""

    def record(self, scored: Iterable[Scored]) -> None:
        """Raises `TooFewScored`."""
        self._causes.extend("" if one.score is not None else one.failure or "no reason given" for one in scored)
        causes = Counter(filter(None, self._causes))
        share = causes.total() / max(len(self._causes), 1)
        if len(self._causes) >= AT_LEAST and share > self._allowed:
            most = "; ".join(f"{number} × {cause}" for cause, number in causes.most_common(3))
            raise TooFewScored(
                f"{share:.0%} of the last {len(self._causes)} responses were not scored, and --max_unscored_share allows "
                f"{self._allowed:.0%}. Why: {most}"
            )
