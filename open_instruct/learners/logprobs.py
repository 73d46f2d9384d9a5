"""Log-probs of sampled tokens, and entropies. The full `[tokens, vocabulary]` logits never exist at once.

Shapes: B rows, T tokens, N tokens of all rows, L labels of each token, H hidden units, V vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from open_instruct.config.model_support import logits_scale_and_cap
from open_instruct.learners import attention
from open_instruct.learners.cpu_linear import product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from open_instruct.learners.sequence_parallel import SequenceParallel

CHUNK_ELEMENTS = 2**24
"""Most logits that exist at once: 64 MiB in float32, of which a step needs about three copies."""

# ------------------------------------------------------------------------------------------- log-probs in chunks


def chunked_log_probs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
    bias_V: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each label, and entropy of the distribution that the label was drawn from, `softmax(logits / temperature)`.

    `labels` are (N,) token ids, or (N, L) if several log-probs of each token are wanted. With `softcap` c the logits are first
    replaced by `c * tanh(logits / c)`.

    The logits of `chunk_elements // V` tokens (at least one) exist at a time, and the backward pass computes them again.
    Matrix products run in the dtype of the inputs, softmax and the sum of the weight's gradient in float32 or better.

    Returns:
        Log-probs, of the shape of `labels`, and (N,) entropies in nats. Both are differentiable once in `hidden_NH`, `weight_VH`
        and `bias_V`, and are float32, or float64 for inputs in float64.
    """
    rows_per_chunk = max(1, chunk_elements // weight_VH.shape[0])
    labels_NL = labels if labels.dim() == 2 else labels[:, None]
    logprobs_NL, entropy_N = _ChunkedLogProbs.apply(
        hidden_NH, weight_VH, bias_V, labels_NL, temperature, softcap, rows_per_chunk
    )
    return logprobs_NL.view(labels.shape), entropy_N


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_NL: torch.Tensor,
        temperature: float,
        softcap: float | None,
        rows_per_chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        label_logprobs_NL = hidden_NH.new_empty(labels_NL.shape, dtype=_softmax_dtype(hidden_NH))
        entropy_N = label_logprobs_NL.new_empty(len(labels_NL))
        for rows in _chunks(len(labels_NL), rows_per_chunk):
            logits_CV = _logits(hidden_NH[rows], weight_VH, bias_V, softcap)
            logprobs_CV = F.log_softmax(logits_CV.div_(temperature), dim=-1)
            label_logprobs_NL[rows] = logprobs_CV.gather(1, labels_NL[rows])
            entropy_N[rows] = -torch.linalg.vecdot(logprobs_CV.exp(), logprobs_CV)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_NL, entropy_N)
        ctx.temperature, ctx.softcap, ctx.rows_per_chunk = temperature, softcap, rows_per_chunk
        ctx.set_materialize_grads(False)  # the gradient of a result that is not used costs nothing
        return label_logprobs_NL, entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]  # the decorator hides the name of `ctx`
        ctx: Any, *grad_outputs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        grad_logprobs_NL, grad_entropy_N = grad_outputs
        hidden_NH, weight_VH, bias_V, labels_NL, entropy_N = ctx.saved_tensors
        if grad_logprobs_NL is None:
            grad_logprobs_NL = entropy_N.new_zeros(labels_NL.shape)
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=_softmax_dtype(weight_VH)) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=_softmax_dtype(bias_V)) if wants_bias else None
        for rows in _chunks(len(labels_NL), ctx.rows_per_chunk):
            logits_CV = _logits(hidden_NH[rows], weight_VH, bias_V, ctx.softcap)
            slope_CV = None if ctx.softcap is None else 1 - (logits_CV / ctx.softcap).square_()
            logprobs_CV = F.log_softmax(logits_CV.div_(ctx.temperature), dim=-1)
            entropy_term_CV = None
            if grad_entropy_N is not None:  # d entropy / d logit[v] = -p[v] (log p[v] + entropy) / temperature
                grad_C1 = grad_entropy_N[rows, None] / ctx.temperature
                entropy_term_CV = (logprobs_CV + entropy_N[rows, None]) * logprobs_CV.exp() * -grad_C1
            # d logprob[label] / d logit[v] = (1[v == label] - p[v]) / temperature
            grad_CL = grad_logprobs_NL[rows] / ctx.temperature
            grad_logits_CV = logprobs_CV.exp_().mul_(-grad_CL.sum(1, keepdim=True))
            grad_logits_CV.scatter_add_(1, labels_NL[rows], grad_CL)
            if entropy_term_CV is not None:
                grad_logits_CV += entropy_term_CV
            if slope_CV is not None:  # d(c * tanh(x / c)) / dx = 1 - tanh(x / c)^2
                grad_logits_CV *= slope_CV
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0)
            grad_logits_CV = grad_logits_CV.to(hidden_NH.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[rows] = product(grad_logits_CV, weight_VH.T)
            if grad_weight_VH is not None:
                grad_weight_VH += product(grad_logits_CV.T, hidden_NH[rows].T)
        return (
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    """(C, V) logits of one chunk, before they are divided by the temperature."""
    # Not F.linear: under ZeRO-3 DeepSpeed replaces it by an autograd function of its own.
    logits_CV = product(hidden_CH, weight_VH).to(_softmax_dtype(hidden_CH))
    if bias_V is not None:
        logits_CV += bias_V
    return logits_CV if softcap is None else logits_CV.div_(softcap).tanh_().mul_(softcap)


def _softmax_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]


class LogProbModel(torch.nn.Module):
    """A Hugging Face causal language model that returns log-probs instead of logits.

    DeepSpeed wraps this module, because ZeRO has to see that a `forward` uses the head's weight.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
        attn_implementation: str | None = None,
        sequence_parallel: "SequenceParallel | None" = None,
    ) -> None:
        """
        Args:
            chunk_elements: most logits that exist at once.
            attn_implementation: as `--attn_implementation`; None is the attention that the model was loaded with. Ignored with
                `sequence_parallel`.
            sequence_parallel: divides the tokens of each row among ranks; all ranks of a group call the model with the same
                rows.
            model: a causal language model of transformers. Its logits must be its head applied to its last hidden state,
                possibly scaled by a constant or limited by a cap (`logits_scale_and_cap`).
        """
        super().__init__()
        self.model = model
        if sequence_parallel is None:
            self.attend_by(attn_implementation or model.config._attn_implementation)
        else:  # sequence parallelism exchanges tokens and heads around the attention
            self._attention = sequence_parallel.attention
        self._chunk_elements = chunk_elements
        self._sequence_parallel = sequence_parallel
        self._logits_scale, self._softcap = logits_scale_and_cap(model.config)

    def attend_by(self, attn_implementation: str) -> None:
        """Give the model the attention that `--attn_implementation` names."""
        self._attention = attention.register(attn_implementation)
        self.model.set_attn_implementation(self._attention)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        temperature: float,
        other_ids: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
        branches: torch.Tensor | None = None,
        predictors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs of tokens 1..T-1, each given the earlier tokens of its sequence.

        Mostly no attention mask is needed: padding is on the right, where causal attention cannot see it, and `position_ids`
        separate the sequences that share a row, because they start again at 0 with each sequence.

        Args:
            input_ids: (B, T) token ids.
            position_ids: (B, T), from 0 in each sequence.
            temperature: divides the logits; the temperature that the tokens were sampled at.
            other_ids: (B, T, K) further tokens whose log-probs are wanted in the place of each token; None is K = 0.
            token_mask: (B, T) bool: the tokens whose log-probs are computed; the head and its softmax run only over these. None
                is all tokens.
            segments, branches, predictors: (B, T), as in `CollatedBatchData` where responses share a prompt; else None.

        Returns:
            (B, T-1) log-probs, (B, T-1) entropies and (B, T-1, K) log-probs of `other_ids`, as `chunked_log_probs` gives them;
            entry `t` belongs to token `t + 1`. The entry is 0 where that token is not wanted, and has no meaning where that token
            is padding or begins a sequence.
        """
        arguments, own_columns = self._inputs(input_ids, position_ids, segments, branches)
        labels_BTL = _labels(input_ids, other_ids)
        is_wanted_BT = (
            torch.ones_like(labels_BTL[..., 0], dtype=torch.bool) if token_mask is None else token_mask[:, 1:]
        )
        # Done before the layers: to learn the number of wanted entries, the program waits for all work queued on the GPU.
        rows, columns, predicting = _wanted_in(own_columns, is_wanted_BT, predictors)
        hidden_BTH = self.model.base_model(use_cache=False, **arguments).last_hidden_state
        head = self.model.get_output_embeddings()
        assert head is not None, f"{type(self.model).__name__} is no language model: it has no head"
        # ZeRO-3 gathers a partitioned weight when a forward reads it. It is read once for all chunks, because ranks whose batches
        # differ in length must take part in the same number of gathers.
        weight_VH, bias_V = head.weight, head.bias
        logprobs_NL, entropy_N = chunked_log_probs(
            _states_at(hidden_BTH, rows, predicting),
            weight_VH,
            labels_BTL[rows, columns],
            temperature=temperature / self._logits_scale,  # scaled logits are logits at another temperature
            chunk_elements=self._chunk_elements,
            bias_V=bias_V,
            softcap=self._softcap,
        )
        logprobs_BTL = logprobs_NL.new_zeros(labels_BTL.shape).index_put((rows, columns), logprobs_NL)
        entropy_BT = entropy_N.new_zeros(is_wanted_BT.shape).index_put((rows, columns), entropy_N)
        if self._sequence_parallel is not None:
            together = self._sequence_parallel.put_together(torch.cat([logprobs_BTL, entropy_BT[..., None]], dim=2))
            logprobs_BTL, entropy_BT = together[..., :-1], together[..., -1]
        return logprobs_BTL[..., 0], entropy_BT, logprobs_BTL[..., 1:]

    def _inputs(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        segments: torch.Tensor | None,
        branches: torch.Tensor | None,
    ) -> tuple[dict[str, Any], range]:
        """The arguments of the layers, and the columns that this rank computes."""
        columns, attention_mask, further = range(input_ids.shape[1]), None, {}
        num_columns = len(columns)
        if self._sequence_parallel is not None:
            num_columns = self._sequence_parallel.num_columns(num_columns)
        parts = attention.find_parts(self._attention, position_ids, segments, branches, num_columns=num_columns)
        if parts is not None:
            further = {"parts": parts}
            attention_mask = position_ids.new_ones((1, 1, 1, 1), dtype=torch.bool)  # or Transformers would make one
        if self._sequence_parallel is not None:
            sliced = self._sequence_parallel.slice_inputs(input_ids, position_ids, attention_mask)
            input_ids, position_ids, attention_mask, columns = sliced
        arguments = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        return arguments | further, columns


def _states_at(hidden_BTH: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """(N, H): the states at these rows and columns. A state after which several responses begin occurs several times.

    This is a table lookup, because its backward pass always adds up in the same order. The backward pass of indexing does not,
    on several cores.
    """
    return F.embedding(rows * hidden_BTH.shape[1] + columns, hidden_BTH.flatten(0, 1))


def _labels(input_ids: torch.Tensor, other_ids: torch.Tensor | None) -> torch.Tensor:
    """(B, T - 1, 1 + K): each token from the second on, then the `other_ids` in its place."""
    labels_BTL = input_ids[:, 1:, None].long()
    return labels_BTL if other_ids is None else torch.cat([labels_BTL, other_ids[:, 1:].long()], dim=2)


def _wanted_in(
    own_columns: range, is_wanted_BT: torch.Tensor, predictors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and columns of the wanted entries whose predecessors are in `own_columns`, and the predecessors' positions there."""
    rows, columns = is_wanted_BT.nonzero(as_tuple=True)
    predicting = columns if predictors is None else predictors[rows, columns + 1].long()
    is_own = (predicting >= own_columns.start) & (predicting < own_columns.stop)
    return rows[is_own], columns[is_own], predicting[is_own] - own_columns.start


# ------------------------------------------------------------------------------------------- plain formulas


def log_softmax_and_gather(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Log-prob of each index, (...), from logits, (..., V). Holds all logits: for small vocabularies and for tests."""
    return logits.log_softmax(dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats, (...), of softmax(logits), (..., V)."""
    return torch.logsumexp(logits, dim=-1) - torch.linalg.vecdot(logits.softmax(dim=-1), logits)
