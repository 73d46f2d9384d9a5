"""Learners and engines take turns on the same devices: who gives way to whom. Whole runs: runs/test_on_policy.py."""

import signal
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_args

from open_instruct.cluster.failures import ComponentDied
from open_instruct.run import device_sharing
from open_instruct.run.device_sharing import DeviceSharing, ExclusiveSharing, FreeDevices
from open_instruct.system.interruption import Interrupted


class Play:
    """Learners and engines that write down what they are asked. Engines that sleep without weights need new ones."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        manager: Any = SimpleNamespace(
            async_offload=lambda *, keep_weights: self.note(
                "engines sleep with weights" if keep_weights else "engines sleep", 30
            ),
            async_onload=lambda tags=None: self.note(f"engines {tags}"),
            async_leave_devices=lambda: self.note("engines leave", 30),
            kill_engines=lambda: self.note("engines are killed"),
        )
        group: Any = SimpleNamespace(
            async_offload=lambda tags=None: self.note(
                "learners sleep" if tags is None else f"learners keep all but {tags}", 50
            ),
            async_onload=lambda tags=None: self.note("learners wake" if tags is None else f"learners wake {tags}"),
        )
        self.devices = FreeDevices(for_engines=False)
        self.loading: list[str] = []
        self.ended_loading: list[str] = []
        self.signal_came = False
        self.trouble: dict[str, Exception] = {}
        """What a wait raises, by what is waited for."""
        self.waits: list[tuple[list[Any], float]] = []
        self.sharing = ExclusiveSharing(
            manager,
            group,
            self.wait,
            self.devices,
            timeout_s=1.0,
            loading=lambda: self.loading,
            loading_timeout_s=60.0,
            end_loading=self.end_loading,
        )

    def end_loading(self) -> bool:
        assert not self.devices.for_engines
        self.ended_loading, self.loading = self.loading, []
        return bool(self.ended_loading)

    def wait(
        self, refs: list[Any], *, subject: str, timeout_s: float, interruptible: bool = False, **_: Any
    ) -> list[Any]:
        if subject in self.trouble:
            raise self.trouble[subject]
        if self.signal_came and interruptible and refs:
            raise Interrupted(signal.SIGTERM)
        if refs:
            self.waits.append((refs, timeout_s))
            assert refs is not self.loading or not self.devices.for_engines  # no other engine begins to load meanwhile
        return refs

    def note(self, call: str, released: int = 0) -> list[int]:
        self.calls.append(call)
        return [released, released]


def test_one_step_in_the_right_order() -> None:
    play = Play()
    play.sharing.learners_compute()
    play.calls.append("train")
    with play.sharing.weight_update():
        play.calls.append("new weights")
    assert play.calls == [
        "engines sleep",
        "learners wake",
        "train",
        "learners wake ['weights']",  # they are awake: nothing to do
        f"learners keep all but {('optimizer', 'gradients', 'reference')}",  # before the engines take memory
        "engines ['weights']",
        "new weights",
        "learners sleep",
        "engines ['kv_cache']",
    ]
    metrics = play.sharing.take_metrics()
    assert metrics["memory/engines_offloaded_bytes"] == 60
    assert metrics["memory/learners_offloaded_bytes"] == 200  # in two parts
    assert {
        "time/engines_offload",
        "time/engines_onload",
        "time/learners_offload",
        "time/learners_onload",
    } <= metrics.keys()
    assert play.sharing.take_metrics() == {}
    [(began, seconds)] = play.sharing.take_sleeps()  # once, until they have room for keys and values again
    assert began > 1e9
    assert 0 <= seconds < 60
    assert play.sharing.take_sleeps() == []


def test_for_a_replaced_engine_the_others_give_way_too() -> None:
    play = Play()
    with play.sharing.learners_only():
        pass
    play.calls.clear()
    with (
        play.sharing.weight_update()
    ):  # not after a step: engines are at work, and new weights come to one of them alone
        play.calls.append("new weights")
    assert play.calls == [
        "engines sleep with weights",
        "learners wake ['weights']",  # and nothing else, which no update needs
        f"learners keep all but {('optimizer', 'gradients', 'reference')}",
        "engines ['weights']",
        "new weights",
        "learners sleep",
        "engines ['kv_cache']",
    ]


def test_engines_start_only_where_no_learner_is_awake() -> None:
    play = Play()
    assert not play.devices.for_engines
    with play.sharing.weight_update():
        assert not play.devices.for_engines
    assert play.devices.for_engines
    play.sharing.learners_compute()
    assert not play.devices.for_engines


def test_an_engine_that_is_being_started_again_is_waited_for_as_long_as_it_may_load() -> None:
    play = Play()
    with play.sharing.weight_update():
        pass
    play.waits.clear()
    play.loading.append("engine 1")
    play.sharing.learners_compute()
    assert play.waits[0] == (["engine 1"], 60.0)
    assert [limit for _, limit in play.waits[1:]] == [1.0, 1.0]  # the engines sleep, the learners wake


@pytest.mark.parametrize("block", ["learners_compute", "learners_only"])
def test_a_signal_is_not_kept_waiting_by_an_engine_that_is_being_started_again(
    monkeypatch: pytest.MonkeyPatch, block: str
) -> None:
    """It may load for minutes, and a scheduler may give the run one."""
    monkeypatch.setattr(device_sharing, "KILLED_S", 0.0)
    play = Play()
    with play.sharing.weight_update():
        pass
    play.loading.append("engine 1")
    play.signal_came = True
    play.calls.clear()
    with pytest.raises(Interrupted), play.sharing.learners_only() if block == "learners_only" else nullcontext():
        play.sharing.learners_compute()
    assert play.calls == []
    play.sharing.learners_take_over()
    assert play.ended_loading == ["engine 1"]


def test_saving_has_the_learners_alone() -> None:
    play = Play()
    with play.sharing.learners_only():
        play.calls.append("save")
    assert play.calls == ["engines sleep with weights", "learners wake", "save", "learners sleep", "engines None"]


def test_at_the_end_engines_of_an_update_that_broke_off_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may hang in the update, and it has memory that the learners need for all of their state."""
    monkeypatch.setattr(device_sharing, "KILLED_S", 0.0)
    play = Play()
    with pytest.raises(KeyError), play.sharing.weight_update():
        raise KeyError("a signal, say")
    play.calls.clear()
    play.sharing.learners_take_over()
    assert play.calls == ["engines are killed", "learners wake"]


def test_at_the_end_learners_that_have_everything_are_left_alone() -> None:
    play = Play()
    play.sharing.learners_compute()
    play.calls.clear()
    play.sharing.learners_take_over()
    assert play.calls == []
    play = Play()
    with play.sharing.weight_update():
        pass
    play.calls.clear()
    play.sharing.learners_take_over()
    assert play.calls == ["engines leave", "learners wake"]


@pytest.mark.parametrize("trouble", [None, TimeoutError("it hangs"), ComponentDied("its sleep failed")])
def test_at_the_end_no_engine_is_waited_for(monkeypatch: pytest.MonkeyPatch, trouble: Exception | None) -> None:
    """Neither until it has loaded, nor until it has finished its responses; and where one hangs or fails, all are killed."""
    monkeypatch.setattr(device_sharing, "KILLED_S", 0.0)
    play = Play()
    with play.sharing.weight_update():
        pass
    play.calls.clear()
    play.loading.append("engine 1")
    if trouble:
        play.trouble["engines: offload"] = trouble
    play.sharing.learners_take_over()
    assert play.calls == ["engines leave", *["engines are killed"] * bool(trouble), "learners wake"]
    assert play.ended_loading == ["engine 1"]
    assert not play.devices.for_engines


def test_side_by_side_nothing_is_handed_over() -> None:
    turns = DeviceSharing()
    turns.offload_engines()
    turns.learners_compute()
    turns.learners_take_over()
    with turns.weight_update(), turns.learners_only():
        assert turns.take_metrics() == {}


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"num_learners_per_node": [4], "vllm_num_engines": 2}, True),
        ({"num_learners_per_node": [4], "vllm_num_engines": 2, "vllm_tensor_parallel_size": 2}, False),
        ({"num_learners_per_node": [4], "vllm_num_engines": 2, "weight_transport": "ray_object"}, False),
        ({"num_learners_per_node": [4], "vllm_num_engines": 2, "colocate": False}, False),
        ({"num_learners_per_node": [4], "vllm_num_engines": 2, "device_type": "cpu"}, False),
    ],
)
def test_weights_that_have_to_go_through_main_memory_are_told(options: dict[str, Any], warns: bool) -> None:
    args = make_args(**{"device_type": "cuda", "colocate": True, **options})
    doubts = device_sharing.doubts_about_updates(args)
    assert len(doubts) == warns
    for doubt in doubts:
        assert "4 learners and 2 workers of engines share GPUs" in doubt
        assert "equal to the 4 learners" in doubt
