"""The controller of the rollout side: it decides what is generated and turns results into training data.

    PromptOrder ─► _feed_prompts ──► param_prompt_Q ──► engines ──► inference_results_Q ─► data_preparation_thread
                   what PromptFlow                                                             │ verify (processes)
                   admits; evaluation first          EVAL results ◄────────────────────────────┤
                        ▲                                                                      ▼
                   set_version(v) ◄── driver, after every engine confirmed v          packing_thread: PromptFlow says which step
                                                                                      a group is for ─► advantages ─► collate
                                       learners ◄── MessageQueue ◄── pieces of the step ◄──────┘

`PromptFlow` (staleness.py) holds the rules: how many prompts may be issued, which groups a step takes, what becomes of a
straggler. A group whose responses all have the same score is left out (`zero_std`), and so is a group whose responses were all
cut off and are masked (`masked`). If a step of 8 groups is left without a token to train on, it takes 8 further groups.
"""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.queue import Empty, Full, Queue

from open_instruct.config.extensions import import_extensions
from open_instruct.config.options import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset, PromptOrder
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.data_types import EVAL, Box, GenerationResult, PromptRequest, RolloutBatch
from open_instruct.report.tracker import TrackerOptions, make_tracker
from open_instruct.rollouts import batch_building
from open_instruct.rollouts.evaluation import Evaluation
from open_instruct.rollouts.generation_failures import NOT_SCORED, GenerationFailures
from open_instruct.rollouts.message_queue import MessageQueue, QueueFull
from open_instruct.rollouts.notices import Notices
from open_instruct.rollouts.rollout_state import FinishedGroup, read_state, write_state
from open_instruct.rollouts.staleness import Assignment, FlowOptions, IssuedPrompt, PromptFlow, PromptLedger
from open_instruct.rollouts.step_assembly import CollationOptions, StepAssembly
from open_instruct.rollouts.step_record import write_step_record
from open_instruct.scored_groups import ScoredGroup, take
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.scoring_processes import Scored
from open_instruct.verifiers.verifiers import import_verifiers, verifier_weight

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Longest wait of a background thread before it looks whether it should stop."""
BUNDLES_PER_STEP = 2
"""An item of the prompt queue holds about half of each engine's share of a step, and at least one group."""
TAKING_INVENTORY = "taking inventory"
"""Reason of a pause in which no prompt is issued, not even one of an evaluation."""
EVAL_STREAM = 1
"""Keeps the seeds of evaluation prompts apart from those of training prompts."""
RETRY_STREAM = 2
"""Keeps the seeds of training prompts that are tried again apart from both."""


@dataclass(frozen=True)
class ControllerOptions:
    """What the controller needs beside the user's options: facts that the driver found out at start."""

    num_ranks: int
    layout: str
    pad_token_id: int
    tokenizer_name_or_path: str
    wandb_run_id: str | None = None
    """Run in wandb that `eval` logs to."""

    @property
    def collation(self) -> CollationOptions:
        return CollationOptions(self.num_ranks, self.layout, self.pad_token_id)  # type: ignore[arg-type]


def flow_options(args: GRPOConfig) -> FlowOptions:
    """How `PromptFlow` paces a run."""
    return FlowOptions(
        prompts_per_step=args.num_unique_prompts_rollout,
        num_training_steps=args.num_training_steps,
        staleness_threshold=args.staleness_target,
        max_staleness=args.staleness_bound,
        over_issued=args.over_issued_prompts,
        straggler_policy=args.straggler_policy,
    )


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
        *,
        message_queue: MessageQueue,
    ) -> None:
        import_extensions([*args.algorithm_modules, *args.workflow_modules])
        self._args = args
        self._options = options
        self._train = train_dataset
        self._eval = eval_dataset
        self._order = PromptOrder(len(train_dataset), args.seed)
        self.param_prompt_Q = param_prompt_Q
        self.inference_results_Q = inference_results_Q
        self.message_queue = message_queue
        self._tokenizer = read_tokenizer(options.tokenizer_name_or_path, args.tokenizer_revision)
        datasets = {*train_dataset.dataset_names, *(eval_dataset.dataset_names if eval_dataset is not None else ())}
        import_verifiers(args.verifier_modules)  # for their weights; they score in processes of their own
        self._verifiers = VerifierPool(
            args.verifier_workers, args.verifier_timeout_s, ready=sorted(datasets), modules=args.verifier_modules
        )
        self._lock = threading.Condition()
        self._ledger = PromptLedger()
        self._flow = PromptFlow(flow_options(args), self._ledger)
        self._workflow = args.workflow.make()
        self._verifying: dict[str, GenerationResult] = {}
        """Results of training prompts that are being scored."""
        self._scored: queue.SimpleQueue[ScoredGroup] = queue.SimpleQueue()
        """Groups of training on their way to `packing_thread`."""
        self._groups: dict[str, ScoredGroup] = {}
        """Complete groups that no step has taken."""
        self._num_forgotten = 0
        """`num_stale_discarded` when discarded groups were last removed from `_groups`."""
        self._taken: dict[int, list[ScoredGroup]] = {}
        """The groups of each step that is not trained yet, by its number."""
        self._loaded: list[FinishedGroup] = []
        """The groups of a saved state, until `start`."""
        self._assembly: StepAssembly | None = None
        self._evaluation: Evaluation | None = None
        self._evaluated: dict[str, float] = {}
        self._tracker = make_tracker(options.wandb_run_id is not None, _tracker_options(args, options), {})
        self._to_send: deque[PromptRequest] = deque()
        """Prompts that were taken back from the prompt queue while inventory was taken."""
        self._pauses: set[str] = set()
        self._feeding = threading.Event()
        """Set while a bundle is on its way into the prompt queue."""
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._bundle_samples = args.num_samples_per_step // (BUNDLES_PER_STEP * args.vllm_num_engines)
        self._num_generated_tokens = 0
        self._counters: Counter[str] = Counter()
        self._failures = GenerationFailures()
        self._notices = Notices()
        self._notices.install()
        self._over_issue = batch_building.OverIssueBias()

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Answer once datasets, tokenizer and verifiers are there."""
        return True

    def start(self, version: int) -> None:
        """Begin to issue prompts; every engine serves `version`, and that many training steps are done."""
        self._flow.start(version, finished=[group.result.prompt_id for group in self._loaded])
        for group in self._loaded:
            self._take_back(group)
        self._loaded = []
        for work in (self._feed_prompts, self.data_preparation_thread, self.packing_thread):
            thread = threading.Thread(target=self._guard, args=(work,), name=work.__name__, daemon=True)
            thread.start()
            self._threads.append(thread)

    def watch(self) -> None:
        """Waits while all is well; raises what ended a background thread. Returns after `stop`."""
        with self._lock:
            self._lock.wait_for(lambda: self._error is not None or self._stopping.is_set())
            self._raise_background_error()

    def stop(self) -> None:
        """End background threads and verifier processes."""
        self._stopping.set()
        with self._lock:
            self._lock.notify_all()
        self._verifiers.close()
        self._tracker.finish()
        self._notices.remove()
        for thread in self._threads:
            thread.join(timeout=4 * POLL_S)

    def _guard(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            if not self._stopping.is_set():
                self._end_with(error)
                raise

    def _end_with(self, error: BaseException) -> None:
        """The next call of the step loop raises it."""
        with self._lock:
            self._error = error
            self._lock.notify_all()

    def _raise_background_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"the rollout controller failed: {self._error!r}") from self._error

    # --- what the step loop calls -------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Every engine serves `version`: admit what the staleness bound now allows."""
        with self._lock:
            self._raise_background_error()
            self._flow.set_version(version)
            self._counters["param_sync_requests"] += 1
            self._lock.notify_all()

    def pause(self, reason: str = "asked for") -> None:
        """Issue no training prompts until `resume` is called for the same reason; what is out goes on."""
        with self._lock:
            self._counters["pause_count"] += not self._pauses
            self._pauses.add(reason)

    def resume(self, reason: str = "asked for") -> None:
        with self._lock:
            self._pauses.discard(reason)
            self._counters["resume_count"] += not self._pauses
            self._lock.notify_all()

    def commit(self, training_step: int) -> list[dict[str, object]]:
        """The learners have trained the step: its prompts have their fates. Returns these in the order of issue."""
        with self._lock:
            self._raise_background_error()
            self._taken.pop(training_step, None)
            return [
                {"prompt_id": prompt.prompt_id, "row": self._order[prompt.issue_number][1], "fate": fate}
                for prompt, fate in self._ledger.commit(training_step)
            ]

    def start_evaluation(self, version: int) -> None:
        """Issue the evaluation prompts, ahead of training prompts. The engines must keep `version` until it is collected."""
        assert self._eval is not None, "there is no evaluation dataset"
        with self._lock:
            self._raise_background_error()
            assert self._evaluation is None, f"the evaluation of version {self._evaluation.version} is not collected"
            self._evaluation = Evaluation(version, len(self._eval), max_attempts=self._args.max_generation_attempts)
            self._lock.notify_all()

    def get_evaluation(self, timeout_s: float) -> dict[str, float]:
        """`eval/*` metrics of the evaluation under way. Waits for its last result, at most `timeout_s`."""
        evaluation = self._evaluation
        assert evaluation is not None, "no evaluation was started"
        with self._lock:
            done = self._lock.wait_for(lambda: self._error is not None or evaluation.is_complete, timeout_s)
            self._raise_background_error()
            if not done:
                raise TimeoutError(
                    f"evaluation: {evaluation.num_done} of {evaluation.num_rows} results after {timeout_s:g} s; "
                    f"{evaluation.describe_missing()}"
                )
            self._evaluation = None
        if evaluation.num_given_up:
            logger.warning("%s", evaluation.why_given_up())
        metrics = self._evaluation_metrics(evaluation.groups) if evaluation.groups else {}
        metrics["eval/num_not_scored"] = evaluation.num_left_out
        metrics["time/eval"] = evaluation.began.elapsed_s()
        return metrics

    def _evaluation_metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        answers = self._workflow.evaluated(groups)
        metrics = batch_building.evaluation_metrics(answers, verification_reward=self._args.verification_reward)
        return metrics | self._workflow.evaluation_metrics(groups)

    def eval(self, rollout_id: int) -> None:
        """Evaluate the weights of version `rollout_id`, and return when the last result has come.

        An evaluation that is under way is waited for. The metrics are logged, and `take_evaluation` hands them over. The engines
        must keep these weights meanwhile.
        """
        self._begin(rollout_id)
        if self._evaluation is None:
            self.start_evaluation(rollout_id)
        self._evaluated = self.get_evaluation(self._args.eval_timeout_s)
        logger.info("evaluation of version %d: %s", rollout_id, self._evaluated)
        self._tracker.log(self._evaluated, rollout_id)

    def take_evaluation(self) -> dict[str, float]:
        """`eval/*` metrics of the last `eval`."""
        return self._evaluated

    def give_up_evaluation(self) -> None:
        """No engine has the weights any more that were to be measured. Calls of `get_evaluation` end with `TimeoutError`."""
        with self._lock:
            self._evaluation = None

    def status(self) -> dict[str, Any]:
        """Counts of the ledger, tokens generated for training so far, lengths of the queues, and warnings since the last call."""
        queues = {"prompts": self.param_prompt_Q.qsize(), "results": self.inference_results_Q.qsize()}
        with self._lock:
            self._raise_background_error()
            queues |= {"waiting_results": len(self._groups)}
            return {
                "prompts": self._ledger.counts(),
                "queues": queues,
                "num_generated_tokens": self._num_generated_tokens,
                "statistics": self.get_statistics(),
                "notices": self._notices.take(),
            }

    def get_statistics(self) -> dict[str, Any]:
        """Counts since the start of this process, under the names of the fully async policy. Samples are responses."""
        with self._lock:
            group_size = self._args.num_samples_per_prompt_rollout
            return {
                "total_generated_samples": self._counters["total_generated_samples"],
                "dropped_stale_samples": self._flow.num_stale_discarded * group_size,
                **self._failures.counts(),
                "param_sync_requests": self._counters["param_sync_requests"],
                "current_param_version": self._flow.version,
                "is_paused": bool(self._pauses),
                "pause_count": self._counters["pause_count"],
                "resume_count": self._counters["resume_count"],
                "num_open_prompts": self._flow.num_unassigned,
            }

    def describe_progress(self) -> str:
        """Who is waited for, for a message to the user, and warnings that nobody has taken."""
        notices = self._notices.take()
        with self._lock:
            waiting = [p for p in self._ledger.open_prompts() if self._flow.is_waited_for(p)]
            names = ", ".join(f"{p.prompt_id} (version {p.version})" for p in waiting[:8])
            return (
                f"step {self._flow.assembling} is being put together, engines serve version {self._flow.version}, "
                f"{len(waiting)} prompts are not back from the engines ({names or 'none'}), {len(self._verifying)} are being "
                f"scored, {len(self._groups)} groups wait"
                + (f"; paused: {', '.join(self._pauses)}" if self._pauses else "")
                + (f"; warnings: {' '.join(notices)}" if notices else "")
            )

    def close_ledger(self) -> dict[str, object]:
        """The run ends: open prompts are dropped for `run_ended`. Returns the final counts."""
        with self._lock:
            self._ledger.close()
            return self._ledger.counts()

    # --- the state between two steps ----------------------------------------------------------------------------------

    def save(self, rollout_id: int, path: str | None = None) -> None:
        """Write where the dataset stands, the ledger, and the groups that are finished and not trained on: whole or not at all.

        By default under the directory of the checkpoints, one file for each `rollout_id`.
        """
        with self._lock:
            state, finished = self.state_dict(), self._finished_groups()
        write_state(self._state_path(rollout_id, path), state, finished)

    def load(self, rollout_id: int, path: str | None = None) -> None:
        """Before `start`: go on from what `save` wrote. Finished groups are used, other prompts without a fate issued again.

        Raises `ValueError` if there is no such state.
        """
        state, finished = read_state(self._state_path(rollout_id, path))
        self.load_state_dict(state, finished)

    def _state_path(self, rollout_id: int, path: str | None) -> Path:
        return Path(path or self._args.state_dir / "rollout" / f"rollout_{rollout_id:06d}.npz")

    def state_dict(self) -> dict[str, Any]:
        """Dataset position and ledger between two steps; plain values."""
        with self._lock:
            self._raise_background_error()
            return {
                "next_issue_number": self._flow.next_issue_number,
                "ledger": self._ledger.state_dict(),
                "workflow": self._workflow.state_dict(),
            }

    def load_state_dict(self, state: dict[str, Any], finished: Sequence[FinishedGroup] = ()) -> None:
        """Read a saved state. Called before `start`."""
        assert not self._threads, "the controller has started"
        self._flow.next_issue_number = state["next_issue_number"]
        self._ledger.load_state_dict(state["ledger"])
        self._workflow.load_state_dict(state["workflow"])
        self._loaded = list(finished)

    def _finished_groups(self) -> list[FinishedGroup]:
        """Groups that were generated and not trained on: waiting, being scored, or taken by a step that is not trained yet."""
        scored = [*self._groups.values(), *(group for groups in self._taken.values() for group in groups)]
        return [FinishedGroup(one.result, one.scores, one.num_failures, one.num_not_scored) for one in scored] + [
            FinishedGroup(result) for result in self._verifying.values()
        ]

    def _take_back(self, group: FinishedGroup) -> None:
        """Take in a group of a saved state, as if it had just arrived."""
        if group.scores is None:
            self._take(group.result)
        else:
            scored = self._group(group.result, group.scores, group.num_failures)
            self._take_into_flow(replace(scored, num_not_scored=group.num_not_scored))

    # --- a training loop of one's own ---------------------------------------------------------------------------------

    def generate(self, rollout_id: int, engines: "Sequence[ray.ObjectRef]" = ()) -> Box:
        """The whole batch of training step `rollout_id + 1`, once it is complete.

        The call says that `rollout_id` steps are trained and that the engines have, or are just being sent, their weights. Those
        of `engines` are done only when an engine has ended.

        Raises:
            ValueError: with `streaming` a batch never is in one piece.
            TimeoutError: after `progress_timeout_s`; says who is waited for.
        """
        if self._args.streaming:
            raise ValueError("streaming: a rollout comes in pieces, from the message queue. Leave streaming out.")
        self._begin(rollout_id)
        if rollout_id > self._flow.version:
            self.commit(rollout_id)
            self.message_queue.set_version(rollout_id)
            self.set_version(rollout_id)
        deadline = time.monotonic() + self._args.progress_timeout_s
        while not (items := self.message_queue.get(timeout=POLL_S, max_batch_count=1)):
            with self._lock:
                self._raise_background_error()
            _raise_if_ended(engines)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no batch in {self._args.progress_timeout_s:g} s: {self.describe_progress()}")
        return Box(ray.put(items[0]))

    def _begin(self, rollout_id: int) -> None:
        with self._lock:  # two calls may come at once
            if not self._threads:
                self.start(rollout_id)

    # --- after the death of an engine ---------------------------------------------------------------------------------

    def take_back_prompts(self) -> int:
        """First half of taking inventory: stop issuing and empty the prompt queue, so that the engines have every open prompt.

        Returns how many prompts were taken back; `recover_lost` lets them go again.
        """
        self.pause(TAKING_INVENTORY)
        taken = self._drain_prompts()
        while self._feeding.is_set():  # a bundle on its way into the queue
            time.sleep(POLL_S / 50)
            taken += self._drain_prompts()
        return taken + self._drain_prompts()

    def _drain_prompts(self) -> int:
        taken = 0
        while True:
            try:
                bundle = self.param_prompt_Q.get_nowait()
            except Empty:
                return taken
            with self._lock:
                self._to_send.extend(bundle)
            taken += len(bundle)

    def recover_lost(self, held: list[str]) -> int:
        """Issue the prompts again that were lost with an engine; how many. `held` are the ids of prompts inside living engines.

        lost = issued - in the prompt queue (taken back) - held - arrived. Results on their way are waited for.
        """
        deadline = time.monotonic() + self._args.batch_timeout
        while not self.inference_results_Q.empty() and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
        time.sleep(POLL_S / 10)  # the last of them is being taken in
        with self._lock:
            present = {*held, *self._verifying, *(request.prompt_id for request in self._to_send)}
            lost = self._flow.recover(present)
            num_lost_eval = self._evaluation.recover(present) if self._evaluation is not None else 0
        self.resume(TAKING_INVENTORY)
        return len(lost) + num_lost_eval

    # --- issuing ------------------------------------------------------------------------------------------------------

    def _feed_prompts(self) -> None:
        """A thread that issues prompts. It waits until `PromptFlow` admits one and the queue has room; `set_version` and
        `recover_lost` wake it."""
        while not self._stopping.is_set():
            with self._lock:
                bundle = self._next_bundle()
                if not bundle:
                    self._lock.wait(POLL_S)
                    continue
                self._feeding.set()
            self._put(self._custom_generation_logic(bundle))
            self._feeding.clear()
            if self._args.batch_generation_interval:
                self._stopping.wait(self._args.batch_generation_interval)

    def _custom_generation_logic(self, batch: list[PromptRequest]) -> list[PromptRequest]:
        """For subclasses: change prompts or their sampling before they are issued. Every prompt id must be there exactly once."""
        return batch

    def _next_bundle(self) -> list[PromptRequest]:
        """The prompts that may be issued now, for up to `_bundle_samples` responses. Several travel in one call of the queue,
        because a call costs as much as sampling a few tokens."""
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
        """The next prompt: of the evaluation first, then one that was taken back, then what `PromptFlow` admits. None while no
        prompt may be issued."""
        if TAKING_INVENTORY in self._pauses:
            return None
        if self._evaluation is not None and (row := self._evaluation.next_row()) is not None:
            return self._eval_request(self._evaluation, row)
        if self._to_send:
            return self._to_send.popleft()
        if self._pauses:
            return None
        prompt = self._flow.next_prompt()
        return None if prompt is None else self._train_request(prompt)

    def _train_request(self, prompt: IssuedPrompt) -> PromptRequest:
        """A prompt that was broken off gets another seed, because with the same seed it would take too long again."""
        number, failures = prompt.issue_number, prompt.num_failures
        first_seed = request_seed(self._args.seed, number)
        seed = request_seed(self._args.seed, number, RETRY_STREAM, failures) if failures else first_seed
        _, row_number = self._order[number]
        row = self._train[row_number]
        version = self._flow.version
        task = self._workflow.task(
            row, row_number, prompt_id=prompt.prompt_id, version=version, seed=first_seed, is_eval=False
        )
        config = replace(self._args.train_sampling, seed=seed)
        return PromptRequest(row.prompt, config, row_number, prompt.prompt_id, prompt.version, task=task)

    def _eval_request(self, evaluation: Evaluation, row: int) -> PromptRequest:
        """The seed of a row is the same at every version, so that two evaluations differ by their weights alone."""
        assert self._eval is not None
        seed = request_seed(self._args.seed, row, EVAL_STREAM)
        version, prompt_id = evaluation.version, evaluation.prompt_id(row)
        task = self._workflow.task(self._eval[row], row, prompt_id=prompt_id, version=version, seed=seed, is_eval=True)
        config = replace(self._args.eval_sampling, seed=seed)
        return PromptRequest(self._eval[row].prompt, config, row, prompt_id, version, marker=EVAL, task=task)

    # --- data preparation ---------------------------------------------------------------------------------------------

    def data_preparation_thread(self) -> None:
        """A thread that takes results from `inference_results_Q` and has them scored. Scored training groups go to
        `packing_thread`."""
        while not self._stopping.is_set():
            try:
                results = self.inference_results_Q.get(timeout=POLL_S)
            except Empty:
                continue
            for result in results:
                self._take(result)

    def _take(self, result: GenerationResult) -> None:
        with self._lock:
            if result.is_eval and not (self._evaluation is not None and self._evaluation.measures(result)):
                return
            if result.error:
                self._give_up(result)
                return
            if not self._is_waited_for(result):
                return
            if not result.is_eval:
                self._verifying[result.prompt_id] = result
                self._counters["total_generated_samples"] += len(result.samples)
                self._num_generated_tokens += result.token_statistics.num_response_tokens
        self._verify(result)

    def _is_waited_for(self, result: GenerationResult) -> bool:
        if result.is_eval:
            assert self._evaluation is not None
            return self._evaluation.begin_scoring(result)
        return self._flow.waits_for(result.prompt_id, self._verifying)

    def _give_up(self, result: GenerationResult) -> None:
        """An engine gave a group up: issue its prompt again, or drop it after `max_generation_attempts` failures."""
        is_tried_again = None
        if result.is_eval:
            assert self._evaluation is not None
            nothing = np.zeros(self._args.eval_sampling.n, dtype=np.float32)
            is_tried_again = not self._evaluation.fail(self._group(result, nothing))
        elif self._flow.waits_for(result.prompt_id, self._verifying):  # else another copy of it came
            is_tried_again = self._flow.give_up(result.prompt_id, max_attempts=self._args.max_generation_attempts)
            if not is_tried_again:
                self._workflow.dropped(result.prompt_id)
        self._failures.record(result, is_tried_again=is_tried_again)
        self._lock.notify_all()

    def _verify(self, result: GenerationResult) -> None:
        row = self._row(result)
        token_ids = [sample.response_ids.tolist() for sample in result.samples if sample.is_judged]
        texts = self._tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        texts = [self._workflow.answer(text) for text in texts]
        started = time.perf_counter()
        future = self._verifiers.submit(row.dataset, row.ground_truth, token_ids, texts, row.raw_query)
        future.add_done_callback(lambda future: self._verified(result, future, time.perf_counter() - started))

    def _verified(self, result: GenerationResult, future: "Future[list[Scored]]", score_s: float) -> None:
        """Called by the verifiers' threads. Results of an evaluation are taken in here, because `packing_thread` may be waiting
        for room in the message queue while the driver waits for the evaluation."""
        if self._stopping.is_set():
            return
        try:
            group = self._scored_group(result, future.result(), score_s)
            if group is None:
                return
            if result.is_eval:
                self._take_into_evaluation(group)
            else:
                self._scored.put(group)
        except Exception as error:  # nobody looks at what a callback raises
            failure = RuntimeError(f"verification of {result.prompt_id} failed: {error!r}")
            failure.__cause__ = error
            self._end_with(failure)

    def _scored_group(self, result: GenerationResult, scored: "list[Scored]", score_s: float) -> ScoredGroup | None:
        """The rollout with its rewards, without samples that were not scored. None: too little of it was, and it was left out."""
        said = iter(one.score for one in scored)
        rewards = self._workflow.rewards(
            result.samples, [next(said) if sample.is_judged else None for sample in result.samples]
        )
        known = _comparable(result, rewards)
        if not known or (result.is_eval and len(known) < len(rewards)):
            causes = sorted({one.failure or "" for one in scored if one.score is None})
            self._leave_out(result, f"{NOT_SCORED}: {', '.join(causes)}")
            return None
        scores = np.array([0.0 if reward is None else reward for reward in rewards], dtype=np.float32)
        num_failures = sum(one.failure is not None and one.score is not None for one in scored)
        group = self._group(result, scores, num_failures)
        if len(known) < len(rewards):
            group = take(group, known)
        return replace(
            group, num_not_scored=len(rewards) - len(known), score_s=score_s, cost=sum(one.cost for one in scored)
        )

    def _leave_out(self, result: GenerationResult, cause: str) -> None:
        """Too few responses of this group were scored. So a training prompt is issued again, and an evaluation goes without the
        prompt."""
        failed = replace(result, error=cause)
        with self._lock:
            if not result.is_eval:
                self._verifying.pop(result.prompt_id, None)
                self._give_up(failed)
            elif self._evaluation is not None and self._evaluation.measures(result):
                self._evaluation.leave_out(result.index)
                self._failures.record(failed, is_tried_again=False)
                self._lock.notify_all()

    def _row(self, result: GenerationResult) -> Any:
        dataset = self._eval if result.is_eval else self._train
        assert dataset is not None
        return dataset[result.index]

    def _group(self, result: GenerationResult, scores: np.ndarray, num_failures: int = 0) -> ScoredGroup:
        dataset = self._row(result).dataset
        return ScoredGroup(result, dataset, scores, num_failures, reward_weight=verifier_weight(dataset))

    def _take_into_evaluation(self, group: ScoredGroup) -> None:
        with self._lock:
            if self._evaluation is not None and self._evaluation.measures(group.result):
                self._evaluation.add(group)
                self._lock.notify_all()

    def packing_thread(self) -> None:
        """A thread that takes scored groups and puts the training data of each step into `message_queue`, waiting for room."""
        self._assemble()  # what a saved state brought along
        while not self._stopping.is_set():
            try:
                group = self._scored.get(timeout=POLL_S)
            except queue.Empty:
                continue
            self._take_into_flow(group)
            self._assemble()

    def _take_into_flow(self, group: ScoredGroup) -> None:
        result = group.result
        with self._lock:
            self._verifying.pop(result.prompt_id, None)
            self._workflow.arrived(result.prompt_id, result.notes)
            versions = {"oldest_version": result.oldest_version, "newest_version": result.newest_version}
            if self._flow.arrive(result.prompt_id, **versions):
                self._groups[result.prompt_id] = group

    def _assemble(self) -> None:
        """Fill steps with the groups that have arrived, and send the pieces that are ready."""
        while True:
            with self._lock:
                if self._flow.assembling > self._args.num_training_steps:
                    return
                assembly = self._assembly or StepAssembly(self._flow.assembling, self._args, self._options.collation)
                self._assembly = assembly
                taken = self._flow.assign()
                self._forget_discarded()
                for assignment in taken:
                    self._add(assembly, assignment)
                complete = self._flow.step_is_full and assembly.has_gradient
                if self._flow.step_is_full and not complete:
                    logger.warning("%s", assembly.why_no_gradient)
                    self._flow.extend_step()
                if complete:
                    self._flow.close_step()
                    self._assembly = None
                self._lock.notify_all()
            self._send(assembly, complete=complete)
            if not complete and not taken:
                return

    def _add(self, assembly: StepAssembly, assignment: Assignment) -> None:
        prompt_id = assignment.prompt.prompt_id
        group = self._groups.pop(prompt_id)
        self._taken.setdefault(assembly.training_step, []).append(group)
        self._ledger.stage(prompt_id, assembly.add(group, assignment), assembly.training_step)
        self._over_issue.record(group, was_left_behind=assignment.was_left_behind)

    def _forget_discarded(self) -> None:
        """Forget groups that were too old. Their prompts are issued again."""
        if self._num_forgotten == self._flow.num_stale_discarded:
            return  # looking at all groups for every result would cost more than the ledger does
        self._num_forgotten = self._flow.num_stale_discarded
        for prompt_id in [prompt_id for prompt_id in self._groups if not self._ledger[prompt_id].arrived]:
            del self._groups[prompt_id]

    def _send(self, assembly: StepAssembly, *, complete: bool) -> None:
        piece = assembly.next_piece(last=complete)
        if piece is None:
            return
        metrics: dict[str, Any] = {}
        if complete:
            metrics = assembly.metrics(time.time()) | self._over_issue.metrics()
            metrics |= self._workflow.metrics(assembly.rollouts, assembly.groups)
            metrics["stale_results_dropped"] = self._flow.num_stale_discarded
        batch = RolloutBatch(
            training_step=assembly.training_step,
            rank_data=[ray.put(mini_batches) for mini_batches in piece.rank_batches],
            metrics=metrics,
            number=piece.number,
            is_last=complete,
            num_global_tokens=assembly.num_tokens,
            num_samples=piece.num_samples,
            min_version=piece.min_version,
        )
        if complete and self._args.save_traces:
            write_step_record(self._args, assembly, self._train, self._tokenizer, self._options.pad_token_id)
        self._put_into_message_queue(batch)

    def _put_into_message_queue(self, batch: RolloutBatch) -> None:
        """Put a piece, waiting for room. If the queue did not answer, the piece is put again under the same id; the queue takes
        it only once."""
        while not self._stopping.is_set():
            try:
                self.message_queue.put(
                    batch,
                    version=batch.min_version,
                    num_samples=max(batch.num_samples, 1),
                    timeout=10 * POLL_S,
                    message_id=f"step {batch.training_step}, piece {batch.number}",
                )
                return
            except QueueFull:  # learners take their time
                continue
            except TimeoutError as error:
                logger.warning("piece %d of step %d: %s; it is put again", batch.number, batch.training_step, error)


def _comparable(result: GenerationResult, rewards: Sequence[float | None]) -> list[int]:
    """Positions of the samples whose reward is known, but for those that have nobody left to be compared with."""
    known = [position for position, reward in enumerate(rewards) if reward is not None]
    sizes = Counter(sample.group for sample in result.samples)
    left = Counter(result.samples[position].group for position in known)
    groups = {group for group, size in sizes.items() if left[group] >= min(2, size)}
    return [position for position in known if result.samples[position].group in groups]


def _tracker_options(args: GRPOConfig, options: ControllerOptions) -> TrackerOptions:
    return TrackerOptions(
        project=args.wandb_project,
        entity=args.wandb_entity,
        group=args.wandb_group_name,
        name=args.run_title,
        run_id=options.wandb_run_id or "",
        output_dir=args.output_dir,
    )


def request_seed(*key: int) -> int:
    """The seed of one group. vLLM samples its n responses with this seed, the next one, and so on."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(2))


def _raise_if_ended(engines: "Sequence[ray.ObjectRef]") -> None:
    for ended in ray.wait(list(engines), num_returns=len(engines), timeout=0)[0] if engines else []:
        ray.get(ended, timeout=POLL_S)
        raise RuntimeError("an engine ended before the batch was complete")


Rollouter = RolloutController
"""What the documents of the fully async policy call it; `rollout.cls` names subclasses of it."""
