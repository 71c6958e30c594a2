"""A mixture of experts: a router sends every token to a few MLPs, and adds their results by weight.

    weights, chosen = route(x, layer.router, layer.router_bias, cfg)      # f[n k], i64[n k]
    y = mixture(x, layer, cfg)                                            # f[... d] -> f[... d]

Rows are sorted by expert, so that each expert's product is that of a run of rows (``fquant.grouped_linear``). Sizes do
not depend on the choice: a token takes ``k`` rows, none is dropped, and a step can be captured. A permutation brings
the results of a token together. They are added in the order of its choice, so that sums do not depend on the run.

*Routing*, from the scores of all experts to the weights of those chosen (``Config.routing``):

    softmax             probabilities of all experts in float32; those of the chosen, in x's dtype
    renormalised        the same, divided by their sum
    renormalised_wide   the same, and the weights stay in float32
    softmax_of_chosen   the softmax of the chosen scores, in x's dtype

Source: Shazeer et al. 2017; the families' modelling files in transformers 5. gpt-oss' experts clamp the gate from above
and up on both sides, and compute ``(up + 1) · gate · sigmoid(alpha · gate)``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from fquant.autodiff import to_front
from fquant.communication import LOCAL, Comm
from fquant.grouped_products import grouped_linear
from fquant.packed_linear import linear

from . import blocks
from .config import Config
from .reference_gradient import at_least_float32


def route(x: Tensor, router: Any, bias: Tensor | None, cfg: Config) -> tuple[Tensor, Tensor]:
    """Return the weights f[n k] and the indices i64[n k] of the experts of each row of x f[n d], the best first.

    ``router`` is [experts d], and ``bias`` [experts].
    """
    scores = linear(x, router, bias)  # [n experts]
    if cfg.routing == "softmax_of_chosen":
        top, chosen = scores.topk(cfg.experts_per_token, -1)
        return top.softmax(-1), chosen
    top, chosen = at_least_float32(scores).softmax(-1).topk(cfg.experts_per_token, -1)
    if cfg.routing != "softmax":
        top = top / top.sum(-1, keepdim=True)
    return top if cfg.routing == "renormalised_wide" else top.to(x.dtype), chosen


def mixture(x: Tensor, layer: Any, cfg: Config) -> Tensor:
    """Compute the MLP of a layer with experts for x f[... d]: the sum of those that the router chooses, by weight.

    The layer has ``router`` [experts d], ``gate_up`` [experts 2·f d] and ``down`` [experts d f]. Each is a Tensor, a
    Packed or an Adapted. Biases may be absent: ``router_bias``, ``gate_up_bias`` [experts 2·f], ``down_bias``.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # [n d]
    weights, chosen = route(rows, layer.router, layer.router_bias, cfg)
    order = chosen.flatten().argsort(stable=True)  # [n·k], the places in `chosen`, sorted by expert
    inverse, counts = order.argsort(), _counts(chosen, cfg.num_experts)
    y = _permuted(repeat(rows, "n d -> (n k) d", k=cfg.experts_per_token), order, inverse)
    y = grouped_linear(y, layer.gate_up, counts, layer.gate_up_bias)
    y = grouped_linear(_activation(y, cfg), layer.down, counts, layer.down_bias)
    y = rearrange(_permuted(y, inverse, order), "(n k) d -> n k d", k=cfg.experts_per_token)
    return (y * weights[..., None]).sum(-2).to(x.dtype).reshape(x.shape)


def load_balancing_loss(
    scores: Sequence[Tensor], experts_per_token: int, mask: Tensor | None = None, comm: Comm = LOCAL
) -> Tensor:
    """Compute the auxiliary loss of routers, a scalar of at least k if their probabilities are those of their choices.

    ``scores`` f[n experts] are those of the routers of all layers for the same n tokens; ``mask`` [n], or [b t] of n
    tokens in all, is 0 for tokens that do not count. The loss is ``experts · Σ f_e · P_e``: f_e is the mean number of
    choices of expert e by a token of a layer, P_e its mean probability. Gradients pass through P alone. On a mesh
    ``comm`` gives f_e and the number of tokens of all ranks, so that the losses of ranks add up to the whole. The loss
    of no tokens is 0.

    Source: equations 4 to 6 of Switch Transformers, Fedus et al. 2021; ``load_balancing_loss_func`` of transformers.
    """
    every = torch.cat([at_least_float32(t) for t in scores])  # [layers·n experts]
    probabilities = every.softmax(-1)
    chosen = probabilities.topk(experts_per_token, -1).indices
    counted = torch.ones_like(probabilities[:, 0])
    if mask is not None:
        counted = mask.reshape(-1).to(counted.dtype).repeat(len(scores))
    hits = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)  # an expert is chosen once by a token
    hits_of_all, of_all = comm.total(torch.cat([counted @ hits, counted.sum()[None]])).tensor_split([-1])
    of_all = torch.where(of_all == 0, 1, of_all)
    choices, mean = hits_of_all / of_all, (counted @ probabilities) / of_all
    return every.shape[-1] * (choices * mean).sum()


def _counts(chosen: Tensor, num_experts: int) -> Tensor:
    """Count the rows i64[experts] of each expert."""
    flat = chosen.flatten()
    return flat.new_zeros(num_experts).scatter_add(0, flat, torch.ones_like(flat))


def _permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return ``x[order]``, whose gradient is ``g[inverse]``: torch would add into zeros, row by row."""
    return x[order] if torch.compiler.is_dynamo_compiling() else _Permuted.apply(x, order, inverse)


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return x[order]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        order, inverse = ctx.saved_tensors
        return _permuted(g, inverse, order), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        return _permuted(dx, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Tensor) -> Any:
        x, order, inverse = (to_front(t, dim, info.batch_size) for t, dim in zip(given, in_dims, strict=True))
        first = torch.arange(info.batch_size, device=order.device)[:, None] * order.shape[1]  # of each example's rows
        y = _permuted(x.flatten(0, 1), (order + first).flatten(), (inverse + first).flatten())
        return y.unflatten(0, x.shape[:2]), 0


def _activation(y: Tensor, cfg: Config) -> Tensor:
    """Combine gate and up: f[n 2·f] -> f[n f]."""
    gate, up = (y[..., 0::2], y[..., 1::2]) if cfg.interleaved else y.chunk(2, -1)
    if cfg.swiglu_limit is not None:
        gate, up = gate.clamp(max=cfg.swiglu_limit), up.clamp(-cfg.swiglu_limit, cfg.swiglu_limit)
        return (up + 1) * (gate * torch.sigmoid(gate * cfg.swiglu_alpha))
    return blocks.swiglu(gate, up) if cfg.activation == "silu" else blocks.geglu(gate, up)
