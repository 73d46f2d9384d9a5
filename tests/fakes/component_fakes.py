"""`Components` around actors that are played."""

from types import SimpleNamespace
from typing import Any

from open_instruct.run.components import Components
from open_instruct.run.device_sharing import DeviceSharing
from open_instruct.run.health import Health
from open_instruct.run.waits import Waits
from open_instruct.system.signals import Signals


def components_of(
    *,
    rollouts: Any = None,
    learners: Any = None,
    message_queue: Any = None,
    supervisor: Any = None,
    nodes: Any = None,
    processes: Any = None,
    wait: Any = None,
) -> Components:
    """What is not given is not there, or does nothing. `wait` is what `Components.wait` is; None is the real one."""
    no_engines: Any = SimpleNamespace(rollout_engines=[])
    calm: Any = SimpleNamespace(check=lambda: None, began=lambda _: None)
    rollouts, supervisor = rollouts or no_engines, supervisor or calm
    signals = Signals()
    health = Health(rollouts, learners, message_queue, supervisor, nodes=nodes, processes=processes)
    wait = wait or Waits(health, signals).wait
    return Components(rollouts, learners, message_queue, supervisor, signals, health, wait, DeviceSharing())
