"""A real engine whose share of the cores changes from step to step."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from conftest import TIMEOUT_S, make_args

from open_instruct.cluster.ray_utils import file_of_job
from open_instruct.data_types import GenerationResult, SamplingConfig
from open_instruct.system.shared_cores import FILE_NAME, NUM_PLACES

NEIGHBOUR = NUM_PLACES - 1


def test_engine_samples_the_same_while_a_neighbour_computes_and_rests(
    ray_session: Any, engines: SimpleNamespace, prompts: list[np.ndarray]
) -> None:
    asked, file = SamplingConfig(max_tokens=64, n=4, seed=3), file_of_job(FILE_NAME)
    place = make_args().num_learners  # learners come first

    def sampled() -> list[GenerationResult]:
        answer = engines.actors[0].generate_with_single_engine.remote(prompts[:4], asked)
        return ray_session.get(answer, timeout=TIMEOUT_S)

    with changing(file, rests=False):
        alone = sampled()
    with changing(file, rests=True) as seen:
        beside = sampled()
    assert 1 in {content[place] for content in seen}  # it said that it computes
    deadline = time.monotonic() + TIMEOUT_S
    while file.read_bytes()[place]:
        assert time.monotonic() < deadline, "it did not say that it rests"
        time.sleep(0.01)
    for one, other in zip(alone, beside, strict=True):
        for mine, its, ids, its_ids in zip(one.logprobs, other.logprobs, one.responses, other.responses, strict=True):
            assert ids.tolist() == its_ids.tolist()
            np.testing.assert_allclose(mine, its, rtol=0, atol=1e-5)


@contextmanager
def changing(file: Path, *, rests: bool) -> Iterator[list[bytes]]:
    """A neighbour of the engine that computes, and with `rests` rests every other 5 ms; what the file said at these times."""
    over, seen = threading.Event(), []

    def change() -> None:
        with file.open("r+b", buffering=0) as opened:
            computes = True
            while not over.wait(0.005):
                opened.seek(NEIGHBOUR)
                opened.write(bytes([computes]))
                seen.append(file.read_bytes())
                computes = not (computes and rests)
            opened.seek(NEIGHBOUR)
            opened.write(bytes(1))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
