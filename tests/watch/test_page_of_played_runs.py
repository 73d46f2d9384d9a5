# ruff: noqa: F811 - fixtures are imported
"""The page of a run of the reasoning cache, and of one in which everything fails: what happened is told in words."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Tab, chromium, program
from controller_stage import datasets, plays, tokenizer  # noqa: F401 - fixtures
from played_runs import CONTROLLER_DIED, DISK_IS_FULL, ENGINE_DIED, TIMEOUT, FaultyRun, PlayedRun, rc_run
from watched_pages import enter, served

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(program() is None, reason="Chromium is not installed: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium() as tab:
        tab.size(1280, 860)
        yield tab


@pytest.fixture(scope="module")
def rc(datasets: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch, plays(datasets, tokenizer, patch) as make_play:
        return rc_run(make_play, tmp_path_factory.mktemp("rc") / "out")


class Phases:
    """The faulty run in four states, each a directory of its own."""

    def __init__(self, make_play: Any, folder: Path, patch: pytest.MonkeyPatch) -> None:
        run = FaultyRun(make_play, folder / "run", patch)
        run.until_killed()
        self.killed = Path(shutil.copytree(run.directory, folder / "killed"))
        resumed: PlayedRun = run.resumed()
        self.resumed = Path(shutil.copytree(run.directory, folder / "resumed"))
        self.torn = Path(shutil.copytree(run.directory, folder / "torn"))
        os.truncate(self.torn / "record" / "steps" / "000002.parquet", 2000)
        resumed.journal.end(f"failed: {CONTROLLER_DIED}", 1)
        resumed.close()
        self.failed = Path(shutil.copytree(run.directory, folder / "failed"))


@pytest.fixture(scope="module")
def phases(datasets: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Phases:
    with pytest.MonkeyPatch.context() as patch, plays(datasets, tokenizer, patch) as make_play:
        return Phases(make_play, tmp_path_factory.mktemp("faults"), patch)


def read(tab: Tab, address: str, state: str) -> str:
    """What the page says. It never says that it cannot be shown."""
    tab.open(f"{address}#/run/0/{state}")
    text = tab.text("main")
    assert "cannot be shown" not in text, state
    return text


# --- the reasoning cache ----------------------------------------------------------------------------------------------


def test_turns_of_the_reasoning_cache_are_told_apart(tab: Tab, rc: Path) -> None:
    with served(tab, rc) as address:
        enter(tab, address)
        assert "2 of 4" in read(tab, address, "curves")
        group = read(tab, address, "step/2/train-4")
        for turn, count in (("reasoning 1", 4), ("summarization 1", 4), ("reasoning 2", 4)):
            assert group.count(turn) == count, turn
        assert "summarization 1" in read(tab, address, "step/2")
        assert "summarization 1" in read(tab, address, "step/2/train-4/4")
        assert "turn" in read(tab, address, "lanes/2")
        assert "Step 2 trained on it" in read(tab, address, "why/train-4")


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_killed_run_says_so_and_shows_what_it_had(tab: Tab, phases: Phases) -> None:
    with served(tab, phases.killed) as address:
        enter(tab, address)
        curves = read(tab, address, "curves")
        assert "The run was killed" in curves
        assert "goes on from the newest checkpoint" in curves
        assert tab.text(".live") == "connected"
        step = read(tab, address, "step/3")
        assert "open: the run ended before it was trained" in step
        assert "not trained yet" in step
        assert "trained on" not in step.replace("no step trains on it", "")


def test_a_replaced_engine_is_a_mark_and_a_warning_and_its_prompts_say_so(tab: Tab, phases: Phases) -> None:
    with served(tab, phases.killed) as address:
        enter(tab, address)
        curves = read(tab, address, "curves")
        assert "engines replaced: 1" in curves
        assert ENGINE_DIED in curves
        assert ENGINE_DIED in read(tab, address, "health")
        assert "It was lost with its engine" in read(tab, address, f"why/{FaultyRun.lost}")


def test_the_life_of_each_prompt_tells_its_fault(tab: Tab, phases: Phases) -> None:
    with served(tab, phases.killed) as address:
        enter(tab, address)
        retried = read(tab, address, f"why/{FaultyRun.retried}")
        assert f"{TIMEOUT}. It is tried again." in retried
        assert "Step 1 trained on it" in retried
        unscored = read(tab, address, f"why/{FaultyRun.unscored}")
        assert "could not use it, because too few of its responses were scored" in unscored
        assert "timeout" in unscored
        assert "1 response of it could not be used for lack of a score" in read(tab, address, f"why/{FaultyRun.partly}")
        assert "older than the bound of staleness" in read(tab, address, f"why/{FaultyRun.old}")
        assert "all its responses were cut off" in read(tab, address, f"why/{FaultyRun.cut}")
        dropped = read(tab, address, f"why/{FaultyRun.dropped}")
        assert f"{TIMEOUT}. It is not tried again." in dropped
        assert "dropped it, because the engines gave it up too often" in dropped


def test_steps_and_cost_count_what_was_left_out_and_why(tab: Tab, phases: Phases) -> None:
    with served(tab, phases.killed) as address:
        enter(tab, address)
        first, second, cost = read(tab, address, "step/1"), read(tab, address, "step/2"), read(tab, address, "cost")
        assert "not scored" in first
        assert "all were cut off" in second
        assert "too old" in second
        for reason in ("group cut off", "group too old", "not scored"):
            assert reason in cost
        assert "cut off" in read(tab, address, f"step/2/{FaultyRun.cut}")
        assert "not scored: timeout" in read(tab, address, f"step/1/{FaultyRun.partly}").replace("\n", ": ")


def test_a_resumed_run_says_where_it_went_on_and_is_live(tab: Tab, phases: Phases) -> None:
    with served(tab, phases.resumed) as address:
        enter(tab, address)
        curves = read(tab, address, "curves")
        assert "start 2 goes on after step 2" in curves
        assert "3 of 4" in curves
        assert "The run was killed" not in curves
        assert tab.text(".live") == "live"
        assert DISK_IS_FULL in read(tab, address, "health")
        assert "Step 3 trained on it" in read(tab, address, "why/train-9")


def test_a_failed_run_says_which_part_died(tab: Tab, phases: Phases) -> None:
    with served(tab, phases.failed) as address:
        enter(tab, address)
        assert f"The run failed: {CONTROLLER_DIED}" in read(tab, address, "curves")


def test_a_torn_file_is_named_and_the_rest_is_shown(tab: Tab, phases: Phases) -> None:
    with served(tab, phases.torn) as address:
        enter(tab, address)
        for state in ("cost", "lanes", "search?text=train"):
            text = read(tab, address, state)
            assert "record/steps/000002.parquet is torn" in text, state
        tab.open(f"{address}#/run/0/step/2")
        assert "000002.parquet is torn" in tab.text("main")
        assert "trained on" in read(tab, address, "step/1")
