"""The two Ray queues between controller and engines, with two real engines on them."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import TIMEOUT_S

from open_instruct.chat_codec import ChatCodec
from open_instruct.chat_templates import AS_IT_IS
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.data_types import EVAL, TRAIN, GenerationResult, PromptRequest, SamplingConfig

CONFIG = SamplingConfig(max_tokens=24, n=4, seed=5)


def request(prompt: np.ndarray, number: int, *, marker: str = TRAIN, config: SamplingConfig = CONFIG) -> PromptRequest:
    return PromptRequest(prompt, config, number, f"{marker}-{number}-{time.monotonic_ns()}", 0, marker=marker)


def round_trip(engines: SimpleNamespace, requests: list[PromptRequest]) -> dict[str, GenerationResult]:
    """Put all and get as many results; by prompt id."""
    results: dict[str, GenerationResult] = {}
    waiting = list(requests)
    deadline = time.monotonic() + TIMEOUT_S
    while len(results) < len(requests):
        assert time.monotonic() < deadline, f"{len(results)} of {len(requests)} results"
        while waiting and not engines.param_prompt_Q.full():
            engines.param_prompt_Q.put([waiting.pop(0)], timeout=1)
        if not engines.inference_results_Q.empty():
            for result in engines.inference_results_Q.get(timeout=1):
                assert result.prompt_id not in results
                results[result.prompt_id] = result
    return results


def collect(engines: SimpleNamespace, num: int) -> list[GenerationResult]:
    results: list[GenerationResult] = []
    while len(results) < num:
        results += engines.inference_results_Q.get(timeout=TIMEOUT_S)
    return results


def test_every_prompt_comes_back_once_as_a_whole_group(engines: SimpleNamespace, prompts: list[np.ndarray]) -> None:
    requests = [request(prompts[number % len(prompts)], number) for number in range(24)]
    results = round_trip(engines, requests)
    assert set(results) == {one.prompt_id for one in requests}
    for one in requests:
        result = results[one.prompt_id]
        assert result.index == one.index
        assert len(result.responses) == len(result.logprobs) == len(result.finish_reasons) == CONFIG.n
        for response, logprobs, reason, spans in zip(
            result.responses, result.logprobs, result.finish_reasons, result.version_spans, strict=True
        ):
            assert response.dtype == np.int32
            assert logprobs.dtype == np.float32
            assert 0 < len(response) == len(logprobs) <= CONFIG.max_tokens
            assert (logprobs <= 0).all()
            assert reason == ("length" if len(response) == CONFIG.max_tokens and reason == "length" else "stop")
            assert sum(num_tokens for _, num_tokens in spans) == len(response)
        statistics = result.token_statistics
        assert statistics.num_prompt_tokens == len(one.prompt)
        assert statistics.num_response_tokens == sum(map(len, result.responses))
        assert 0 < statistics.generation_time < TIMEOUT_S


def test_a_stop_string_that_spells_a_special_token_ends_a_response(
    engines: SimpleNamespace, prompts: list[np.ndarray], tied_model: str
) -> None:
    """As the end of a turn does for a model whose own end token is another one."""
    codec = ChatCodec(read_tokenizer(tied_model, None, AS_IT_IS))
    (end,) = codec.encode("<|end|>")
    config = SamplingConfig(max_tokens=60, n=4, seed=5, ignore_eos=True, stop=("<|end|>",))
    requests = [request(prompt, number, config=config) for number, prompt in enumerate(prompts[:2])]
    for result in round_trip(engines, requests).values():
        for response, reason in zip(result.responses, result.finish_reasons, strict=True):
            assert (response.tolist().count(end), response[-1], reason) == (1, end, "stop")


def test_engines_share_the_work(engines: SimpleNamespace, prompts: list[np.ndarray]) -> None:
    results = round_trip(engines, [request(prompts[n % len(prompts)], n) for n in range(32)])
    by_engine = [sum(result.engine_id == engine for result in results.values()) for engine in range(2)]
    assert min(by_engine) >= 4, by_engine


def test_eval_results_are_marked_and_keep_their_own_sampling(
    engines: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    greedy = SamplingConfig(temperature=0.0, max_tokens=8, n=1)
    training = [request(prompts[0], number) for number in range(4)]
    evaluation = [request(prompts[0], number, marker=EVAL, config=greedy) for number in range(4)]
    results = round_trip(engines, [one for pair in zip(training, evaluation, strict=True) for one in pair])
    assert all(not results[one.prompt_id].is_eval for one in training)
    answers = [results[one.prompt_id] for one in evaluation]
    assert all(answer.is_eval and len(answer.responses) == 1 for answer in answers)
    assert len({answer.responses[0].tobytes() for answer in answers}) == 1


def test_a_seed_gives_the_same_samples_whatever_else_the_engine_does(
    engines: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    alone = round_trip(engines, [request(prompts[3], 0)])
    crowd = [request(prompts[n % len(prompts)], n, config=SamplingConfig(max_tokens=24, n=8)) for n in range(8)]
    again = request(prompts[3], 0)
    crowded = round_trip(engines, [*crowd, again])[again.prompt_id]
    first = next(iter(alone.values()))
    assert [r.tolist() for r in first.responses] == [r.tolist() for r in crowded.responses]


def test_direct_call_goes_past_the_queues(
    ray_session: Any, engines: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    results = ray_session.get(
        engines.actors[0].generate_with_single_engine.remote(prompts[:3], CONFIG), timeout=TIMEOUT_S
    )
    assert [result.index for result in results] == [0, 1, 2]
    assert all(result.engine_id == 0 and len(result.responses) == CONFIG.n for result in results)
    assert engines.inference_results_Q.empty()


def test_stock_taking_names_what_is_held_and_is_answered_while_the_engine_works(
    ray_session: Any, engines: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    long = SamplingConfig(max_tokens=64, n=32, temperature=2.0)
    requests = [request(prompts[n], n, config=long) for n in range(4)]
    for one in requests:
        engines.param_prompt_Q.put([one], timeout=5)
    seen: set[str] = set()
    deadline = time.monotonic() + TIMEOUT_S
    while len(seen) < len(requests):
        assert time.monotonic() < deadline
        for inventory in ray_session.get(
            [actor.take_inventory.remote() for actor in engines.actors], timeout=TIMEOUT_S
        ):
            seen |= set(inventory["held"])
    collect(engines, len(requests))
    assert seen == {one.prompt_id for one in requests}
    while True:  # an engine holds results until it knows that the queue has them
        after = ray_session.get([actor.take_inventory.remote() for actor in engines.actors], timeout=TIMEOUT_S)
        if all(inventory["held"] == [] for inventory in after):
            break
        assert time.monotonic() < deadline, after
    assert sum(inventory["num_generated_tokens"] for inventory in after) > 0


def test_a_control_call_waits_for_a_step_and_not_for_a_request(
    ray_session: Any, engines: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    long = SamplingConfig(max_tokens=64, n=64, temperature=2.0)
    requests: list[Any] = []
    deadline = time.monotonic() + TIMEOUT_S
    while not ray_session.get(engines.actors[0].take_inventory.remote())["held"]:  # else the other engine took it
        assert time.monotonic() < deadline
        requests.append(request(prompts[len(requests) % 2], len(requests), config=long))
        engines.param_prompt_Q.put([requests[-1]], timeout=5)
        time.sleep(0.2)
    waits = []
    for _ in range(5):
        started = time.monotonic()
        ray_session.get(engines.actors[0].start_weight_update.remote(), timeout=TIMEOUT_S)
        waits.append(time.monotonic() - started)
    collect(engines, len(requests))
    assert np.median(waits) < 0.5, waits


@pytest.fixture(autouse=True)
def engines_are_alive(ray_session: Any, engines: SimpleNamespace) -> None:
    ended, _ = ray_session.wait(engines.futures, num_returns=2, timeout=0)
    assert not ended
