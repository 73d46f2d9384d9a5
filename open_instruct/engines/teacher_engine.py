"""The teacher's engine gives the teacher's log-probs for text that the policy sampled (`--teacher_model_name_or_path`).

The teacher's weights never change, so its engine needs no queues, no weight updates and no sleep. When the engine's process dies,
Ray starts it again and repeats the calls that were under way.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from open_instruct.data_types import TeacherLogprobs
from open_instruct.engines.engine_cleanup import cleaned_up_when_this_process_ends
from open_instruct.engines.vllm_engine import EngineCoreLost, EngineOptions, VLLMEngine, make_engine
from open_instruct.engines.weight_receiver import new_abort_file

CALLS_AT_ONCE = 64
"""Calls whose sequences an engine reads together. Further calls wait."""


class TeacherEngine:
    """One vLLM engine. Make it a Ray actor with `max_concurrency=CALLS_AT_ONCE`, so that concurrent calls are read together.

    Args:
        top_k: number of tokens, the likeliest first, whose log-probs are returned at each position.
        vocab_size: tokens that the policy knows. The larger models of a family often have some more unused tokens.
        timeout_s: seconds after which an engine core that does not answer counts as dead.
    """

    def __init__(self, options: EngineOptions, *, top_k: int, vocab_size: int, timeout_s: float) -> None:
        self._top_k = top_k
        self._policy_size = vocab_size
        with cleaned_up_when_this_process_ends(new_abort_file()):
            self._engine = VLLMEngine(make_engine(options, version=0), timeout_s=timeout_s)
        self._own_size: int = self._engine.model_config.get_vocab_size()
        self._lock = threading.Lock()
        """Held by the thread that uses the engine."""
        self._num_requests = 0
        self._outputs: dict[str, Any] = {}
        """Finished outputs that their call has not taken yet, by request id."""

    def ready(self) -> int:
        """The process id, as soon as the engine is loaded."""
        return os.getpid()

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[int, list[TeacherLogprobs]]:
        """The teacher's log-probs of each response after its prompt; `sequences` are pairs of (Q,) and (R,) int32 token ids.

        Also returns the process id, so that the caller notices a new process. Log-probs are those of temperature 1.
        """
        try:
            with self._lock:
                ids = [self._add(prompt, response) for prompt, response in sequences]
            while not self._take_step(ids):
                pass
        except EngineCoreLost:
            os._exit(1)  # Ray starts this actor again
        with self._lock:
            outputs = [self._outputs.pop(request_id) for request_id in ids]
        return os.getpid(), [
            self._read(output.prompt_logprobs, prompt, response)
            for output, (prompt, response) in zip(outputs, sequences, strict=True)
        ]

    def shutdown(self) -> None:
        """End the engine and its processes, if it has any."""
        self._engine.shutdown()

    def _add(self, prompt: np.ndarray, response: np.ndarray) -> str:
        from vllm import SamplingParams

        request_id = str(self._num_requests)
        self._num_requests += 1
        ids = np.concatenate([prompt, response])
        ids = np.where(ids < self._own_size, ids, 0).tolist()
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=self._top_k, flat_logprobs=True, detokenize=False
        )
        self._engine.add_request(request_id, {"prompt_token_ids": ids}, sampling)
        return request_id

    def _take_step(self, ids: Sequence[str]) -> bool:
        """Make one engine step, unless the sequences `ids` are all done. Returns whether they were done."""
        with self._lock:
            if all(request_id in self._outputs for request_id in ids):
                return True
            self._outputs.update({output.request_id: output for output in self._engine.step() if output.finished})
            return False

    def _read(self, flat: Any, prompt: np.ndarray, response: np.ndarray) -> TeacherLogprobs:
        """Read vLLM's flat log-probs of a sequence. At each position but the first they hold the sequence's own token, then the
        likeliest K tokens.

        Tokens that one of the two models lacks have the log-prob -inf. No text is ever tokenized to such tokens.
        """
        width, none = self._top_k + 1, np.float32(-np.inf)
        ids = np.asarray(flat.token_ids, dtype=np.int32).reshape(-1, width)[len(prompt) - 1 :]
        logprobs = np.asarray(flat.logprobs, dtype=np.float32).reshape(-1, width)[len(prompt) - 1 :]
        is_known = ids[:, 1:] < self._policy_size
        return TeacherLogprobs(
            top_ids=np.where(is_known, ids[:, 1:], 0),
            top_logprobs=np.where(is_known, logprobs[:, 1:], none),
            logprobs=np.where(response < self._own_size, logprobs[:, 0], none),
        )
