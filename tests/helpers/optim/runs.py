"""Parameters, gradients and runs of optimisers: those of ours, and those that follow torch's interface."""

import torch

from fquant import optim, random, tree


def normal(name, shape, size, dtype=torch.float32, seed=0):
    """Draw numbers of a standard deviation ``size``."""
    return random.normal(random.fold(random.key(seed), name), shape, dtype) * size


def leaf(shape=(100, 333), dtype=torch.float32, steps=50):
    """Return a tree of one parameter, and a gradient for each step."""
    return {"w": normal("w", shape, 0.1, dtype)}, [{"w": normal(f"g{i}", shape, 0.01, dtype)} for i in range(steps)]


def ours(opt, params, gradients, key=None):
    """Return the parameters and the state after all gradients."""
    state = opt.init(params)
    for i, grads in enumerate(gradients):
        params, state = optim.step(opt, grads, state, params, None if key is None else random.fold(key, i))
    return params, state


def theirs(make, params, gradients):
    """Return the parameters of a torch.optim.Optimizer after all gradients, and the optimiser."""
    leaves = [torch.nn.Parameter(p.clone()) for p in tree.leaves(params)]
    peer = make(leaves)
    for grads in gradients:
        for p, g in zip(leaves, tree.leaves(grads), strict=True):
            p.grad = g.clone()
        peer.step()
    return tree.unflatten(tree.structure(params), [p.detach() for p in leaves]), peer
