"""All learner ranks agree before an update is sent: whoever would wait for another does not begin."""

import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from open_instruct.learners.weight_link import LinkOptions, WeightLink
from open_instruct.learners.weight_sync import CHUNK_BYTES, DeepSpeedWeightSource, ParamMeta, ipc_init_info

LIMIT_S = 120.0


class PlayedClient:
    """Engines that can begin an update or cannot."""

    has_broken_off = False

    def __init__(self, can_start: bool) -> None:
        self._can_start = can_start

    def begin(self, version: int, engines: object) -> None:
        self.version = version

    def start(self) -> bool:
        return self._can_start

    def report(self) -> int:
        return self.version


class CollectiveSender:
    """Sends as vLLM's IPC engine: every rank waits for every other."""

    def __init__(self) -> None:
        self.num_sent = 0

    def send_weights(self) -> None:
        torch.distributed.barrier()
        self.num_sent += 1


def send_on_one_rank(rank: int, store: str, answers: Any) -> None:
    """Where the engines can begin, and then where they cannot; the answers are the numbers of updates that were sent."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    device: Any = SimpleNamespace(synchronize=lambda: None, learner_device=torch.device("cpu"), weight_transport="shm")
    source = DeepSpeedWeightSource(torch.nn.Linear(2, 2), zero_stage=0)
    options = LinkOptions(1, 1.0, 1.0, lambda: ("", 0))
    for can_start in (True, False):
        link = WeightLink(source, device, rank=rank, world_size=2, options=options)
        sender: Any = CollectiveSender()
        client: Any = PlayedClient(can_start)
        link._sender, link._client = sender, client
        link.send(1)
        answers.put(((can_start, rank), sender.num_sent))


@pytest.fixture(scope="module")
def num_sent(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], int]:
    """Updates that were sent, by whether the engines can begin and by rank."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    ranks = [context.Process(target=send_on_one_rank, args=(rank, store, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    numbers = dict(answers.get(timeout=LIMIT_S) for _ in range(4))
    for process in ranks:
        process.join(timeout=LIMIT_S)
        assert process.exitcode == 0
    return numbers


@pytest.mark.parametrize("can_start", [True, False])
def test_no_rank_sends_where_the_engines_cannot_begin(num_sent: dict[tuple[bool, int], int], can_start: bool) -> None:
    assert [num_sent[can_start, rank] for rank in range(2)] == [int(can_start)] * 2


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(1000, 10), (10,)], 2 * 10_010),  # a small model: no more than it has
        ([(151_936, 4096), (4096, 4096)], 2 * 151_936 * 4096),  # 1.24 GB: a parameter has to fit
        ([(4096, 4096)] * 100, CHUNK_BYTES),
    ],
)
def test_shared_buffer_holds_the_largest_parameter_and_not_the_model(
    shapes: list[tuple[int, ...]], expected: int
) -> None:
    metas = [ParamMeta(f"w{number}", torch.bfloat16, shape) for number, shape in enumerate(shapes)]
    source: Any = SimpleNamespace(metadata=lambda: metas)
    info = ipc_init_info(0, source)
    assert (info.packed, info.packed_buffer_size_bytes) == (True, expected)
