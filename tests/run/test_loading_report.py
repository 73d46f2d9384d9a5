"""Lines while the parts of a run are loaded."""

import re
import time

import pytest

from open_instruct.run.loading_report import EVERY_S, LoadingReport


def wait_for_lines(caplog: pytest.LogCaptureFixture, number: int) -> None:
    deadline = time.monotonic() + 60.0
    while len(caplog.messages) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_lines_say_what_is_loaded_and_for_how_long(caplog: pytest.LogCaptureFixture) -> None:
    assert EVERY_S == 15.0
    caplog.set_level("INFO")
    with LoadingReport("engine 0", "2 learners", every_s=0.05) as loading:
        wait_for_lines(caplog, 2)
        loading.parts = ["2 learners"]
        wait_for_lines(caplog, len(caplog.messages) + 2)
    assert re.fullmatch(r"loading for \d+s: engine 0 and 2 learners", caplog.messages[0])
    assert re.fullmatch(r"loading for \d+s: 2 learners", caplog.messages[-1])
    assert not loading._thread.is_alive()  # the block has ended, so no line comes any more


def test_an_error_in_the_block_ends_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    loading = LoadingReport("Ray", every_s=0.05)
    with pytest.raises(ValueError, match="no room"), loading:
        raise ValueError("no room")
    assert not loading._thread.is_alive()
