"""One learner rank's connection with the engines. All ranks call it together.

connect(engines) ─► every engine joins the transfer group, or the engines that did not join are returned
send(version)    ─► rank 0: start on every engine, tell all ranks whether to send ─► all gather, rank 0 sends ─► report
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from open_instruct.device import Device
from open_instruct.engines.weight_update_client import UpdateReport, WeightUpdateClient
from open_instruct.learners.weight_sync import DeepSpeedWeightSource, WeightSender, make_weight_sender
from open_instruct.weight_transports import IN_ONE_COLLECTIVE

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkOptions:
    """Options of a connection."""

    workers_per_engine: int
    timeout_s: float
    """Time limit of one update."""
    connect_timeout_s: float
    find_address: Callable[[], tuple[str, int]]
    """Returns a host and a free port of this machine."""


class WeightLink:
    """Sends the weights of `source` to the engines that are connected."""

    def __init__(
        self, source: DeepSpeedWeightSource, device: Device, *, rank: int, world_size: int, options: LinkOptions
    ) -> None:
        self._source = _RememberedPass(source)
        self._device = device
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._client: WeightUpdateClient | None = None
        self._sender: WeightSender | None = None

    def connect(self, engines: "Mapping[int, ActorHandle]") -> dict[int, str]:
        """Make the transfer group with `engines` (by position), in place of an earlier group. Returns the engines that could not
        be reached, with the cause; if there are any, no engine is connected."""
        self.close()
        options, in_one_collective = self._options, self._device.weight_transport in IN_ONE_COLLECTIVE
        client = WeightUpdateClient(
            engines,
            workers_per_engine=options.workers_per_engine,
            timeout_s=options.timeout_s,
            connect_timeout_s=options.connect_timeout_s,
            in_one_group=in_one_collective,
        )
        failures = client.find_unreachable() if self._rank == 0 and in_one_collective else {}
        if self._from_rank_0(not failures):
            failures = self._make_sender(client, engines)
        if self._from_rank_0(not failures):
            self._client = client
        else:
            self.close()
        return failures

    def _make_sender(self, client: WeightUpdateClient, engines: "Mapping[int, ActorHandle]") -> dict[int, str]:
        try:
            self._sender = make_weight_sender(
                self._device,
                rank=self._rank,
                client=client,
                source=self._source,  # type: ignore[arg-type]
                num_engine_workers=len(engines) * self._options.workers_per_engine,
                find_address=self._options.find_address,
            )
        except Exception as error:  # an engine that died meanwhile is replaced, and the group is made again
            logger.warning("the transfer group could not be made", exc_info=True)
            return client.report().failures or dict.fromkeys(engines, f"the transfer group: {error}")
        return {}

    def send(self, version: int, engines: Sequence[int] | None = None) -> UpdateReport:
        """Send the weights to these engines (by position). None is all engines; where they receive in one collective, any
        value is all."""
        if self._sender is None or self._client is None:
            raise RuntimeError("there are no engines to send weights to: connect_rollout_engines comes first")
        self._device.synchronize()  # senders read the weights on streams of their own
        self._client.begin(version, engines)
        if self._from_rank_0(self._client.start() if self._rank == 0 else True):
            self._send(self._sender, self._client)
        return self._client.report()

    def _send(self, sender: WeightSender, client: WeightUpdateClient) -> None:
        try:
            sender.send_weights()
        except Exception:
            if not client.has_broken_off:
                raise
            logger.warning("sending ended early, because the collective was aborted", exc_info=True)
            self._source.finish()  # the other ranks wait in the gathers

    def close(self) -> None:
        """Leave the transfer group and release its communicator."""
        if self._sender is not None:
            self._sender.shutdown()
        self._sender = self._client = None

    def _from_rank_0(self, value: bool) -> bool:
        """Rank 0's value, on every rank."""
        if self._world_size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, device=self._device.learner_device)
        return values[0]


class _RememberedPass:
    """A source that remembers its last pass, so that another caller can finish the pass. Every rank has to complete each pass."""

    def __init__(self, source: DeepSpeedWeightSource) -> None:
        self._source = source
        self._pass: Iterator[Any] = iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._pass = iter(self._source)
        return self._pass

    def finish(self) -> None:
        for _ in self._pass:
            pass
