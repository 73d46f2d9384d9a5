"""A run of which too many responses go unscored ends."""

import pytest

from open_instruct.rollouts.unscored_share import AT_LEAST, WINDOW, TooFewScored, UnscoredShare
from open_instruct.verifiers.scoring_processes import Scored

RIGHT, LATE, GONE = Scored(1.0), Scored(None, "timeout"), Scored(None, "unavailable: the judge is away")


def test_it_says_why() -> None:
    share = UnscoredShare(0.5)
    share.record([RIGHT] * 50 + [LATE] * 30 + [GONE] * 20)
    with pytest.raises(TooFewScored) as error:
        share.record([GONE] * 3)
    assert "51% of the last 103 responses were not scored, and --max_unscored_share allows 50%" in str(error.value)
    assert "Why: 30 × timeout; 23 × unavailable: the judge is away" in str(error.value)


def test_the_first_responses_prove_nothing() -> None:
    share = UnscoredShare(0.0)
    share.record([LATE] * (AT_LEAST - 1))
    with pytest.raises(TooFewScored, match="100%"):
        share.record([LATE])


def test_only_the_last_ones_count() -> None:
    share = UnscoredShare(0.5)
    share.record([RIGHT] * 5000)
    share.record([LATE] * (WINDOW // 2))
    with pytest.raises(TooFewScored):
        share.record([LATE])


def test_all_may_be_allowed() -> None:
    UnscoredShare(1.0).record([LATE] * 5000)
