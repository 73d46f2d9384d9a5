"""One vLLM engine: how it is started and called, and a time limit on every call that waits for it.

vLLM's engine core, which schedules requests and runs the model, lives in one of two places:

- in the process that made the engine (the default on CPU, because it starts in half the time). It computes only inside `step`.
- in a process of its own (the default on GPU; on CPU with `VLLM_ENABLE_V1_MULTIPROCESSING=1`). Calls are sent to it through
  msgpack, so their arguments are plain values. The core **goes on stepping by itself** between two calls, so a caller that
  changes weights pauses the core first.

vLLM 0.32 waits without a limit for a core in its own process, even for a dead core. `VLLMEngine` does not.
"""

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from open_instruct.chat_templates import AS_IT_IS, TokenizerSetup
from open_instruct.cluster.network_interface import OF_NCCL, network_interface
from open_instruct.data_types import Completion, SamplingConfig
from open_instruct.engines.core_failure import cause_is_told
from open_instruct.engines.engine_files import EngineFiles, remove_own_files
from open_instruct.engines.engine_sleep import SleepOptions
from open_instruct.engines.kv_ages import CacheUse, KvAges
from open_instruct.system.absent_modules import absent
from open_instruct.system.shared_cores import CorePlace
from open_instruct.weight_transports import NCCL
from open_instruct.workflows.base import SINGLE_TURN, WorkflowSpec

POLL_S = 0.2
"""How often a call that waits for the engine core checks whether the core's process still exists."""
GATHER_S = 0.05
"""How long an engine keeps a finished group to push it together with others, by default."""
WORKER_EXTENSION = "open_instruct.engines.vllm_weight_transfer.WorkerExtension"
"""Our class whose methods vLLM adds to its workers. They are called by name, because a core in its own process takes no
functions."""
MOST_BLOCKS = 2**20
"""Number of blocks assumed for a key-value cache whose size the engine does not report."""
CORE_DIED = "EngineDeadError"
"""The error that vLLM raises when a core in its own process died of an error. When the core was killed, vLLM raises nothing."""
SCHEDULING = "scheduling"
"""vLLM's name for the part of an engine that a pause puts to sleep."""


@dataclass(frozen=True)
class EngineOptions:
    """The options with which an engine is started."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    weight_transport: str
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    """None is the revision of the model."""
    tokenizer_setup: TokenizerSetup = AS_IT_IS
    tensor_parallel_size: int = 1
    executor_of_one_worker: str | None = None
    """vLLM's executor without tensor parallelism; None leaves the choice to vLLM."""
    seed: int = 0
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = False
    """None: where vLLM can do it for the model."""
    kv_cache_use: CacheUse = "by_version"
    """Which keys and values a request may use, where weights change."""
    inflight_updates: bool = True
    """Take new weights between two tokens of a response. If False, responses that were begun are finished first."""
    generation_timeout: float | None = None
    """Seconds after which a group is broken off and reported as failed."""
    gather_s: float = GATHER_S
    """Longest time that a finished group waits for groups under way, so that they leave the engine together."""
    cores: CorePlace | None = None
    """The engine's place among the processes that share the cores of the machine; None: its threads stay as they are."""
    sleep: SleepOptions = field(default_factory=SleepOptions)
    workflow: WorkflowSpec = field(default_factory=lambda: WorkflowSpec(SINGLE_TURN))
    """The workflow that rolls prompts out."""
    max_prompt_tokens: int | None = None
    """Longest first prompt of a rollout, before the policy has sampled anything; None: only the model sets a limit."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further vLLM engine arguments that follow from the device (see `device.py`)."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables to set before vLLM is imported."""
    unused_imports: tuple[str, ...] = ()
    """Modules that `import vllm` is to leave out (see `device.py`)."""


class EngineCoreLost(RuntimeError):
    """The engine core died or does not answer, so this engine can only be replaced."""


class VLLMEngine:
    """vLLM's `LLMEngine`, for one thread. No call waits for a dead engine core, and only `step` may take longer than `timeout_s`.

    Other attributes, such as `has_unfinished_requests` and `vllm_config`, are those of vLLM's engine.
    """

    def __init__(self, engine: Any, *, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._resources = getattr(getattr(engine, "engine_core", None), "resources", None)
        """vLLM's record of a core in its own process; None where the core is in this process."""
        self._calls = _CallThread() if self.is_separate_process else None
        self._kv_ages: KvAges | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def is_separate_process(self) -> bool:
        """Whether the engine core has a process of its own, and therefore steps by itself."""
        return self._resources is not None

    def step(self) -> list[Any]:
        """The outputs of one step of the core. A core in its own process makes its steps by itself; this call waits for one."""
        return self._ask("a step", self._engine.step, limited=False)

    def collective_rpc(self, method: str, **kwargs: object) -> list[Any]:
        """Call `method` on every worker. Returns the workers' answers."""
        return self._ask(method, self._engine.collective_rpc, method, kwargs=kwargs)

    def memory_in_use_bytes(self) -> int:
        """Memory in use on the devices of this engine, by all processes. The workers measure it, because measuring from this
        process would itself take some hundred MB of a GPU."""
        return sum(self.collective_rpc("memory_in_use_bytes"))

    def pause(self) -> None:
        """Stop stepping; requests stay where they are. When this call returns, the engine no longer computes on the device."""
        self._ask("pause", self._engine.sleep, level=0, mode="keep")

    def resume(self) -> None:
        """Go on stepping. If memory is asleep, the engine steps only once the memory is back."""
        self._ask("resume", self._engine.wake_up, [SCHEDULING])

    def sleep(self, level: int) -> None:
        self._ask("sleep", self._engine.sleep, level)

    def wake_up(self, tags: list[str]) -> None:
        self._ask("wake_up", self._engine.wake_up, tags)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> None:
        self._ask("reset_prefix_cache", self._engine.reset_prefix_cache, reset_running_requests)
        if self._kv_ages is not None:
            self._kv_ages.forget()

    def set_weight_version(self, version: int) -> None:
        self._ask("set_weight_version", self._engine.set_weight_version, str(version))

    @property
    def kv_cache_tokens(self) -> float:
        """Tokens that the engine's key-value cache holds; infinity where the engine does not say. vLLM's own number is preferred,
        because a token takes several blocks where layers with and without sliding windows have separate blocks."""
        cache = self._engine.vllm_config.cache_config
        in_blocks = cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else math.inf
        return getattr(cache, "kv_cache_size_tokens", None) or in_blocks

    @property
    def has_prefix_cache(self) -> bool:
        return bool(self._engine.vllm_config.cache_config.enable_prefix_caching)

    def kv_ages(self, use: CacheUse) -> KvAges:
        """The account of what the cache holds."""
        cache = self._engine.vllm_config.cache_config
        if use == "kept" and not self.has_prefix_cache:  # the model has none
            use = "by_version"
        self._kv_ages = KvAges(use, block_size=cache.block_size, num_blocks=cache.num_gpu_blocks or MOST_BLOCKS)
        return self._kv_ages

    def shutdown(self) -> None:
        """End the core and its worker processes, if it has any, and remove their files."""
        self._engine.engine_core.shutdown()
        remove_own_files()

    def _ask(
        self, operation: str, call: Callable[..., Any], *args: object, limited: bool = True, **kwargs: object
    ) -> Any:
        """Returns `call(*args, **kwargs)`.

        Raises:
            EngineCoreLost: the core died, or took longer than `timeout_s` although the call is `limited`.
        """
        if self._calls is None:
            return call(*args, **kwargs)
        answer = self._calls.submit(lambda: call(*args, **kwargs))
        ends_at = time.monotonic() + self._timeout_s if limited else math.inf
        while True:
            try:
                return answer.result(timeout=POLL_S)
            except TimeoutError:
                if answer.done():  # the call itself raised it
                    raise
            except Exception as error:
                if type(error).__name__ == CORE_DIED:
                    raise EngineCoreLost(f"the engine core died; {operation} was under way") from error
                raise
            if self._resources is not None and self._resources.engine_dead:
                raise EngineCoreLost(f"the process of the engine core died; {operation} was under way")
            if time.monotonic() > ends_at:
                raise EngineCoreLost(f"the engine core did not answer {operation} in {self._timeout_s:g} s")


class _CallThread:
    """Runs calls one by one in a thread, so that a caller can stop waiting. A call that never ends dies with the process."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine-core-calls", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future:
        answer: Future = Future()
        self._inbox.put((call, answer))
        return answer

    def _run(self) -> None:
        while True:
            call, answer = self._inbox.get()
            try:
                answer.set_result(call())
            except BaseException as error:  # the caller that waits for the answer gets it
                answer.set_exception(error)


def make_engine(options: EngineOptions, version: int) -> Any:
    """A vLLM `LLMEngine` that labels its tokens with `version`. Sets `options.env` in this process first."""
    os.environ.update(options.env)
    if options.weight_transport == NCCL:  # the same network interface as the learners
        os.environ.update(network_interface(OF_NCCL))
    with absent(*options.unused_imports):
        from vllm import LLMEngine

    from open_instruct.engines.vllm_plugin import register_cpu_kernels, register_weight_transfer

    register_weight_transfer()
    register_cpu_kernels()
    try:
        with EngineFiles().take_temporary_files(), cause_is_told():
            engine = LLMEngine.from_engine_args(_engine_args(options))
    except BaseException:
        remove_own_files()
        raise
    engine.set_weight_version(str(version))
    return engine


def _engine_args(options: EngineOptions) -> Any:
    from vllm import EngineArgs
    from vllm.config.weight_transfer import WeightTransferConfig

    from open_instruct.engines.vllm_plugin import engine_backend

    return EngineArgs(
        model=options.model,
        tokenizer=options.tokenizer or options.model,
        revision=options.revision,
        tokenizer_revision=options.tokenizer_revision,
        trust_remote_code=options.tokenizer_setup.trust_remote_code,
        dtype=options.dtype,  # type: ignore[arg-type]
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=options.tensor_parallel_size,
        # In a placement group vLLM would make Ray actors of its workers, for which there is no room.
        distributed_executor_backend="mp" if options.tensor_parallel_size > 1 else options.executor_of_one_worker,
        seed=options.seed,
        enforce_eager=options.enforce_eager,
        enable_prefix_caching=options.enable_prefix_caching,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # only the request decides how to sample, not the model's generation_config.json
        weight_transfer_config=WeightTransferConfig(backend=engine_backend(options.weight_transport)),
        worker_extension_cls=WORKER_EXTENSION,
        disable_log_stats=True,
        enable_sleep_mode=options.sleep.calls_vllm,
        **options.extra,
    )


def sampling_params(config: SamplingConfig) -> Any:
    """vLLM's `SamplingParams` for one group: all samples in the final output, each token with its log-prob as sampled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=config.n,
        temperature=config.temperature,
        top_p=config.top_p,
        max_tokens=config.max_tokens,
        stop=list(config.stop),
        seed=config.seed,
        ignore_eos=config.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(config.stop),
        skip_special_tokens=False,  # the text is only searched for stop strings, and one may spell a special token
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def is_refusal(error: Exception) -> bool:
    """Whether vLLM refuses a request because of its content, such as a token that the model does not know. The engine then keeps
    nothing of the request and serves other requests."""
    from vllm.exceptions import VLLMClientError

    return isinstance(error, (VLLMClientError, ValueError))


def completions_of(output: Any) -> list[Completion]:
    """The samples of a finished group, in the order of their index."""
    return [
        Completion(
            np.asarray(completion.token_ids, dtype=np.int32),
            _sampled_logprobs(completion),
            completion.finish_reason,
            [(int(span.version), span.end - span.start) for span in completion.weight_versions or ()],
        )
        for completion in sorted(output.outputs, key=lambda completion: completion.index)
    ]


def _sampled_logprobs(completion: Any) -> np.ndarray:
    """(R,) float32: the log-prob of each sampled token. With `logprobs=0` the entries of each position start with the
    sampled token."""
    flat = completion.logprobs
    starts = np.asarray(flat.start_indices, dtype=np.int64)
    return np.asarray(flat.logprobs, dtype=np.float32)[starts]
