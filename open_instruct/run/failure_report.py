"""What the log says when a run fails."""

from open_instruct.cluster.failures import ComponentDied, WeightsDiffer, root_cause
from open_instruct.config.grpo_config import GRPOConfig
from open_instruct.learners.step_sums import NonfiniteSteps
from open_instruct.report.run_log import RunLog
from open_instruct.report.slack import tell_slack
from open_instruct.run.out_of_memory import KernelKills, memory_message
from open_instruct.storage.checkpoints import StorageNotShared
from open_instruct.storage.output_directory import describe, is_of_storage


def tell_of_failure(args: GRPOConfig, log: RunLog, kills: KernelKills, error: Exception) -> None:
    """Log one line that says why a run failed, for errors that a user can do something about. Raise other errors again.

    Args:
        kills: counts from the start of the run.
    """
    if args.send_slack_alerts:
        tell_slack(f"{args.run_title} has failed: {root_cause(error)}")
    if is_of_storage(error):
        log.failed(RuntimeError(f"{describe(error)}{log.room_left()}. Make room and start the same command again."))
    elif shortage := memory_message(args, error, kills):
        log.failed(RuntimeError(shortage))
    elif isinstance(error, ComponentDied | NonfiniteSteps | StorageNotShared | TimeoutError | WeightsDiffer):
        log.failed(error)
    else:
        raise error
