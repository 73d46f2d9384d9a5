"""One engine's side of a weight update.

    begin ──► receive … ──► finish(version)         on the engine thread, between two steps
       │         │             └─ swap, label, serve again
       └─────────┴── breaks off: the next `begin` forgets it and starts over

No weight changes while requests are being stepped. `ray_object` collects all weights first, so the engine is paused during
`finish` only. The other transports change the model as the weights arrive, so the engine is paused from `begin` to `finish`. When
an update with such a transport breaks off, the model may be a mixture of old and new weights. The engine then stays paused until
a whole update has arrived, so no token is ever sampled from a mixture.
"""

import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from open_instruct.engines.engine_sleep import WEIGHTS, EngineSleep
from open_instruct.engines.vllm_engine import EngineCoreLost, VLLMEngine
from open_instruct.weight_transports import ABORT_FILE, RAY_OBJECT


def new_abort_file() -> Path:
    """A path for the engine that is about to start: once a file exists there, its workers know that an update was broken off.
    Sets the environment variable that tells the workers the path."""
    path = Path(tempfile.gettempdir()) / f"open_instruct-abort-{uuid.uuid4().hex}"
    os.environ[ABORT_FILE] = str(path)
    return path


class WeightReceiver:
    """Brings weights into one engine, whole or not at all. Only the thread that owns the engine uses it, except for `abort`."""

    def __init__(
        self,
        engine: VLLMEngine,
        sleep: EngineSleep,
        *,
        transport: str,
        version: int,
        abort_file: Path,
        recomputes_cache: bool = False,
    ) -> None:
        self._engine = engine
        self._recomputes_cache = recomputes_cache
        self._sleep = sleep
        self._changes_as_it_comes = transport != RAY_OBJECT
        self._abort_file = abort_file
        self._update_id = 0
        self.version = version
        """Version of the weights that the engine serves."""
        self.is_under_way = False
        """An update was begun and is not finished."""
        self.is_paused = False
        """The engine must not be stepped."""

    def connect(self, init_info: dict[str, Any]) -> None:
        """Join the learners' transfer group. The communicator of an earlier group is released."""
        self._forget_update()
        self._engine.collective_rpc("shutdown_weight_transfer_engine")
        self._engine.collective_rpc("init_weight_transfer_engine", init_info=init_info)

    def begin(self, update_id: int | None = None) -> None:
        """Begin an update. Update numbers increase; None is the next number. Raises `RuntimeError` if the update is older than
        the last update."""
        if update_id is not None and update_id < self._update_id:
            raise RuntimeError(f"update {update_id} came after {self._update_id}, which is newer")
        self._forget_update()
        self._sleep.resume([WEIGHTS])
        self._update_id = self._update_id + 1 if update_id is None else update_id
        self._abort_file.unlink(missing_ok=True)
        if self._changes_as_it_comes:
            self._pause()
        self.is_under_way = True
        self._engine.collective_rpc("start_weight_update")

    def receive(self, update_info: dict[str, Any], update_id: int | None = None) -> None:
        self._check(update_id)
        self._engine.collective_rpc("update_weights", update_info=self._for_workers(update_info))

    def finish(self, version: int, update_id: int | None = None) -> dict[str, float]:
        """Swap to the new weights. Returns the `version` served from now on, and `pause_s`, the seconds that the swap took."""
        self._check(update_id)
        started = time.perf_counter()
        self._pause()
        self._engine.collective_rpc("finish_weight_update")
        # Requests under another version share no keys and values (`GenerationLoop`); other weights under the same version would.
        if self._recomputes_cache or version == self.version:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.set_weight_version(version)
        self.version = version
        self._sleep.weights_came()
        self.is_under_way = False
        self._resume()
        return {"version": version, "pause_s": time.perf_counter() - started}

    def abort(self) -> None:
        """Make workers stop waiting for weights that will never be sent. Returns at once, whatever the engine is doing."""
        self._abort_file.touch()

    def _forget_update(self) -> None:
        """Raises `RuntimeError` if the model cannot be loaded again. The engine then has to be replaced."""
        if not self.is_under_way:
            return
        try:
            self._engine.collective_rpc("abandon_weight_update")
        except EngineCoreLost:
            raise
        except Exception as error:
            raise RuntimeError(f"the weights are half old, half new since an update broke off: {error}") from error
        self.is_under_way = False

    def _check(self, update_id: int | None) -> None:
        """Check that the call belongs to the current update, because a late call of an older update must not change it."""
        if not self.is_under_way or update_id not in (None, self._update_id):
            raise RuntimeError(f"update {update_id} is not the one under way ({self._update_id})")

    def _for_workers(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """msgpack would turn an array into a list, so a core in its own process gets the array's bytes."""
        if self._engine.is_separate_process and "buffer" in update_info:
            return update_info | {"buffer": update_info["buffer"].tobytes()}
        return update_info

    def _pause(self) -> None:
        if not self.is_paused:
            self._engine.pause()
            self.is_paused = True

    def _resume(self) -> None:
        self._engine.resume()
        self.is_paused = False
