"""A name for users: run files say `trainer.cls: open_instruct.fully_async_trainer.FullyAsyncTrainer`."""

from open_instruct.run.fully_async_trainer import FullyAsyncTrainer

__all__ = ["FullyAsyncTrainer"]
