"""Warnings that an actor holds for the driver."""

import logging
import sys
from collections.abc import Iterator

import pytest

from open_instruct.rollouts.actor_warnings import MAX_HELD, HeldWarnings

logger = logging.getLogger("open_instruct.somewhere")


@pytest.fixture
def warnings() -> Iterator[HeldWarnings]:
    warnings = HeldWarnings()
    warnings.install()
    yield warnings
    warnings.remove()


def test_warnings_of_the_package_are_held_once_and_reach_stderr_too(
    warnings: HeldWarnings, capsys: pytest.CaptureFixture[str]
) -> None:
    warnings.setStream(sys.stderr)  # what pytest has put there for this test
    logger.info("nothing to worry about")
    logger.warning("%d groups were given up", 3)
    logging.getLogger("other").warning("not ours")
    assert warnings.take() == ["3 groups were given up"]
    assert warnings.take() == []
    assert "3 groups were given up" in capsys.readouterr().err


def test_warnings_that_nobody_takes_are_bounded(warnings: HeldWarnings) -> None:
    for number in range(10 * MAX_HELD):
        logger.warning("warning %d", number)
    assert warnings.take() == [f"warning {number}" for number in range(9 * MAX_HELD, 10 * MAX_HELD)]
