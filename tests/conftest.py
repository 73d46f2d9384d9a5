"""Real parts, started once for a whole session: Ray, engines, tiny models."""

import ctypes
import functools
import gc
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

# How long an example takes is the machine's, which may be busy.
settings.register_profile("at any load", parent=settings.default, deadline=None)
settings.load_profile("at any load")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000  # of linux/sched.h and linux/mount.h
TINY_MODEL = Path(__file__).parents[1] / "assets" / "tiny_model"
_ENGINES, _LEARNERS = "shared engines", "shared learners"
_LONGEST_S = {
    "test_example_runs": 157,
    "test_cells_of_all_users": 150,
    "test_conversation_runs": 165,
    "test_teacher_runs": 105,
    "test_grpo_fast": 229,
    "test_on_policy": 120,
    "test_rc_training": 76,
    "test_model_families": 73,
    "test_gpu_transports": 75,
    "test_async_training": 48,
    "test_step_breakdown": 120,
    "test_placement_group": 85,
    "test_compiled_layers": 82,
    "test_notebook": 80,
    "test_commands_of_pages": 68,
    "test_code_verifiers": 53,
    "test_rc_actor": 50,
    "test_math_pairs": 49,
    "test_state_offload": 47,
    "test_dry_run": 47,
    "test_will_it_fit": 46,
    "test_core_failure": 34,
    "test_engine_sleep": 30,
    "test_extensions": 30,
    "test_teacher_engine": 28,
    "test_clusters": 26,
    "test_ray_security": 24,
    "test_with_judge": 22,
    "test_other_pythons": 20,
}
"""Seconds of the files that take longest, core and extended: for the order in which lanes take them."""
MAX_MODEL_LEN = 128
TIMEOUT_S = 120.0


def pytest_configure(config: pytest.Config) -> None:
    """A lane of pytest-xdist gets a /dev/shm of its own, in which only its own tests can leave something behind."""
    if not hasattr(config, "workerinput"):
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def succeed(status: int) -> None:
        if status != 0:
            pytest.exit(
                f"no /dev/shm of its own for this lane: {os.strerror(ctypes.get_errno())}. Run with TEST_LANES=1."
            )

    succeed(libc.unshare(CLONE_NEWNS))
    succeed(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    succeed(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None))


@pytest.hookimpl(optionalhook=True)  # other Pythons run some tests without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What a lane runs as a whole: all files whose tests share the engines, or processes of learners, or any other file."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return shared_by(config.rootpath / file) or file

    return Lanes(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where extended or slow tests alone are asked for, a file without any is not imported: 22 CPU seconds for all files."""
    if collection_path.suffix != ".py":
        return None
    return None if all(_names(collection_path, mark) for mark in _needed_marks(config)) else True


@functools.cache
def _names(path: Path, mark: str) -> bool:
    return f"mark.{mark}" in path.read_text()


def _needed_marks(config: pytest.Config) -> set[str]:
    """Which of the two marks a test must have to be chosen."""
    expression = str(config.option.markexpr)
    return set() if " or " in expression else {"extended", "slow"} & set(expression.split(" and "))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A mark stands in the file of its test. In lanes what takes longest comes first, so that they end at about the same time."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & {"extended", "slow"}
        assert all(_names(item.path, mark) for mark in marks), f"{item.path}: write mark.{marks} there"
    if "PYTEST_XDIST_WORKER" in os.environ:
        order = [_ENGINES, _LEARNERS, ""]
        items.sort(key=lambda item: (order.index(shared_by(item.path)), -_LONGEST_S.get(item.path.stem, 0)))


def pytest_collection_finish() -> None:
    """What was collected stays to the end, so Python's collector need not look at it again."""
    gc.collect()
    gc.freeze()


@functools.cache
def shared_by(path: Path) -> str:
    """What the tests of a file share with those of other files: the session's engines, processes of learners, or nothing."""
    text = path.read_text()
    if re.search(r"\bengines: SimpleNamespace", text):
        return _ENGINES
    has_learners = r"^from (learner_group import .*\bLearners|ranks import .*\bstarted_ranks)\b"
    return _LEARNERS if re.search(has_learners, text, re.MULTILINE) else ""


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """A run sends its log to its own directory; after the test the log is as before."""
    root, ours = logging.getLogger(), logging.getLogger("open_instruct")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def make_args(**options: Any) -> Any:
    """Options of a small run."""
    from open_instruct.config.grpo_config import GRPOConfig

    small: dict[str, Any] = {
        "model_name_or_path": str(TINY_MODEL),
        "num_unique_prompts_rollout": 4,
        "num_samples_per_prompt_rollout": 4,
        "response_length": 32,
        "max_prompt_token_length": 64,
        "pack_length": 512,
        "total_episodes": 64,
        "beta": 0.0,
        "load_ref_policy": False,
        "vllm_enforce_eager": True,
        "record": False,
        "seed": 1,
    }
    return GRPOConfig(**{**small, **options})


@pytest.fixture(scope="session")
def tied_model() -> str:
    """The tiny model: its output head is its embedding."""
    return str(TINY_MODEL)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture with a head of its own, randomly initialised."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path_factory.mktemp("untied_model")
    config = AutoConfig.from_pretrained(TINY_MODEL)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    import ray

    from open_instruct.run.ray_session import ray_cluster

    with ray_cluster() as signals:
        signals.remove()  # pytest keeps Ctrl-C
        yield ray


@pytest.fixture(scope="module", autouse=True)
def _no_learner_idles_beside_other_files(request: pytest.FixtureRequest) -> None:
    """Processes of learners that serve several tests (`fakes/learner_group.py`, `fakes/ranks.py`) end before a file that has no
    use for them."""
    if shared_by(request.path) == _LEARNERS:
        return
    if "learner_group" in sys.modules:
        sys.modules["learner_group"].end_idle_learners()
    if "ranks" in sys.modules:
        sys.modules["ranks"].end_idle_ranks()


@pytest.fixture(scope="session")
def engines(ray_session: Any, tied_model: str) -> Iterator[SimpleNamespace]:
    """Two engines that share two queues and serve them."""
    from open_instruct.run import rollout_manager

    args = make_args(vllm_num_engines=2, model_name_or_path=tied_model)
    queues = rollout_manager.create_queues(args)
    actors = rollout_manager.create_rollout_engines(args, None, queues=queues, max_model_len=MAX_MODEL_LEN)
    ray_session.get([actor.ready.remote() for actor in actors], timeout=TIMEOUT_S)
    futures = [actor.process_queue_continuously.remote() for actor in actors]
    yield SimpleNamespace(actors=actors, param_prompt_Q=queues[0], inference_results_Q=queues[1], futures=futures)
    ray_session.get([actor.stop.remote() for actor in actors], timeout=TIMEOUT_S)
    ray_session.get(futures, timeout=TIMEOUT_S)
    for actor in actors:
        ray_session.kill(actor)


@pytest.fixture(scope="session")
def prompts(tied_model: str) -> list[np.ndarray]:
    """Token ids of a few prompts of different lengths."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tied_model)
    questions = [f"State the final answer to the following arithmetic problem: {n} + {7 * n} =" for n in range(1, 13)]
    return [
        np.array(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
            ),
            dtype=np.int32,
        )
        for q in questions
    ]
