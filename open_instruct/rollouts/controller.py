"""The controller of the rollout side decides what is generated, and turns results into training data.

    PromptFeeder ──► param_prompt_Q ──► engines ──► inference_results_Q ──► DataPreparation ──► verifiers (processes)
      what PromptFlow admits;             evaluations ◄── EVAL results ◄───────────┤
      evaluation first                                                             ▼ scored groups
           ▲                                                                 BatchProducer: PromptFlow says which step
     set_version(v) ◄── driver, while the engines get v                      a group is for ─► advantages ─► collate
                                                                                   │
                                       learners ◄── MessageQueue ◄── batches ◄─────┘

`PromptFlow` (staleness.py) holds the rules: how many prompts may be issued, which groups a step takes, what becomes of a
straggler.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.queue import Queue

from open_instruct.config.extensions import import_extensions
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.data.prompt_dataset import PromptDataset
from open_instruct.data.run_tokenizer import read_tokenizer
from open_instruct.data_types import Box, PromptRequest
from open_instruct.report.metrics_file import COMPLETIONS
from open_instruct.report.tracker import TrackerOptions
from open_instruct.report.trackers import make_tracker
from open_instruct.rollouts.batch_producer import BatchProducer
from open_instruct.rollouts.batch_progress import RolloutNews
from open_instruct.rollouts.data_preparation import DataPreparation
from open_instruct.rollouts.evaluation_table import completions
from open_instruct.rollouts.function_scoring import function_scoring
from open_instruct.rollouts.message_queue import MessageQueue
from open_instruct.rollouts.prompt_feeder import TAKING_INVENTORY, PromptFeeder
from open_instruct.rollouts.prompt_ledger import PromptLedger
from open_instruct.rollouts.prompt_requests import PromptRequests
from open_instruct.rollouts.result_scoring import ResultScoring
from open_instruct.rollouts.rollout_record import RolloutRecord
from open_instruct.rollouts.rollout_reports import RolloutReports
from open_instruct.rollouts.rollout_state import FinishedGroup, read_state, write_state
from open_instruct.rollouts.running_evaluation import Evaluations
from open_instruct.rollouts.staleness import FlowOptions, PromptFlow
from open_instruct.rollouts.step_assembly import CollationOptions
from open_instruct.rollouts.step_exports import StepExports
from open_instruct.system.work_threads import POLL_S, WorkThreads
from open_instruct.verifiers.evolving_rubrics import EvolvingRubrics
from open_instruct.verifiers.pool import VerifierPool, default_workers
from open_instruct.verifiers.registry import import_verifiers
from open_instruct.verifiers.row_verifiers import names_of_verifiers
from open_instruct.workflows.base import Workflow

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
RESULTS_ARRIVE_S = 30.0
"""After the death of an engine: how long results that are in the results queue may take to be read. A group that is read later
counts as lost and comes twice; it is taken once."""


@dataclass(frozen=True)
class ControllerOptions:
    """What the controller needs in addition to the user's options: facts that the driver found out at start."""

    num_ranks: int
    layout: str
    pad_token_id: int
    tokenizer_name_or_path: str
    pairs_per_token: float | None = None
    """As in `shared_prompts.share_prompts`; None shares no prompt."""
    wandb_run_id: str | None = None
    """The wandb run that `eval` logs to."""

    @property
    def collation(self) -> CollationOptions:
        return CollationOptions(self.num_ranks, self.layout, self.pad_token_id, self.pairs_per_token)  # type: ignore[arg-type]


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

    Calls that wait take a `timeout_s` and raise a `TimeoutError` that says what is missing. The next call of the step loop raises
    the error of a background thread, except that `close_ledger` still answers, for the summary.
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
        teachers: "Sequence[ActorHandle]" = (),
    ) -> None:
        import_extensions([*args.algorithm_modules, *args.workflow_modules])
        self._args = args
        self.param_prompt_Q = param_prompt_Q
        self.inference_results_Q = inference_results_Q
        self.message_queue = message_queue
        self._loaded: list[FinishedGroup] = []
        """The groups of a saved state, until `start`."""
        self._evaluated: dict[str, Any] = {}
        self._num_param_syncs = 0
        self._threads = threads = WorkThreads("the controller")
        self._workflow = workflow = args.workflow.make()
        self._requests = requests = PromptRequests(args, workflow, train_dataset, eval_dataset)
        self._flow = flow = PromptFlow(flow_options(args), PromptLedger(), requests.is_skipped)
        self._tokenizer = tokenizer = read_tokenizer(
            options.tokenizer_name_or_path, args.revision_of_tokenizer, args.tokenizer_setup
        )
        self._scoring = _result_scoring(args, requests, workflow, tokenizer, lambda: flow.version)
        self._evaluations = evaluations = Evaluations(args, threads, workflow, eval_dataset)
        exports = StepExports(args, train_dataset, tokenizer) if args.save_traces else None
        self._record = record = RolloutRecord(args, requests, exports)
        self._feeder = PromptFeeder(
            args, threads, flow, requests, evaluations, param_prompt_Q, self._custom_generation_logic, record
        )
        self._preparation = DataPreparation(
            args, threads, flow, workflow, self._scoring, evaluations, inference_results_Q, record, teachers
        )
        self._producer = BatchProducer(
            args,
            options.collation,
            threads,
            self._preparation,
            flow,
            workflow,
            requests,
            tokenizer,
            message_queue,
            record,
        )
        trackers = ["wandb"] if options.wandb_run_id is not None else []
        self._tracker = make_tracker(trackers, _tracker_options(args, options), {})
        self._reports = RolloutReports(
            args, flow, self._feeder, self._preparation, self._producer, evaluations, requests
        )
        self._reports.warnings.install()

    def _custom_generation_logic(self, batch: list[PromptRequest]) -> list[PromptRequest]:
        """For subclasses: change prompts or their sampling before they are issued. Return every prompt id exactly once."""
        return batch

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    def start(self, version: int) -> None:
        """Begin to issue prompts. Every engine serves `version`, so `version` training steps are done."""
        self._record.start(version)
        self._flow.start(version, finished=[group.result.prompt_id for group in self._loaded])
        for group in self._loaded:  # as if it had just arrived
            if group.scores is None:
                self._preparation.take(group.result)
            elif not self._preparation.ask_teacher(scored := self._scoring.restored(group)):
                self._producer.take(scored)
        self._loaded = []
        self._threads.start(self._feeder.feed_prompts, *self._preparation.threads, self._producer.packing_thread)

    def watch(self) -> None:
        """Wait until `stop`, then return. If a background thread dies, raise its error."""
        self._threads.wait_for(self._threads.stopping.is_set)

    def stop(self) -> None:
        """End background threads and verifier processes."""
        self._threads.stop()
        self._scoring.close()
        self._tracker.finish()
        self._record.close()
        self._reports.warnings.remove()
        self._threads.join(timeout_s=4 * POLL_S)

    # --- what the step loop calls -------------------------------------------------------------------------------------

    def set_version(self, version: int) -> None:
        """Every engine has `version` or is being sent it now: admit the prompts that the staleness bound allows from now on."""
        with self._threads.lock:
            self._threads.raise_error()
            self._evaluations.give_up_others(version)
            self._flow.set_version(version)
            self._num_param_syncs += 1
            self._threads.lock.notify_all()

    def pause(self, reason: str = "asked for") -> None:
        """Issue no training prompts until `resume` is called for the same reason; the engines finish what they have."""
        self._feeder.pause(reason)

    def resume(self, reason: str = "asked for") -> None:
        """End a pause. Prompts are issued again once no other reason to pause is left."""
        self._feeder.resume(reason)

    def commit(self, training_step: int, tokens: "Sequence[ray.ObjectRef]" = ()) -> list[dict[str, object]]:
        """The learners have trained the step, so the fates of its prompts are final. Returns those that `news` has not returned,
        in the order of issue. `tokens`: for the record, what each share of the learners says of its tokens."""
        self._record.commit(training_step, tokens)
        with self._threads.lock:
            self._threads.raise_error()
            self._producer.forget_step(training_step)
            return self._reports.committed(self._flow.ledger.commit(training_step))

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def start_evaluation(self, version: int, sets: Sequence[str] | None = None) -> None:
        """Issue the prompts of these evaluation sets, or of all, before training prompts. The engines must keep `version` until
        the evaluation ends."""
        self._evaluations.start(version, sets)

    def get_evaluation(self, timeout_s: float) -> dict[str, Any]:
        """`eval/*` metrics of the evaluation under way. Waits at most `timeout_s` for its last result."""
        return self._evaluations.collect(timeout_s)

    def eval(self, rollout_id: int) -> None:
        """Evaluate the weights of version `rollout_id` on all sets, and return when the last result has arrived.

        If an evaluation of this version is under way, the call waits for it. An unfinished evaluation of another version, which
        a `TimeoutError` has left behind, is given up. The metrics are logged, and `take_evaluation` returns them. The engines
        must keep these weights until the call returns.
        """
        version = rollout_id
        self._begin(version)
        self._evaluations.go_on_with(version)
        self._evaluated = self._evaluations.collect(self._args.eval_timeout_s)
        self._record.measured(version, self._evaluations.answers, self._evaluations.unscored)
        logger.info("evaluation of version %d: %s", version, self._evaluated)
        self._tracker.log(self._evaluated, version)

    def take_evaluation(self) -> dict[str, Any]:
        """`eval/*` metrics of the last `eval`, and some of its responses (`sample_completions`)."""
        rows = completions(self._args, self._evaluations.answers, self._requests, self._tokenizer)
        return self._evaluated | ({COMPLETIONS: rows} if rows else {})

    def give_up_evaluation(self) -> None:
        """No engine has the weights of the evaluation any more. Calls of `get_evaluation` end with `TimeoutError`."""
        self._evaluations.give_up()

    # --- reports ------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Counts of the ledger, tokens generated for training so far, lengths of the queues, and warnings since the last call."""
        queues = {"prompts": self.param_prompt_Q.qsize(), "results": self.inference_results_Q.qsize()}
        with self._threads.lock:
            self._threads.raise_error()
            return {
                "prompts": self._flow.ledger.counts(),
                "queues": queues | {"waiting_results": len(self._producer.groups)},
                "num_generated_tokens": self._preparation.num_response_tokens,
                "statistics": self.get_statistics(),
                "highest_reward": self._reports.highest_reward(),
                "warnings": self._reports.warnings.take(),
            }

    def get_statistics(self) -> dict[str, Any]:
        """Counts since the start of this process, under the names of the fully async policy. Samples are responses."""
        with self._threads.lock:
            return self._reports.statistics() | {"param_sync_requests": self._num_param_syncs}

    def news(self) -> RolloutNews:
        """What the driver has not been told yet: warnings, prompts that a step has left out, progress."""
        with self._threads.lock:
            self._threads.raise_error()
            return self._reports.news()

    def describe_progress(self) -> str:
        """For a message to the user: what the controller waits for, and the warnings that `status` has not returned."""
        with self._threads.lock:
            warnings = self._reports.warnings.take()
            return str(self._reports.progress()) + (f"; warnings: {' '.join(warnings)}" if warnings else "")

    def close_ledger(self) -> dict[str, object]:
        """The run ends: give every open prompt its fate (`PromptLedger.close`). Returns the final counts, and as `left_out` the
        prompts that were left out by steps that are not trained, as in `RolloutNews`."""
        self._record.flush()
        with self._threads.lock:
            left_out = self._reports.left_out(also_of_usual_steps=True)
            self._flow.ledger.close()
            return {**self._flow.ledger.counts(), "left_out": left_out}

    # --- the state between two steps ----------------------------------------------------------------------------------

    def save(self, rollout_id: int, path: str | None = None) -> None:
        """Write the dataset position, the ledger, and the groups that are finished and not trained on: whole or not at all.

        The default path is under the directory of the checkpoints, with one file for each `rollout_id`.
        """
        self._record.flush()
        with self._threads.lock:
            self._threads.raise_error()
            state = {
                "next_issue_number": self._flow.next_issue_number,
                "ledger": self._flow.ledger.state_dict(),
                "workflow": self._workflow.state_dict(),
                "solved_rows": sorted(self._requests.solved_rows),
                "rubrics": self._scoring.rubrics.state_dict() if self._scoring.rubrics is not None else {},
            }
            finished = self._producer.finished_groups() + self._preparation.finished_groups()
        write_state(_state_path(self._args, rollout_id, path), state, finished)

    def load(self, rollout_id: int, path: str | None = None) -> None:
        """Before `start`: restore what `save` wrote. Finished groups are used; other prompts without a fate are issued again.

        Raises `ValueError` if there is no such state.
        """
        assert not self._threads.has_started, "the controller has started"
        state, finished = read_state(_state_path(self._args, rollout_id, path))
        self._flow.next_issue_number = state["next_issue_number"]
        self._flow.ledger.load_state_dict(state["ledger"])
        self._workflow.load_state_dict(state["workflow"])
        self._requests.solved_rows = set(state.get("solved_rows", ()))  # states of earlier versions have none
        if self._scoring.rubrics is not None:
            self._scoring.rubrics.load_state_dict(state.get("rubrics", {}))
        self._loaded = list(finished)

    # --- a training loop of the user's own ----------------------------------------------------------------------------

    def generate(self, rollout_id: int, engines: "Sequence[ray.ObjectRef]" = ()) -> Box:
        """The whole batch of training step `rollout_id + 1`, once it is complete.

        The call means that `rollout_id` steps are trained, and that the engines have their weights or are being sent them now.
        A reference in `engines` is ready only when its engine has ended.

        Raises:
            ValueError: with `streaming`, because a step then has several batches.
            TimeoutError: after `progress_timeout_s`; says what the controller waits for.
        """
        if self._args.streaming:
            raise ValueError(
                "streaming: a rollout comes in partial batches, from the message queue. Leave streaming out."
            )
        version = rollout_id
        self._begin(version)
        if version > self._flow.version:
            self.commit(version)
            self.message_queue.set_version(version)
            self.set_version(version)
        deadline = time.monotonic() + self._args.progress_timeout_s
        while not (items := self.message_queue.get(timeout=POLL_S, max_batch_count=1)):
            self._threads.raise_error()
            _raise_if_ended(engines)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no batch in {self._args.progress_timeout_s:g} s: {self.describe_progress()}")
        return Box(ray.put(items[0]))

    def _begin(self, version: int) -> None:
        with self._threads.lock:  # two calls may run at once
            if not self._threads.has_started:
                self.start(version)

    # --- after the death of an engine ---------------------------------------------------------------------------------

    def take_back_prompts(self) -> int:
        """First half of taking inventory: stop issuing and empty the prompt queue, so that the engines have every open prompt.

        Returns how many prompts were taken back; after `recover_lost` they are issued again.
        """
        return self._feeder.take_back()

    def recover_lost(self, prompt_ids: list[str]) -> int:
        """Issue lost prompts again; returns how many. `prompt_ids` are the prompts inside living engines.

        lost = issued - in the prompt queue (taken back) - prompt_ids - arrived, read or not. Waits for an empty results queue.
        """
        deadline = time.monotonic() + RESULTS_ARRIVE_S
        while not self.inference_results_Q.empty() and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)
        time.sleep(POLL_S / 10)  # a bundle that has just left the queue is not in `unread` at once
        with self._threads.lock:
            present = {
                *prompt_ids,
                *self._preparation.unread,
                *self._preparation.being_scored,
                *self._feeder.taken_back,
            }
            lost_ids = self._flow.recover(present)
            self._record.lost(lost_ids)
            num_lost = len(lost_ids) + self._evaluations.recover(present)
        self._feeder.resume(TAKING_INVENTORY)
        return num_lost


def _result_scoring(
    args: GRPOConfig,
    requests: PromptRequests,
    workflow: Workflow,
    tokenizer: "PreTrainedTokenizerBase",
    version: Callable[[], int],
) -> ResultScoring:
    """What scores the results. `version` gives the version that the engines have."""
    return ResultScoring(
        requests,
        workflow,
        tokenizer,
        _verifier_pool(args, requests.train, requests.held_out),
        looks_at_form=args.apply_r1_style_format_reward,
        rubrics=_evolving_rubrics(args),
        functions=function_scoring(args, requests.train, requests.held_out, version),
    )


def _verifier_pool(args: GRPOConfig, train: PromptDataset, held_out: PromptDataset | None) -> VerifierPool:
    """The verifiers of the datasets, in processes of their own."""
    import_verifiers(
        args.verifier_modules, args.verifier_config
    )  # for the verifiers' weights, and for the verifiers that score outside the jail
    datasets = {*train.dataset_names, *(held_out.dataset_names if held_out is not None else ())}
    names = {name for dataset in datasets for name in names_of_verifiers(dataset)}
    return VerifierPool(
        args.verifier_workers or default_workers(),
        args.verifier_timeout_s,
        ready=sorted(names),
        modules=args.verifier_modules,
        config=args.verifier_config,
    )


def _evolving_rubrics(args: GRPOConfig) -> EvolvingRubrics | None:
    if not args.apply_evolving_rubric_reward:
        return None
    kept_in = args.cache_evolving_rubric_data_dir
    return EvolvingRubrics(args.verifier_config, args.max_active_rubrics, Path(kept_in) if kept_in else None)


def _state_path(args: GRPOConfig, version: int, path: str | None) -> Path:
    return Path(path or args.state_dir / "rollout" / f"rollout_{version:06d}.npz")


def _tracker_options(args: GRPOConfig, options: ControllerOptions) -> TrackerOptions:
    return TrackerOptions(
        project=args.wandb_project,
        entity=args.wandb_entity,
        group=args.wandb_group_name,
        name=args.run_title,
        run_id=options.wandb_run_id or "",
        output_dir=args.output_dir,
    )


def _raise_if_ended(engines: "Sequence[ray.ObjectRef]") -> None:
    for engine in ray.wait(list(engines), num_returns=len(engines), timeout=0)[0] if engines else []:
        ray.get(engine, timeout=POLL_S)
        raise RuntimeError("an engine ended before the batch was complete")


Rollouter = RolloutController
"""The controller's name in the documents of the fully async policy; `rollout.cls` names subclasses of it."""
