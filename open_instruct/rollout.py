"""The rollout side: the controller that decides what is generated and turns results into training data, and the driver's handle.

    PromptOrder ─► _feed_prompts ──► param_prompt_Q ──► engines ──► inference_results_Q ─► data_preparation_thread
                   waits until the staleness bound                                          verify ─► advantages ─► collate
                   admits a prompt; evaluation first         EVAL results ◄─────────────────┘              │
                        ▲                                                                                   ▼
                   set_version(v) ◄── driver, after every engine confirmed v          get_batch(t) ◄── batches by training step

The batch of a training step consists of exactly the prompts that were issued for it, so it does not depend on which group is
done first. A group whose samples all scored alike is left out (`zero_std`); if that leaves nothing, the step gets new prompts.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.util.queue import Empty, Full, Queue

from open_instruct import batch_building
from open_instruct.batch_building import ScoredGroup
from open_instruct.config import GRPOConfig
from open_instruct.data_types import EVAL, GenerationResult, PromptRequest, RolloutBatch
from open_instruct.prompt_dataset import PromptDataset, PromptOrder
from open_instruct.rl_utils import prepare_collated_data_for_workers
from open_instruct.staleness import (
    CONSUMED,
    ZERO_STD,
    IssuedPrompt,
    PromptLedger,
    last_admissible_step,
    sample_age,
)
from open_instruct.verifier_pool import VerifierPool

if TYPE_CHECKING:
    from ray.actor import ActorHandle

POLL_S = 0.5
"""Longest wait of a background thread before it looks whether it should stop."""
BUNDLES_PER_STEP = 2
"""An item of the prompt queue holds about half of each engine's share of a step, and at least one group."""
EVAL_STREAM = 1
"""Keeps the seeds of evaluation prompts apart from those of training prompts."""


@dataclass(frozen=True)
class ControllerOptions:
    """What the controller needs beside the user's options: facts that the driver found out at start."""

    num_ranks: int
    layout: str
    pad_token_id: int
    tokenizer_name_or_path: str


@dataclass
class _Evaluation:
    """An evaluation in flight."""

    version: int
    started_at: float
    groups: dict[str, tuple[GenerationResult, Any]] = field(default_factory=dict)


class RolloutController:
    """Owns the dataset position, the prompt ledger, admission and data preparation. A Ray actor on the driver's node.

    Calls that wait take a `timeout_s` and raise `TimeoutError` that says what is missing. An error in a background thread is
    raised by the next call of the step loop; `close_ledger` still answers, for the summary.
    """

    def __init__(
        self,
        args: GRPOConfig,
        options: ControllerOptions,
        train_dataset: PromptDataset,
        eval_dataset: PromptDataset | None,
        param_prompt_Q: Queue,
        inference_results_Q: Queue,
    ) -> None:
        from transformers import AutoTokenizer

        self._args = args
        self._options = options
        self._train = train_dataset
        self._eval = eval_dataset
        self._order = PromptOrder(len(train_dataset), args.seed)
        self.param_prompt_Q = param_prompt_Q
        self.inference_results_Q = inference_results_Q
        self._tokenizer = AutoTokenizer.from_pretrained(options.tokenizer_name_or_path, revision=args.model_revision)
        datasets = {*train_dataset.dataset_names, *(eval_dataset.dataset_names if eval_dataset is not None else ())}
        self._verifiers = VerifierPool(args.verifier_workers, args.verifier_timeout_s, ready=sorted(datasets))
        self._state = threading.Condition()
        self._ledger = PromptLedger()
        self._version = 0
        self._next_issue_number = 0
        self._to_reissue: deque[IssuedPrompt] = deque()
        self._results: dict[str, tuple[GenerationResult, Any]] = {}
        self._ready: dict[int, RolloutBatch] = {}
        self._evaluation: _Evaluation | None = None
        self._eval_to_issue: deque[int] = deque()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._prepared_up_to = 0
        self._bundle_samples = args.num_samples_per_step // (BUNDLES_PER_STEP * args.vllm_num_engines)
        self._num_generated_tokens = 0

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Answer once datasets, tokenizer and verifiers are there."""
        return True

    def start(self, version: int) -> None:
        """Begin to issue prompts; every engine serves `version`."""
        self._version = version
        self._prepared_up_to = version
        for work in (self._feed_prompts, self.data_preparation_thread):
            thread = threading.Thread(target=self._guard, args=(work,), name=work.__name__, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End background threads and verifier processes."""
        self._stopping.set()
        with self._state:
            self._state.notify_all()
        self._verifiers.close()
        for thread in self._threads:
            thread.join(timeout=4 * POLL_S)

    def _guard(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            if not self._stopping.is_set():
                with self._state:
                    self._error = error
                    self._state.notify_all()
                raise

    def _raise_background_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the rollout controller failed: {self._error!r}") from self._error

    # --- what the step loop calls -------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Every engine serves `version`: admit what the staleness bound now allows."""
        with self._state:
            self._raise_background_error()
            self._version = version
            self._state.notify_all()

    def get_batch(self, training_step: int, timeout_s: float) -> RolloutBatch:
        """The batch of `training_step`; waits until it is prepared."""
        with self._state:
            done = self._state.wait_for(lambda: self._error is not None or training_step in self._ready, timeout_s)
            self._raise_background_error()
            if not done:
                raise TimeoutError(
                    f"batch {training_step} not ready in {timeout_s:g} s: {self._progress(training_step)}"
                )
            return self._ready[training_step]

    def commit(self, training_step: int) -> list[dict[str, object]]:
        """The learners took the step: its prompts have their fates. Returns them in the order of issue."""
        with self._state:
            self._raise_background_error()
            self._ready.pop(training_step)
            return [
                {"prompt_id": prompt.prompt_id, "row": self._order[prompt.issue_number][1], "fate": fate}
                for prompt, fate in self._ledger.commit(training_step)
            ]

    def start_evaluation(self, version: int) -> None:
        """Issue the evaluation prompts, ahead of training prompts. The engines must keep `version` until it is collected."""
        assert self._eval is not None, "there is no evaluation dataset"
        with self._state:
            self._raise_background_error()
            assert self._evaluation is None, f"the evaluation of version {self._evaluation.version} is not collected"
            self._evaluation = _Evaluation(version, time.time())
            self._eval_to_issue.extend(range(len(self._eval)))
            self._state.notify_all()

    def get_evaluation(self, timeout_s: float) -> dict[str, float]:
        """`eval/*` metrics of the evaluation in flight; waits for its last result."""
        evaluation = self._evaluation
        assert evaluation is not None, "no evaluation was started"
        assert self._eval is not None
        total = len(self._eval)
        with self._state:
            done = self._state.wait_for(lambda: self._error is not None or len(evaluation.groups) == total, timeout_s)
            self._raise_background_error()
            if not done:
                raise TimeoutError(f"evaluation: {len(evaluation.groups)} of {total} results after {timeout_s:g} s")
            self._evaluation = None
        groups = [self._scored(result, future) for result, future in evaluation.groups.values()]
        metrics = batch_building.evaluation_metrics(groups, verification_reward=self._args.verification_reward)
        metrics["time/eval"] = time.time() - evaluation.started_at
        return metrics

    def status(self) -> dict[str, Any]:
        """Ledger counts, tokens of training results so far, and what lies in the queues and buffers."""
        queues = {"prompts": self.param_prompt_Q.qsize(), "results": self.inference_results_Q.qsize()}
        with self._state:
            self._raise_background_error()
            queues |= {"ready_batches": len(self._ready), "waiting_results": len(self._results)}
            return {
                "prompts": self._ledger.counts(),
                "queues": queues,
                "num_generated_tokens": self._num_generated_tokens,
            }

    def close_ledger(self) -> dict[str, object]:
        """The run ends: open prompts are dropped for `run_ended`. Returns the final counts."""
        with self._state:
            self._ledger.close()
            return self._ledger.counts()

    def state_dict(self) -> dict[str, Any]:
        """Dataset position and ledger between two steps; plain values. Prompts without a fate will be issued again."""
        with self._state:
            self._raise_background_error()
            return {"next_issue_number": self._next_issue_number, "ledger": self._ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before `start`: go on from a checkpoint."""
        self._next_issue_number = state["next_issue_number"]
        self._to_reissue = deque(self._ledger.load_state_dict(state["ledger"]))

    # --- issuing ------------------------------------------------------------------------------------------------------

    def _feed_prompts(self) -> None:
        """Consumes the dataset; waits for admission and for room in the queue; unblocked by `set_version`."""
        while not self._stopping.is_set():
            with self._state:
                bundle = self._next_bundle()
                if not bundle:
                    self._state.wait(POLL_S)
                    continue
            self._put(bundle)

    def _next_bundle(self) -> list[PromptRequest]:
        """What may be issued now, up to `_bundle_samples` responses: a queue call costs as much as sampling a few tokens."""
        bundle: list[PromptRequest] = []
        num_samples = 0
        while (not bundle or num_samples < self._bundle_samples) and (request := self._next_request()) is not None:
            bundle.append(request)
            num_samples += request.generation_config.n
        return bundle

    def _put(self, bundle: list[PromptRequest]) -> None:
        while not self._stopping.is_set():
            try:
                self.param_prompt_Q.put(bundle, timeout=POLL_S)
                return
            except Full:
                continue

    def _next_request(self) -> PromptRequest | None:
        """Evaluation first, then prompts of a resumed run, then new ones; None while nothing may be issued."""
        if self._eval_to_issue:
            return self._eval_request(self._eval_to_issue.popleft())
        admissible = self._last_admissible_step()
        for prompt in self._to_reissue:
            if prompt.training_step <= admissible:
                self._to_reissue.remove(prompt)
                return self._train_request(prompt)
        for training_step in range(self._prepared_up_to + 1, admissible + 1):
            if self._num_missing(training_step) > 0:
                prompt = IssuedPrompt(f"train-{self._next_issue_number}", self._next_issue_number, training_step)
                self._next_issue_number += 1
                self._ledger.issue(prompt)
                return self._train_request(prompt)
        return None

    def _last_admissible_step(self) -> int:
        return last_admissible_step(
            self._version, async_steps=self._args.async_steps, num_training_steps=self._args.num_training_steps
        )

    def _num_missing(self, training_step: int) -> int:
        """Prompts that the step still needs: a full set, and another one each time that all of them taught nothing."""
        issued = self._ledger.for_step(training_step)
        wanted = self._args.num_unique_prompts_rollout
        if issued and all(self._ledger.is_staged(prompt.prompt_id) for prompt in issued):
            return wanted
        return -len(issued) % wanted if issued else wanted

    def _train_request(self, prompt: IssuedPrompt) -> PromptRequest:
        sampling = self._args.train_sampling
        config = replace(sampling, seed=request_seed(self._args.seed, prompt.issue_number))
        _, row = self._order[prompt.issue_number]
        return PromptRequest(self._train[row].prompt, config, row, prompt.prompt_id, prompt.training_step)

    def _eval_request(self, row: int) -> PromptRequest:
        """The same seed for the same row at every version: two evaluations differ by their weights alone."""
        assert self._eval is not None
        assert self._evaluation is not None
        version = self._evaluation.version
        config = replace(self._args.eval_sampling, seed=request_seed(self._args.seed, row, EVAL_STREAM))
        return PromptRequest(self._eval[row].prompt, config, row, f"eval-{version}-{row}", version, marker=EVAL)

    # --- data preparation ---------------------------------------------------------------------------------------------

    def data_preparation_thread(self) -> None:
        """Consumes `inference_results_Q`; EVAL results go to the evaluation, training results become batches in `_ready`."""
        while not self._stopping.is_set():
            try:
                results = self.inference_results_Q.get(timeout=POLL_S)
            except Empty:
                continue
            for result in results:
                self._take(result)
            self._prepare_complete_batches()

    def _take(self, result: GenerationResult) -> None:
        with self._state:
            if not result.is_eval and not self._ledger.arrive(result.prompt_id):
                return
            evaluation = self._evaluation
            if result.is_eval and (evaluation is None or evaluation.version != result.training_step):
                return
            future = self._verify(result)
            if result.is_eval:
                assert evaluation is not None
                _check_versions(result, evaluation.version)
                evaluation.groups[result.prompt_id] = (result, future)
                self._state.notify_all()
            else:
                self._num_generated_tokens += result.token_statistics.num_response_tokens
                self._results[result.prompt_id] = (result, future)

    def _verify(self, result: GenerationResult) -> Any:
        row = self._row(result)
        token_ids = [response.tolist() for response in result.responses]
        texts = self._tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return self._verifiers.submit(row.dataset, row.ground_truth, token_ids, texts)

    def _row(self, result: GenerationResult) -> Any:
        dataset = self._eval if result.is_eval else self._train
        assert dataset is not None
        return dataset[result.index]

    def _scored(self, result: GenerationResult, future: Any) -> ScoredGroup:
        row = self._row(result)
        scored = future.result(timeout=self._args.progress_timeout_s)
        return ScoredGroup(
            result=result,
            query=row.prompt,
            dataset=row.dataset,
            scores=np.array([one.score for one in scored], dtype=np.float32),
            num_failures=sum(one.failure is not None for one in scored),
        )

    def _prepare_complete_batches(self) -> None:
        while True:
            training_step = self._prepared_up_to + 1
            with self._state:
                prompts = self._ledger.for_step(training_step)
                waiting = [p for p in prompts if not self._ledger.is_staged(p.prompt_id)]
                complete = waiting and not self._num_missing(training_step) and all(p.arrived for p in waiting)
                if not complete:
                    return
                results = [self._results.pop(prompt.prompt_id) for prompt in waiting]
            started = time.perf_counter()
            groups = [self._scored(result, future) for result, future in results]
            self._prepare_batch(training_step, groups, verification_s=time.perf_counter() - started)

    def _prepare_batch(self, training_step: int, groups: list[ScoredGroup], *, verification_s: float) -> None:
        started = time.perf_counter()
        kept = [g for g in groups if not (self._args.filter_zero_std_samples and g.has_zero_std)]
        kept_ids = {group.result.prompt_id for group in kept}
        batch = self._collate(training_step, groups, kept) if kept else None
        with self._state:
            for group in groups:
                prompt_id = group.result.prompt_id
                self._ledger.stage(prompt_id, CONSUMED if prompt_id in kept_ids else ZERO_STD)
            if batch is not None:
                batch.metrics["time/verification"] = verification_s  # beyond what went on while others were generated
                batch.metrics["time/packing"] = time.perf_counter() - started
                self._ready[training_step] = batch
                self._prepared_up_to = training_step
            self._state.notify_all()

    def _collate(self, training_step: int, groups: list[ScoredGroup], kept: list[ScoredGroup]) -> RolloutBatch:
        args = self._args
        for group in kept:
            age = sample_age(training_step, group.result.oldest_version)
            assert age <= args.async_steps, (
                f"{group.result.prompt_id} is {age} steps old, allowed are {args.async_steps}"
            )
        samples = batch_building.training_samples(
            kept,
            verification_reward=args.verification_reward,
            advantage_normalization_type=args.advantage_normalization_type,
            mask_truncated_completions=args.mask_truncated_completions,
        )
        rank_batches = prepare_collated_data_for_workers(
            samples,
            dp_world_size=self._options.num_ranks,
            pack_length=args.pack_length,
            rows=args.per_device_train_batch_size,
            layout=self._options.layout,  # type: ignore[arg-type]
            pad_token_id=self._options.pad_token_id,
            num_mini_batches=args.num_mini_batches,
        )
        metrics = {
            **batch_building.response_metrics(groups, verification_reward=args.verification_reward),
            **batch_building.step_metrics(training_step, groups, kept, num_prompts=args.num_unique_prompts_rollout),
            "packed_ratio": batch_building.packed_ratio(rank_batches, samples),
        }
        if samples:
            metrics |= batch_building.advantage_metrics(samples)
        return RolloutBatch(training_step, [ray.put(batches) for batches in rank_batches], metrics)

    def _progress(self, training_step: int) -> str:
        prompts = self._ledger.for_step(training_step)
        missing = [prompt.prompt_id for prompt in prompts if not prompt.arrived]
        return f"{len(prompts)} prompts issued, {len(missing)} not back from the engines ({', '.join(missing[:8])})"


def request_seed(*key: int) -> int:
    """A seed for one group; vLLM gives its samples this seed and those that follow."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(2))


def _check_versions(result: GenerationResult, version: int) -> None:
    seen = {span[0] for spans in result.version_spans for span in spans}
    assert seen <= {version}, f"{result.prompt_id} was to measure version {version} but was sampled by {sorted(seen)}"


class RolloutManager:
    """The driver's handle on the controller and the engines. Methods that start with `async_` return object refs."""

    def __init__(self, controller: "ActorHandle", rollout_engines: "list[ActorHandle]") -> None:
        self.controller = controller
        self.rollout_engines = rollout_engines

    def async_generate(self, rollout_id: int, *, timeout_s: float) -> "ray.ObjectRef[RolloutBatch]":
        """The batch of training step `rollout_id`, once it is prepared."""
        return self.controller.get_batch.remote(rollout_id, timeout_s)

    def async_eval(self, *, timeout_s: float) -> "ray.ObjectRef[dict[str, float]]":
        """Metrics of the evaluation in flight, once it is complete."""
        return self.controller.get_evaluation.remote(timeout_s)
