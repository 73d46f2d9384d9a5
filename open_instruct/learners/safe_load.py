"""Reads checkpoints as data only, so that a person who can write a checkpoint still cannot run code in the learners.

`torch.load` unpickles, which can run code. With `weights_only` it makes only tensors, numbers, texts, and objects of the classes
that are named here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@contextmanager
def data_only() -> Iterator[None]:
    """Make every `torch.load` in the block read only data, including DeepSpeed's calls, which ask for all objects.

    For an object of another class `torch.load` raises `pickle.UnpicklingError`, which names the class.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    deepspeed_globals = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    numpy_globals = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType]
    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"
    try:
        with torch.serialization.safe_globals([*deepspeed_globals, *numpy_globals]):
            yield
    finally:
        os.environ.pop(_FORCED)
        if before is not None:
            os.environ[_FORCED] = before
