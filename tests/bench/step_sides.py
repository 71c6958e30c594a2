"""The contestants of the comparison of QLoRA steps, and one step of each.

    take = SIDES["fquant"].make(shape)              # in a process of its own: quantise, attach adapters
    value = take()                                  # one step: loss, gradients, AdamW

All train rank-r adapters of the seven linears of a Llama in bf16 beside a frozen base, with AdamW, on the same random
tokens. fquant is the step of examples.qlora, captured: a base in NF4_DQ, adapters kept in f32 and used in bf16. "eager"
is the same function without capture, and "remat" recomputes blocks. "dense", "bnb" and "torchao" are transformers with
PEFT, over dense weights, bitsandbytes' Linear4bit with double quantisation, and torchao's NF4Tensor. PEFT keeps
adapters in f32 and computes with them in f32. "limit" is the matrix products of such a step, those of adapters
included, and its attention, alone: products as torch has them of dense weights, and our attention, or torch's.

On several processes each has its share of the batch. fquant is sharded (fsdp) or replicated (dp). The peers are wrapped
as their documentation says, in FSDP2 (a group for each decoder layer) or DDP. The limit on two sends nothing.

The dtype is that of the residual stream, and of the weights of the peers and of the limit. fquant's embedding and head
stay in bf16, and are cast where they are used.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shard
from examples.common import training_step
from examples.common.command_line import pattern
from examples.common.training_step import Checkpoint, Setup
from examples.data import dataset as data
from fquant import NF4_DQ, cost, jit, lora, optim, quantize, tree
from models import decoder
from models.attention import attention
from models.config import Config
from tests.bench import peers, timing

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # the linears of a Llama, by our names
Take = Callable[[], float]


@dataclass(frozen=True)
class Shape:
    """The model to train, and the tokens of a step on all processes."""

    layers: int = 8
    dim: int = 1024
    hidden: int = 2816
    vocab: int = 32000
    heads: int = 16
    kv_heads: int = 8
    batch: int = 4
    seq: int = 256
    rank: int = 16

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    def config(self) -> Config:
        """The Llama."""
        head = self.dim // self.heads
        sizes = (self.vocab, self.dim, self.layers, self.heads, self.kv_heads, head, self.hidden)
        return Config(*sizes, max_positions=max(2048, self.seq))

    def sample(self, rank: int = 0, world: int = 1) -> Tensor:
        """Return this rank's token sequences, int64 [b t + 1], the same for every contestant."""
        tokens = torch.randint(0, self.vocab, (self.batch, self.seq + 1), generator=torch.Generator().manual_seed(0))
        return tokens.tensor_split(world)[rank]


class Side(NamedTuple):
    """A contestant: its processes, what makes its step on one of them from a Shape and ``dtype``, and whose it is."""

    ranks: int
    make: Callable[..., Take]
    is_ours: bool = False


def ours(
    shape: Shape, checkpoint: Checkpoint = "selective", captured: bool = True, ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16, options: Mapping[str, Any] | None = None, **axes: int,
) -> "Ours":  # fmt: skip
    """Make fquant's step on the ranks of a mesh: the one that examples.qlora runs and examples.plan prices.

    The bounds of the comparison are those of sums in the order of the mesh; ``ordered`` adds rows up in one order.
    ``options`` are those of ``jit`` beside the step's own.
    """
    mesh, rules, cfg = shard.mesh(**(axes or {"fsdp": 1})), shard.Rules(), shape.config()
    base = weights(shape)
    adapters = lora.init(base, pattern(TARGETS), shape.rank, shape.rank, key=0)
    base, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
    most = shard.max_local_rows(shape.batch, mesh, rules)
    setup = Setup(
        cfg, mesh, OPT, optim.constant(1e-4), most, shape.seq, checkpoint, dtype,
        ordered=shape.batch if ordered else None,
    )  # fmt: skip
    tokens = shape.sample(dist.get_rank(), dist.get_world_size())
    rows = data.Rows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    rest = shard.local(base), ((rows, None),), torch.tensor(shape.tokens), setup
    step = training_step.train_step
    step = jit(step, **(setup.capture() | dict(options or {}))) if captured else step
    return Ours(step, training_step.initial(adapters, OPT), rest)


OPT = optim.adamw(1e-4)


def weights(shape: Shape) -> Any:
    """Return a base in NF4_DQ, made a weight at a time."""
    meta = decoder.shapes(shape.config(), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def leaf(path: str, like: Tensor) -> Any:
        dense = torch.randn(like.shape, generator=generator).mul_(0.02).to(like.dtype)
        if like.ndim == 1:
            return torch.ones_like(dense)
        return quantize(dense, NF4_DQ) if path.split(".")[-1] in TARGETS else dense

    return tree.map_with_path(leaf, meta)


class Ours:
    """A step of fquant, and its predicted cost."""

    def __init__(self, step: Any, state: Any, rest: tuple[Any, ...]) -> None:
        self.step, self.state, self.rest, self.setup = step, state, rest, rest[-1]

    def __call__(self) -> float:
        self.state, measured = self.step(self.state, *self.rest)
        return float(measured.loss)

    def facts(self) -> dict[str, int]:
        """Return bytes at the peak beside the arguments and bytes sent, predicted and measured."""
        if not hasattr(self.step, "traced"):
            return {}
        found = cost(training_step.train_step, self.state, *self.rest, **self.setup.capture())
        with shard.traffic() as traffic:
            self()
        planned = sum(captured.placed.nbytes for captured in self.step.traced.values() if captured.placed)
        return {
            "predicted": found.peak - found.arguments + found.scratch,
            "measured": planned + timing.extra_bytes(self),
            "sent predicted": sum(c.sent for c in found.collectives),
            "sent": traffic.sent,
            "nodes": found.nodes,
            "flops": found.flops,
        }


def peer(shape: Shape, kind: str, wrapped: str = "", dtype: torch.dtype = torch.bfloat16) -> Take:
    """transformers and PEFT, over a base of this kind, wrapped for several processes."""
    warnings.filterwarnings("ignore")
    with peers.quiet():
        import peft
        import transformers

    torch.manual_seed(0)
    names = {
        "hidden_size": shape.dim, "num_hidden_layers": shape.layers, "intermediate_size": shape.hidden,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab,
        "tie_word_embeddings": False, "attn_implementation": "sdpa",
    }  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**names)).to(dtype)
    if kind != "dense":
        quantise = _torchao() if kind == "torchao" else _bitsandbytes(dtype)
        for module in list(model.model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, quantise(child))
    modules = [f"{name}_proj" for name in TARGETS]
    given = peft.LoraConfig(r=shape.rank, lora_alpha=shape.rank, lora_dropout=0.0, target_modules=modules)
    model = peft.get_peft_model(model, given)
    if wrapped == "fsdp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.base_model.model.model.layers:
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    elif wrapped == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    model.train()
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ranks = (dist.get_rank(), dist.get_world_size()) if wrapped else (0, 1)
    tokens = shape.sample(*ranks)[:, :-1].contiguous()

    def take() -> float:
        value = model(input_ids=tokens, labels=tokens).loss
        value.backward()
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(value)

    return take


def _bitsandbytes(dtype: torch.dtype) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    import bitsandbytes as bnb

    def quantise(linear: torch.nn.Linear) -> torch.nn.Module:
        options: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": True}
        sizes = linear.in_features, linear.out_features
        out = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=dtype, **options)
        out.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **options)
        return out.to("cpu")

    return quantise


def _torchao() -> Callable[[torch.nn.Linear], torch.nn.Module]:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Linear(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return linear_nf4(x, self.weight)

    def quantise(linear: torch.nn.Linear) -> torch.nn.Module:
        linear.weight = torch.nn.Parameter(to_nf4(linear.weight.data, 64, 256), requires_grad=False)
        linear.__class__ = Linear
        return linear

    return quantise


def limit(shape: Shape, mix: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> Take:
    """The products and attentions of a rank's share of a step, on dense weights, one after another, nothing else."""
    if dist.is_initialized():
        shape = replace(shape, batch=len(shape.sample(dist.get_rank(), dist.get_world_size())))
    head, kv = shape.dim // shape.heads, shape.dim // shape.heads * shape.kv_heads
    sizes = [(shape.dim, shape.dim), (kv, shape.dim), (kv, shape.dim), (shape.dim, shape.dim)]
    sizes += [(shape.hidden, shape.dim), (shape.hidden, shape.dim), (shape.dim, shape.hidden)]
    normal = partial(torch.randn, dtype=dtype)
    rows = {width: normal(shape.tokens, width) for width in {size for pair in sizes for size in pair}}
    layers = [[(normal(*pair), normal(shape.rank, pair[1]), normal(pair[0], shape.rank)) for pair in sizes]]
    layers += [[tuple(t.clone() for t in three) for three in layers[0]] for _ in range(shape.layers - 1)]
    vocab = normal(shape.vocab, shape.dim)
    heads = shape.heads, shape.kv_heads, shape.kv_heads
    mixed = [normal(shape.batch, shape.seq, h, head).requires_grad_() for h in heads]

    def take() -> float:
        for layer in layers:
            for w, a, b in layer:
                x, g = rows[w.shape[1]], rows[w.shape[0]]
                _ = x @ w.mT, g @ w
                low, back = x @ a.mT, g @ b
                _ = low @ b.mT, back @ a, back.mT @ x, g.mT @ low
            y = mix(*mixed)
            torch.autograd.grad(y, mixed, y.detach())
        x = rows[shape.dim]
        for some in x.split(256):
            _ = (some @ vocab.mT) @ vocab
        return 0.0

    return take


def _sdpa(*heads: Tensor) -> Tensor:
    """torch's fused attention, of tokens first."""
    q, k, v = (t.transpose(1, 2) for t in heads)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


SIDES = {
    "fquant": Side(1, ours, True),
    "fquant remat": Side(1, partial(ours, checkpoint="full"), True),
    "fquant eager": Side(1, partial(ours, captured=False), True),
    "dense": Side(1, partial(peer, kind="dense")),
    "bnb": Side(1, partial(peer, kind="bnb")),
    "torchao": Side(1, partial(peer, kind="torchao")),
    "limit": Side(1, partial(limit, mix=attention)),
    "limit, torch's attention": Side(1, partial(limit, mix=_sdpa)),
    "fquant fsdp=2": Side(2, partial(ours, fsdp=2), True),
    "fquant dp=2": Side(2, partial(ours, dp=2), True),
    "limit on two": Side(2, partial(limit, mix=attention)),
    "dense fsdp=2": Side(2, partial(peer, kind="dense", wrapped="fsdp")),
    "torchao fsdp=2": Side(2, partial(peer, kind="torchao", wrapped="fsdp")),
    "bnb ddp=2": Side(2, partial(peer, kind="bnb", wrapped="ddp")),
}
