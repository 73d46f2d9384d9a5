"""A learner in the test's own process: a model, and its link to real engines."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from conftest import TIMEOUT_S
from weight_changes import change, largest_difference

from open_instruct.data_types import GenerationResult, SamplingConfig
from open_instruct.engines.weight_update_client import UpdateReport
from open_instruct.learners.logprobs import LogProbModel
from open_instruct.learners.weight_link import LinkOptions, WeightLink
from open_instruct.learners.weight_sync import DeepSpeedWeightSource

CONFIG = SamplingConfig(max_tokens=24, n=4, seed=11)


class Learner:
    """One learner rank, in this process: a module, and its link to the engines."""

    def __init__(self, ray: Any, engines: list[Any], args: Any) -> None:
        from transformers import AutoModelForCausalLM

        from open_instruct.cluster import process_group

        self.ray, self.engines = ray, dict(enumerate(engines))
        self.module = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
        self.model = LogProbModel(self.module)
        self.source = DeepSpeedWeightSource(self.module, zero_stage=0)
        options = LinkOptions(args.vllm_tensor_parallel_size, 60.0, 60.0, process_group.free_address)
        self.link = WeightLink(self.source, args.device, rank=0, world_size=1, options=options)
        self.version = 0

    def connect(self, *numbers: int) -> dict[int, str]:
        return self.link.connect({number: self.engines[number] for number in numbers})

    def send(self) -> UpdateReport:
        """Weights of the next version, which differ from those before."""
        self.version += 1
        change(self.module, seed=self.version)
        return self.link.send(self.version)

    def sample(self, number: int, prompts: list[np.ndarray], config: SamplingConfig = CONFIG) -> list[GenerationResult]:
        answer = self.engines[number].generate_with_single_engine.remote(prompts, config)
        return self.ray.get(answer, timeout=TIMEOUT_S)

    def difference(self, number: int, prompts: list[np.ndarray], config: SamplingConfig = CONFIG) -> float:
        return self.difference_of(prompts, self.sample(number, prompts, config))

    def difference_of(self, prompts: list[np.ndarray], results: list[GenerationResult]) -> float:
        """The largest difference between an engine's log-probs and those of this learner's weights."""
        return largest_difference(SimpleNamespace(model=self.model), prompts, results, 1.0)  # type: ignore[arg-type]
