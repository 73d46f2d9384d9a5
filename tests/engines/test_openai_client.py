"""Turns over HTTP: what is tried again, what is not, who is asked, and servers that come and go."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from rc_fakes import DOCUMENTED, Call, Rig, ScriptedServer, completion, polite, states, table

from open_instruct.engines.openai_client import MalformedReply, ServerProblem, find_model, parse_choice
from open_instruct.workflows.rc.types import REASONING, SUMMARIZATION, EnginesDown, NotScored, RetryOptions


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as one:
        yield one


def fails(times: int, how: Any, of: int = 0) -> Any:
    """A script whose call number `of` fails so often in the way `how`; a status code, a body or None."""
    left = [times]

    def script(call: Call) -> Any:
        if call.number >= of and left[0]:
            left[0] -= 1
            return web.json_response({"error": "scripted"}, status=how) if isinstance(how, int) else how
        return polite(call)

    return script


NO_COMPLETIONS: list[Any] = [
    {},
    {"choices": []},
    {"choices": [{}]},
    {"choices": [None]},
    {"choices": None},
    {"error": "x"},
    completion("x", finish_reason="abort"),
    completion("x", text=None),
    completion("x", token_ids=["1"]),
    completion("x", logprobs={"token_logprobs": [None]}),
    web.Response(body=b'{"choices": [{"text": "x", "finish_reason": "stop", "logprobs": {"token_logprobs": [NaN]}}]}'),
    web.Response(body=b"<html>"),
    web.Response(body=b"[" * 100_000),
    web.Response(body=b""),
]


@pytest.mark.parametrize("how", [408, 429, 500, 502, 503, None, *NO_COMPLETIONS], ids=lambda how: str(how)[:40])
def test_passing_failures_cost_a_retry_of_that_turn_alone(server: ScriptedServer, how: Any) -> None:
    if isinstance(how, web.Response):
        body = how.body
        server.script = lambda call: web.Response(body=body) if call.number == 1 else polite(call)
    else:
        server.script = fails(1, how, of=1)
    (result,) = Rig([server]).run(states(1))
    assert table(result) == DOCUMENTED
    assert result.num_retries == 1
    assert len(server.of_type(REASONING)) == 3  # the failed summary costs no reasoning
    assert len(server.of_type(SUMMARIZATION)) == 4
    assert server.calls[1].body == server.calls[2].body


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_what_is_refused_is_not_tried_again(server: ScriptedServer, status: int) -> None:
    server.script = lambda call: (
        web.json_response({"error": "WHY"}, status=status) if "PROBLEM0." in call.prompt else polite(call)
    )
    bad, good = sorted(Rig([server]).run(states(2)), key=lambda one: one.trajectory_id)
    assert (bad.dropped, good.dropped) == ("rejected", "")
    assert f"HTTP {status}" in bad.cause
    assert "WHY" in bad.cause
    assert len([call for call in server.calls if "PROBLEM0." in call.prompt]) == 1


def test_delays_double_between_the_tries(server: ScriptedServer) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    server.script = fails(2, 503)
    Rig([server], sleep=sleep).run(states(1))
    assert slept == [1.0, 2.0]
    assert len(server.calls) == 6 + 2


def test_a_turn_without_retries_left_is_put_back_with_the_turns_before_it(server: ScriptedServer) -> None:
    server.script = fails(4, 503, of=3)
    (state,) = states(1)
    (result,) = Rig([server]).run([state])
    assert table(result) == DOCUMENTED
    assert (result.num_retries, result.num_requeues) == (4, 1)
    assert len(server.of_type(REASONING)) == 3
    assert len(server.of_type(SUMMARIZATION)) == 3 + 4


def test_put_back_too_often_is_dropped_and_the_others_go_on(server: ScriptedServer) -> None:
    server.script = lambda call: (
        web.Response(status=503) if "PROBLEM0." in call.prompt and call.turn_type == SUMMARIZATION else polite(call)
    )
    results = {one.trajectory_id: one for one in Rig([server], max_requeues=2).run(states(3))}
    bad = results.pop("test#0/attempt-0/0")
    assert (bad.dropped, bad.num_requeues, bad.num_retries) == ("retries_exhausted", 2, 9)
    assert all(table(one) == DOCUMENTED for one in results.values())
    assert len([call for call in server.of_type(REASONING) if "PROBLEM0." in call.prompt]) == 1


def test_another_server_is_asked_after_a_failure() -> None:
    with ScriptedServer(lambda call: web.Response(status=503)) as bad, ScriptedServer() as good:
        (result,) = Rig([bad, good]).run(states(1))
        assert table(result) == DOCUMENTED
        assert len(good.calls) == 6
        assert result.num_retries == len(bad.calls) <= 6


# --- slots ------------------------------------------------------------------------------------------------------------


def test_no_server_has_more_turns_than_slots_and_the_least_loaded_goes_first() -> None:
    with ScriptedServer(delay_s=0.02) as one, ScriptedServer(delay_s=0.02) as other:
        rig = Rig([one, other], num_slots=3, max_in_flight=8)
        results = rig.run(states(12))
        assert len(results) == 12
        assert one.max_in_flight == other.max_in_flight == 3
        assert min(len(one.calls), len(other.calls)) > 0.35 * 72
        assert [server.in_flight for server in rig.pools[REASONING].servers] == [0, 0]


def test_turns_of_two_trajectories_take_turns_on_one_slot(server: ScriptedServer) -> None:
    server.delay_s = 0.05
    Rig([server], num_slots=1, max_in_flight=2).run(states(2))
    owners = ["PROBLEM0." in call.prompt for call in server.calls]
    assert server.max_in_flight == 1
    assert sum(one != other for one, other in itertools.pairwise(owners)) >= 6


def test_a_trajectory_may_use_several_servers() -> None:
    with ScriptedServer(delay_s=0.02) as one, ScriptedServer(delay_s=0.03) as other:
        Rig([one, other], num_slots=1, max_in_flight=3).run(states(3))
        assert {"PROBLEM0." in call.prompt for call in one.calls} == {True, False}


def test_summaries_go_to_their_own_servers() -> None:
    with ScriptedServer() as thinker, ScriptedServer() as summarizer:
        Rig([thinker], [summarizer]).run(states(3))
        assert {call.turn_type for call in thinker.calls} == {REASONING}
        assert {call.turn_type for call in summarizer.calls} == {SUMMARIZATION}


def test_all_slots_are_free_again_after_every_kind_of_failure(server: ScriptedServer) -> None:
    hows = iter([503, 400, None, {}, 429, 404] * 3)

    def script(call: Call) -> Any:
        how = next(hows, "polite")
        if how == "polite":
            return polite(call)
        return web.Response(status=how) if isinstance(how, int) else how

    server.script = script
    rig = Rig([server])
    assert len(rig.run(states(8))) == 8
    assert [one.in_flight for one in rig.pools[REASONING].servers] == [0]


# --- servers that go --------------------------------------------------------------------------------------------------


def test_a_server_killed_in_the_middle_of_turns_and_started_again_costs_nothing() -> None:
    with ScriptedServer(delay_s=0.05) as server:
        answered: list[tuple[str, str]] = []

        def script(call: Call) -> Any:
            answered.append((call.turn_type, call.prompt))
            return polite(call)

        server.script = script

        def kill_and_restart() -> None:
            while len(answered) < 6:
                time.sleep(0.01)
            time.sleep(0.02)
            server.stop()
            time.sleep(1.0)
            server.start()

        killer = threading.Thread(target=kill_and_restart)
        killer.start()
        results = Rig([server], retry=RetryOptions(max_retries=1)).run(states(6))
        killer.join()
    assert len(results) == 6
    assert all(table(one) == DOCUMENTED for one in results)
    assert all((one.dropped, one.num_retries, one.num_requeues) == ("", 0, 0) for one in results)
    assert len(answered) == len(set(answered)) == 36  # what was answered is not asked again


def test_servers_that_stay_away_end_the_run_in_time() -> None:
    server = ScriptedServer()
    server.start()
    server.script = lambda call: server._loop.stop() if call.number == 2 else polite(call)
    started = time.monotonic()
    with pytest.raises(EnginesDown, match="no server has answered for"):
        Rig([server], retry=RetryOptions(max_server_downtime_s=0.5)).run(states(2))
    assert time.monotonic() - started < 5


def test_the_others_take_over_from_a_server_that_is_gone() -> None:
    gone = ScriptedServer()
    gone.start()
    gone.stop()
    with ScriptedServer() as there:
        results = Rig([gone, there], retry=RetryOptions(max_retries=1)).run(states(4))
        assert all(table(one) == DOCUMENTED and one.num_retries == 0 for one in results)


def test_an_answer_that_nobody_could_score_leaves_its_trajectory_out(server: ScriptedServer) -> None:
    """By a name of its own: `policy_error` ten times in a row ends a run."""

    async def hangs(*_: object) -> float:
        raise NotScored("math: timeout")

    results = Rig([server], score=hangs).run(states(2))
    assert [(one.dropped, one.cause, one.rollouts) for one in results] == [
        ("not_scored", "NotScored: math: timeout", [])
    ] * 2


# --- replies ----------------------------------------------------------------------------------------------------------


def test_a_server_without_token_ids_is_marked_as_inexact(server: ScriptedServer) -> None:
    server.script = lambda call: {"choices": [{"text": "abc", "finish_reason": "stop"}]}
    (result,) = Rig([server]).run(states(1))
    turn = result.rollouts[0]
    assert turn.metadata["exact_tokens"] is False
    assert len(turn.response_ids) > 0
    assert len(turn.logprobs) == 0


def test_half_a_surrogate_pair_is_no_reason_to_stop(server: ScriptedServer) -> None:
    server.script = lambda call: completion("x", text="a\ud800b")
    (result,) = Rig([server]).run(states(1))
    assert table(result) == DOCUMENTED
    assert result.rollouts[0].text == "a?b"


@pytest.mark.parametrize("body", NO_COMPLETIONS[:10], ids=str)
def test_what_is_no_completion(body: dict[str, Any]) -> None:
    with pytest.raises(MalformedReply):
        parse_choice(json.dumps(body).encode())


# --- before a run -----------------------------------------------------------------------------------------------------


def find(server: ScriptedServer, name: str, **options: Any) -> Any:
    import asyncio

    given: dict[str, Any] = {"headers": {}, "timeout_s": 2.0, **options}
    return asyncio.run(find_model(server.url, name, **given))


def test_the_model_is_the_named_or_the_only_one(server: ScriptedServer) -> None:
    assert find(server, "elsewhere/tiny").name == "tiny"
    server.models += [{"id": "big", "max_model_len": 8}]
    assert (find(server, "big").name, find(server, "big").max_model_len) == ("big", 8)
    with pytest.raises(ServerProblem, match="serves tiny, big"):
        find(server, "other")


def test_a_refused_key_and_an_absent_server_are_told(server: ScriptedServer) -> None:
    server.api_key = "secret"
    with pytest.raises(ServerProblem, match="OPENAI_API_KEY"):
        find(server, "tiny", headers={"Authorization": "Bearer wrong"})
    assert find(server, "tiny", headers={"Authorization": "Bearer secret"}).name == "tiny"
    server.stop()
    started = time.monotonic()
    with pytest.raises(ServerProblem, match=r"no server answered within 1 s"):
        find(server, "tiny", timeout_s=1.0)
    assert time.monotonic() - started < 2.5
