"""New weights from the learners to the engines.

    learner rank 0..M-1          DeepSpeedWeightSource: every rank gathers, bucket by bucket (a collective under ZeRO-3)
      rank 0: sender ──────────► EngineClient ──────────► LLMRayActor × N: start, update…, finish(version)

An update lands on an engine whole or not at all, and each engine confirms the version it serves. Senders: vLLM's own `nccl`
and `ipc` trainer engines on GPU, `RayObjectSender` everywhere else; all three speak to the engines through vLLM's
weight-transfer API.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import ray
import torch

from open_instruct.checkpoint_format import CheckpointFormat
from open_instruct.failures import root_cause

if TYPE_CHECKING:
    from ray.actor import ActorHandle

RAY_OBJECT = "ray_object"
BUCKET_BYTES = 256 * 2**20
"""A bucket holds whole parameters up to about this size, so that a learner never holds a second copy of the model."""

FETCH_S = 10.0
"""Deadline for an answer that is there already."""


def register_weight_transfer() -> None:
    """Make `ray_object` known to vLLM in this process. The target of our `vllm.general_plugins` entry point."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if RAY_OBJECT not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            RAY_OBJECT, "open_instruct.vllm_weight_transfer", "RayObjectWeightTransferEngine"
        )


@dataclass(frozen=True)
class ParamMeta:
    """Name, dtype on the wire and full shape of one parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class DeepSpeedWeightSource:
    """The trained weights under the names and in the shapes of the checkpoint, whichever ZeRO stage holds them.

    Iterate it on every rank at once: under ZeRO-3 each layer is gathered by a collective. Every pass is a fresh one. No more
    than one layer is held beside the model itself.
    """

    def __init__(self, module: torch.nn.Module, *, zero_stage: int) -> None:
        self._module = module
        self._zero_stage = zero_stage

    @cached_property
    def _format(self) -> CheckpointFormat:
        return CheckpointFormat(self._module)

    @cached_property
    def _metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, w.dtype, tuple(w.shape)) for name, w in self._format.metadata()]

    def metadata(self) -> list[ParamMeta]:
        """What iteration will yield, in order, without gathering anything."""
        return list(self._metadata)

    def held_names(self) -> None:
        """Every rank holds (or gathers) every parameter."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        for group in self._format.groups:
            yield from self._format.convert(self._gathered({name: tensors[name] for name in group})).items()

    def _gathered(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._zero_stage != 3:
            return {name: weight.detach() for name, weight in weights.items()}
        import deepspeed

        parameters = [weight for weight in weights.values() if isinstance(weight, torch.nn.Parameter)]
        with deepspeed.zero.GatheredParameters(parameters):
            return {name: weight.detach().clone() for name, weight in weights.items()}


@dataclass(frozen=True)
class UpdateReport:
    """How one update went, by position of the engine."""

    confirmed: dict[int, int] = field(default_factory=dict)
    """The version that each engine says it serves now."""
    failures: dict[int, str] = field(default_factory=dict)
    """What went wrong: the engine still has its old weights."""
    pauses_s: dict[int, float] = field(default_factory=dict)
    """Seconds that generation stood still for it."""


class UpdateAbandoned(RuntimeError):
    """All engines receive in one collective, and one of them cannot take part: nobody was sent anything."""


class EngineClient:
    """The learners' line to every engine at once, with a limit for each. The shape of vLLM's weight-sync client.

    Call `begin` before an update is sent. An engine that fails in the middle is left out of the rest of it; the others get it
    whole. Each update has a number, so that an engine that comes back late refuses what belongs to an older one.

    Args:
        engines: by position, or with their positions.
        workers_per_engine: processes of one engine that receive.
        timeout_s: how long the calls of one update may take on an engine. What the others take does not count, else one that
            hangs would cost all of them the update; in all it may take twice as long.
        in_one_group: engines receive in one collective: all are sent to, and if one fails before it begins, none is.
    """

    def __init__(
        self,
        engines: "Sequence[ActorHandle] | Mapping[int, ActorHandle]",
        *,
        workers_per_engine: int,
        timeout_s: float,
        in_one_group: bool = False,
    ) -> None:
        self._engines = dict(engines) if isinstance(engines, Mapping) else dict(enumerate(engines))
        self._workers_per_engine = workers_per_engine
        self._timeout_s = timeout_s
        self._in_one_group = in_one_group
        self.begin(0)

    def begin(self, version: int, engines: Sequence[int] | None = None) -> None:
        """An update to `version` follows, for these engines (by position; None is all)."""
        self._version = version
        self._update_id = time.time_ns()
        self._ends_at = time.monotonic() + 2 * self._timeout_s
        self._taking_part = list(self._engines if engines is None or self._in_one_group else engines)
        self._left_s = dict.fromkeys(self._taking_part, self._timeout_s)
        self._confirmed: dict[int, int] = {}
        self._failures: dict[int, str] = {}
        self._pauses_s: dict[int, float] = {}

    def report(self) -> UpdateReport:
        return UpdateReport(self._confirmed, self._failures, self._pauses_s)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.begin(self._version)
        self._call("init_weight_transfer_engine", lambda number: (self._for_engine(init_info, number),))
        if self._failures:
            raise RuntimeError(f"the weight transfer could not be set up: {self._failures}")

    def _for_engine(self, init_info: dict[str, Any], number: int) -> dict[str, Any]:
        """Engines are apart: each has its own range of ranks in the transfer group, behind those of the engines before it."""
        if "rank_offset" not in init_info:
            return init_info
        num_before = list(self._engines).index(number)
        return {**init_info, "rank_offset": init_info["rank_offset"] + num_before * self._workers_per_engine}

    def start_weight_update(self) -> None:
        """Raises `UpdateAbandoned` if one engine's failure leaves all of them without the update."""
        self._call("start_weight_update", lambda _: (self._update_id,))
        if self._in_one_group and self._failures:
            for number in self._taking_part:
                self._failures[number] = "nothing was sent, because another engine could not take part"
            raise UpdateAbandoned(str(self._failures))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", lambda _: (update_info, self._update_id))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let every engine swap, and check that each confirms the new version."""
        version = self._version if weight_version is None else int(weight_version)
        for number, answer in self._call("finish_weight_update", lambda _: (version, self._update_id)).items():
            if answer["version"] != version:
                self._failures[number] = f"was sent version {version} and confirms {answer['version']}"
                continue
            self._confirmed[number] = version
            self._pauses_s[number] = answer["pause_s"]

    def _call(self, method: str, arguments: Callable[[int], tuple]) -> dict[int, Any]:
        """Call `method` on every engine that still takes part; the answers of those that gave one in time."""
        started = time.monotonic()
        waiting = {getattr(self._engines[n], method).remote(*arguments(n)): n for n in self._taking_part}
        answers = {}
        while waiting:
            soonest = min(min(self._left_s[n] for n in waiting.values()) + started, self._ends_at)
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(soonest - time.monotonic(), 0.0))
            now = time.monotonic()
            for ref, number in list(waiting.items()):
                if ref in done:
                    self._take_answer(method, number, ref, answers)
                    self._left_s[number] -= now - started
                elif now - started >= self._left_s[number] or now >= self._ends_at:
                    self._failures[number] = f"did not answer {method} within the {self._timeout_s:g} s of the update"
                else:
                    continue
                del waiting[ref]
        self._taking_part = sorted(answers)
        return answers

    def _take_answer(self, method: str, number: int, ref: Any, answers: dict[int, Any]) -> None:
        try:
            answers[number] = ray.get(ref, timeout=FETCH_S)
        except ray.exceptions.RayError as error:
            self._failures[number] = f"{method}: {root_cause(error)}"


class WeightSender(Protocol):
    """What a learner drives once a step, on every rank."""

    def send_weights(self) -> None: ...


class RayObjectSender:
    """Packs the weights into buckets and hands them to the engines as Ray objects."""

    def __init__(self, *, client: EngineClient, source: DeepSpeedWeightSource, is_sender: bool) -> None:
        self._client = client
        self._source = source
        self._is_sender = is_sender

    def send_weights(self) -> None:
        if not self._is_sender:
            for _ in self._source:  # take part in the gathers
                pass
            return
        self._client.start_weight_update()
        for bucket in pack_buckets(iter(self._source), max_bytes=BUCKET_BYTES):
            self._client.update_weights({"bucket": ray.put(bucket)})
        self._client.finish_weight_update()


def pack_buckets(weights: Iterator[tuple[str, torch.Tensor]], *, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Group whole parameters into buckets of about `max_bytes`: names, dtypes, shapes and one (bytes,) uint8 buffer."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > max_bytes:
            yield _pack(bucket)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield _pack(bucket)


def _pack(bucket: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    flat = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [tuple(tensor.shape) for _, tensor in bucket],
        "buffer": torch.cat(flat).numpy(),  # a parameter that numpy has seen could not leave its memory any more
    }


def make_weight_sender(
    transport: str,
    *,
    rank: int,
    client: EngineClient,
    source: DeepSpeedWeightSource,
    num_engine_workers: int,
    find_address: Callable[[], tuple[str, int]],
) -> WeightSender:
    """Connect this learner rank to the engines; call on every rank.

    `num_engine_workers` counts the worker processes of all engines (engines x tensor parallelism); `find_address` gives a host
    and a free port of this machine for NCCL's rendezvous.
    """
    if transport == RAY_OBJECT:
        return RayObjectSender(client=client, source=source, is_sender=rank == 0)
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    return WeightTransferTrainerFactory.trainer_init(
        _gpu_init_info(transport, rank=rank, world_size=num_engine_workers + 1, find_address=find_address),
        client=client,  # type: ignore[arg-type]
        source=source,  # type: ignore[arg-type]
    )


def _gpu_init_info(transport: str, *, rank: int, world_size: int, find_address: Callable[[], tuple[str, int]]) -> Any:
    if transport == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        host, port = find_address()
        return NCCLTrainerInitInfo(rank=rank, master_address=host, master_port=port, world_size=world_size)
    if transport == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank)
    raise ValueError(f"unknown weight transport {transport!r}; known: nccl, ipc, {RAY_OBJECT}")
