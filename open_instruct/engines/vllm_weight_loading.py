"""Loads new weights into a vLLM model, with an account of every tensor; imported inside engines only.

vLLM's loaders silently skip a tensor whose name they do not know, and silently leave a parameter as it was if no tensor filled
it. Therefore the first update of an engine is watched: if a tensor was sent and never copied anywhere, or a parameter got
nothing, the update fails with the names. Later updates are not watched, because their names are the same.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from open_instruct.cluster.failures import DO_NOT_FIT

MAX_NAMES = 4
"""Most names in one message."""


class WeightsDoNotFit(RuntimeError):
    """Tensors of the learner and parameters of the engine do not match. Another attempt would fail in the same way."""


def begin_reload(model: torch.nn.Module) -> None:
    """Open the model for `model.load_weights`. Its tensors are meta tensors until `finish_reload`."""
    _forget_kernels_of_packed_experts(model)
    initialize_layerwise_reload(model)
    if not hasattr(model, "_is_known_to_fit"):
        model._load_account = LoadAccount(model)  # type: ignore[assignment]
        model.load_weights = model._load_account.load_weights  # type: ignore[assignment]


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Swap the loaded weights in. Raises `WeightsDoNotFit` with the names that are missing on either side."""
    account = _stop_watching(model)
    finalize_layerwise_reload(model, model_config)
    repack_tied_lm_head(model)
    if account is not None:
        account.check()
        model._is_known_to_fit = True  # type: ignore[assignment]


def abandon_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Make the model loadable again after a reload that broke off, whether or not some of its weights had arrived.

    Layers that had received nothing have their old weights afterwards. Other layers may be incomplete, so a whole reload has to
    follow.
    """
    _stop_watching(model)
    finalize_layerwise_reload(model, model_config)
    repack_tied_lm_head(model)


def _stop_watching(model: torch.nn.Module) -> "LoadAccount | None":
    account = model.__dict__.pop("_load_account", None)
    model.__dict__.pop("load_weights", None)
    if account is not None:
        account.close()
    return account


def repack_tied_lm_head(model: torch.nn.Module) -> None:
    """Pack a tied output head again after its embedding was loaded.

    For vLLM 0.32 on CPU: the head keeps a packed copy of the tied embedding, and layerwise reload does not renew this copy.
    Without this function log-probs are off by up to 2, and no error is raised. `tests/learners/test_weight_sync.py` compares
    engine and learner and notices.
    """
    lm_head = getattr(model, "lm_head", None)
    quant_method = getattr(lm_head, "quant_method", None)
    if quant_method is not None and model.config.tie_word_embeddings:  # type: ignore[union-attr]
        quant_method.process_weights_after_loading(lm_head)


def _forget_kernels_of_packed_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack the weights of experts again when they are loaded again.

    For vLLM 0.32 on CPU: the kernel of the experts reads weights in a packed layout, and only the first load packs them. A
    reload leaves plain weights, which the kernel takes for packed weights. Without this function log-probs are off by 0.2, and no
    error is raised. `tests/scenarios/test_model_families.py` compares engine and learner and notices.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(getattr(method, "unquantized_backend", None), "name", "") == "CPU":
            method.moe_kernel = None


def fingerprints(model: torch.nn.Module) -> dict[str, float]:
    """A checksum of each parameter, which changes when its values or their order change."""
    return {name: _fingerprint(parameter) for name, parameter in model.named_parameters()}


def _fingerprint(tensor: torch.Tensor) -> float:
    """Sum of fewer than 131,072 values, evenly spaced, each multiplied by a factor that depends on its position."""
    values = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // 2**16)].double()
    return float((values * (torch.arange(len(values), device=values.device) % 997 + 1)).sum())


class LoadAccount:
    """Which tensors were sent, which of them were copied somewhere, and which parameters were filled.

    A copy is traced back through whatever the loader did to the tensor before the copy (slices, transposes, other dtypes): the
    result of any operation on a tensor that was sent counts as part of that tensor.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._load = model.load_weights
        self._tensors: dict[int, torch.Tensor] = {}  # kept alive, so that no other tensor gets their ids
        self._names: dict[int, list[str]] = {}
        """Names of each parameter, by its id. Some have several names: GLM's and DeepSeek's routers share a bias with their
        experts."""
        for name, tensor in model.named_parameters(remove_duplicate=False):
            self._tensors[id(tensor)] = tensor
            self._names.setdefault(id(tensor), []).append(name)
        vocabularies = [module for module in model.modules() if hasattr(module, "num_embeddings_padded")]
        self._padded = {id(tensor) for module in vocabularies for tensor in module.parameters(recurse=False)}
        self._filled: set[int] = set()
        self._num_loaded: Counter[int] = Counter()
        self._expert_parts: dict[int, set[tuple[Any, Any]]] = defaultdict(set)
        """Pairs (expert, matrix) that were loaded, by id of the parameter that holds all experts of a layer."""
        self._trace = _Trace()
        self._get_numel_loaded: Callable = layerwise.get_numel_loaded
        layerwise.get_numel_loaded = self._note_filled  # vLLM 0.32: every load of a meta tensor passes here

    def close(self) -> None:
        layerwise.get_numel_loaded = self._get_numel_loaded

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        try:
            with self._trace:
                loaded = self._load(self._trace.watch(weights))  # type: ignore[operator]
        except (KeyError, ValueError) as error:  # how loaders report a name that they do not know
            raise WeightsDoNotFit(f"{DO_NOT_FIT} {type(self._model).__name__}: its loader says {error!r}") from error
        for tensor_id, names in self._names.items():
            if not self._tensors[tensor_id].is_meta and (loaded is None or set(names) & set(loaded)):
                self._filled.add(tensor_id)
        return loaded

    def _note_filled(self, loader: Callable, bound: Any) -> tuple[int, object]:
        num_elements, answer = self._get_numel_loaded(loader, bound)
        if num_elements:
            tensor_id, arguments = id(bound.arguments.get("param")), bound.arguments
            self._filled.add(tensor_id)
            self._num_loaded[tensor_id] += num_elements
            if isinstance(arguments.get("expert_id"), int):
                self._expert_parts[tensor_id].add((arguments["expert_id"], arguments.get("shard_id")))
        return num_elements, answer

    def check(self) -> None:
        unused = sorted(self._trace.unused())
        missing = [names[0] for tensor_id, names in self._names.items() if tensor_id not in self._filled]
        unfilled = sorted(name for name in missing if not self._is_tied(name))
        partly = sorted(names[0] for tensor_id, names in self._names.items() if self._is_partly_filled(tensor_id))
        parts = []
        if partly:
            parts.append(f"only a part was sent of the engine's {_some(partly)}")
        if unused:
            parts.append(f"the engine's model has no place for {_some(unused)}")
        if unfilled:
            parts.append(f"nothing was sent for the engine's {_some(unfilled)}")
        if parts:
            raise WeightsDoNotFit(
                f"{DO_NOT_FIT} {type(self._model).__name__}: {'; '.join(parts)}. The engine would sample from old weights, so "
                "the run ends. This family of models cannot be trained; docs/guides/models.md lists those that can."
            )

    def _is_partly_filled(self, tensor_id: int) -> bool:
        """Parameters of experts are counted by expert instead of by element, because their tensors may be padded. Embeddings may
        be padded too, so they are not checked."""
        tensor, parts = self._tensors[tensor_id], self._expert_parts.get(tensor_id)
        if parts is not None:
            experts = {expert for expert, _ in parts}
            return len(parts) < (max(experts) + 1) * len({shard for _, shard in parts})
        if tensor_id not in self._filled or not tensor.is_meta or tensor_id in self._padded:
            return False
        return self._num_loaded[tensor_id] < getattr(tensor, "weight_loader_numel", tensor.numel())

    def _is_tied(self, name: str) -> bool:
        config = getattr(self._model, "config", None)
        return bool(getattr(config, "tie_word_embeddings", False)) and name.split(".")[-2:] == ["lm_head", "weight"]


class _Trace(TorchDispatchMode):
    """Identifies tensors by their memory addresses."""

    def __init__(self) -> None:
        super().__init__()
        self._unused: set[str] = set()
        self._starts: list[int] = []
        self._ends_and_names: list[tuple[int, str]] = []
        self._derived: dict[int, str] = {}
        """For each tensor that was computed from a sent tensor: the sent tensor's name, by the computed tensor's address."""

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if tensor.numel():
                self._unused.add(name)
                self._note(name, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            yield name, tensor

    def _note(self, name: str, start: int, end: int) -> None:
        """Note the memory of a tensor. Tensors that were noted in this memory before no longer exist, because buckets are freed
        and their memory is used again."""
        at = bisect.bisect_left(self._starts, start)
        if at and self._ends_and_names[at - 1][0] > start:
            at -= 1
        while at < len(self._starts) and self._starts[at] < end:
            del self._starts[at], self._ends_and_names[at]
        self._starts.insert(at, start)
        self._ends_and_names.insert(at, (end, name))

    def unused(self) -> set[str]:
        return self._unused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = {name for arg in _tensors(args) if (name := self._name_of(arg)) is not None}
        if not names:
            return result
        if func is torch.ops.aten.copy_.default:
            self._unused.discard(self._name_of(args[1]) or "")
        elif isinstance(result, torch.Tensor) and not result.is_meta and self._name_of(result) is None:
            self._derived[result.data_ptr()] = sorted(names)[0]
        return result

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        if tensor.is_meta or not tensor.numel():
            return None
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0 and address < self._ends_and_names[at][0]:
            return self._ends_and_names[at][1]
        return self._derived.get(tensor.untyped_storage().data_ptr())


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest
