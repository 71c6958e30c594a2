"""Moments in the host's memory: the bits of a step with moments on the device, copies in order, and little memory."""

import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, jvp, vmap

import shard
from fquant import device, jit, optim, tree
from fquant.communication import BESIDE_PARAMETERS
from fquant.compile import graph, liveness
from fquant.compile.cost import of
from fquant.compile.cuda_graph import recordings
from fquant.compile.cuda_graph.host_synchronisation import describe, synchronises
from fquant.io import safetensors
from models import decoder
from shard import PINNED, optimizer_memory
from shard.passes import prefetch_gathers, schedule
from shard.transport import host
from tests.helpers import ranks
from tests.helpers.graphs.recorder import use
from tests.helpers.graphs.retargeted import on_fakes, on_host, traced
from tests.helpers.optim.runs import normal
from tests.helpers.sharding import training
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import config
from tests.helpers.sharding.schedules import check_order, flights, passed

PARAMS = {f"w{i}": normal(f"w{i}", (40, 16 * (i + 1)), 0.1) for i in range(4)}
GRADS = [tree.map_with_path(lambda at, p, i=i: normal(f"{at}{i}", tuple(p.shape), 0.01), PARAMS) for i in range(3)]
OPTIMISERS = {
    "adamw": partial(optim.adamw, optim.cosine(1e-3, 10)),
    "adamw, 8 bits": partial(optim.adamw, 1e-3, moments=optim.DYNAMIC8),
    "adam, fp8": partial(optim.adam, 1e-3, moments=optim.FP8),
    "lion, 4 bits": partial(optim.lion, 1e-3, moments=optim.DYNAMIC4),
    "sgd": partial(optim.sgd, 0.1, 0.9),
    "muon, 8 bits": partial(optim.muon, 0.1, moments=optim.DYNAMIC8),
    "chain": lambda memory: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-3, memory=memory)),
    "a part": lambda memory: optim.partition({"w[01]": optim.lion(1e-3, memory=memory), ".*[23]": optim.sgd(1.0, 0.9)}),
}  # fmt: skip


def run(opt, params, state, grads):
    return optim.step(opt, grads, state, params)


def trained(opt, step=run, params=PARAMS, state=None, grads=GRADS):
    state = opt.init(params) if state is None else state
    for each in grads:
        params, state = step(opt, params, state, each)
    return params, state


def copy_all(patch):
    """Let the host's memory be another than that of parameters, so that every moment is copied."""
    patch.setattr(optimizer_memory, "_is_near", lambda device: False)
    patch.setattr(optimizer_memory, "_check_far", lambda moment, param: None)
    patch.setattr(optimizer_memory, "pinned_like", partial(torch.empty_like, device="cpu"))


@pytest.fixture
def far(monkeypatch):
    copy_all(monkeypatch)


def moments_of(state):
    """Return the moments of a state by path: all but the numbers of steps."""
    return {path: t for path, t in tree.items(state) if t.ndim}


def captured_for_cuda(opt, donate=(), params=PARAMS, f=None, passes=()):
    """Return a step captured for CUDA with its moments on the host."""
    state = opt.init(params)
    given = {"params": params, "state": state}
    donated = [id(t) for name in donate for t in tree.leaves(given[name])]
    step = lambda params, state, grads: (f or run)(opt, params, state, grads)
    far = {id(t) for path, t in moments_of(state).items() if not path.startswith("1.momentum")}  # which stay near
    found = traced(step, params, state, GRADS[0], host=far, donate=donated, passes=passes)
    on_fakes(found.module)
    check_order(found)
    return found


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.usefixtures("far")
def test_a_step_has_the_bits_of_one_on_the_device(name):
    make = OPTIMISERS[name]
    near, opt = make(memory=BESIDE_PARAMETERS), make(memory=PINNED)
    wanted = trained(near)
    assert same_bits(trained(opt), wanted)
    step = jit(lambda params, state, grads: run(opt, params, state, grads), donate=("params", "state"))
    copies = tree.map(torch.clone, (PARAMS, opt.init(PARAMS)))
    assert same_bits(trained(opt, lambda _, *args: step(*args), *copies), wanted)
    assert not host._UNDER_WAY


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("donate", [(), ("state",), ("params", "state")], ids=str)
def test_a_step_captured_for_a_device(name, donate):
    """Moments come from the host and go there, in the memory of the old ones if these are donated."""
    make = OPTIMISERS[name]
    opt, near = make(memory=PINNED), make(memory=BESIDE_PARAMETERS)
    captured, given = captured_for_cuda(opt, donate), tree.map(torch.clone, (PARAMS, opt.init(PARAMS), GRADS[0]))
    nodes = captured.module.graph.find_nodes(op="placeholder")
    brought = [row.of for row in schedule(captured) if row.name == "fetch"]
    taken = [row.of for row in schedule(captured) if row.name == "stash"]
    on_it = [path for path, node in zip(captured.paths, nodes, strict=True) if graph.tensors(node)[0].is_cpu]
    assert brought and sorted(brought) == sorted(taken) == sorted(on_it)
    is_over = [node.target == torch.ops.fquant.store_.default for node, *_ in flights(captured)]
    assert sum(is_over) == ("state" in donate) * len(brought)
    places = {path: t.data_ptr() for path, t in zip(captured.paths, tree.leaves(given), strict=True)}
    found = on_host(captured, *given)
    assert same_bits(found, run(near, PARAMS, near.init(PARAMS), GRADS[0]))
    state = {f"state.{path}": t.data_ptr() for path, t in moments_of(found[1]).items()}
    stay = [places[path] == state[path] for path in on_it]
    assert all(stay) if "state" in donate else not any(stay)


def test_on_the_host_nothing_is_copied():
    make = OPTIMISERS["adamw, 8 bits"]
    opt, near = make(memory=PINNED), make(memory=BESIDE_PARAMETERS)
    with mock.patch.object(optimizer_memory, "fetch") as fetched, mock.patch.object(optimizer_memory, "store") as kept:
        assert same_bits(trained(opt), trained(near))
        code = []
        for each in (opt, near):
            step = jit(lambda params, state, grads, each=each: run(each, params, state, grads))
            step(PARAMS, each.init(PARAMS), GRADS[0])
            (captured,) = step.traced.values()
            code.append(captured.module.code)
    assert not fetched.called and not kept.called and code[0] == code[1]


@pytest.mark.usefixtures("far")
def test_under_vmap():
    make = OPTIMISERS["adamw"]
    twice = lambda x: tree.map(lambda t: torch.stack([t, t + 0.01]), x)
    found, wanted = (
        vmap(partial(run, opt))(twice(PARAMS), tree.map(lambda t: torch.stack([t, t]), opt.init(PARAMS)), twice(each))
        for opt, each in ((make(memory=PINNED), GRADS[0]), (make(memory=BESIDE_PARAMETERS), GRADS[0]))
    )
    assert same_bits(found, wanted)


# --- order and memory -------------------------------------------------------------------------------------------------


def events(captured):
    """Return the fetches, stores and waits of a step by the number of their leaf, and its computations, in order."""
    out, leaf = [], {}
    for node in captured.module.graph.nodes:
        if (kind := graph.transfer(node)) is not None:
            path = captured.paths[list(captured.module.graph.find_nodes(op="placeholder")).index(node.args[0])]
            leaf[node] = int(path.split(".w")[1][0])
            out.append((kind, leaf[node]))
        elif graph.is_wait(node):
            issue = graph.issue_of(node)
            out.append((f"wait for {graph.transfer(issue)}", leaf[issue]))
        elif "update" in str(node.target):
            out.append(("compute", len([x for x in out if x[0] == "compute"])))
    return out


@pytest.mark.parametrize("donate", [(), ("params", "state")], ids=str)
def test_the_next_leaf_is_fetched_and_the_last_stored_while_a_leaf_is_updated(donate):
    opt = optim.lion(1e-3, moments=optim.DYNAMIC8, memory=PINNED)
    found, last = events(captured_for_cuda(opt, donate)), len(PARAMS) - 1
    first, end = found.index, lambda x: len(found) - 1 - found[::-1].index(x)
    for i in range(last + 1):
        assert end(("wait for fetch", i)) < first(("compute", i)) < first(("stash", i))
        if i < last:
            assert end(("fetch", i + 1)) < first(("wait for fetch", i)) < first(("wait for fetch", i + 1))
            assert first(("compute", i + 1)) < first(("wait for stash", i))
            assert end(("wait for stash", i)) < first(("stash", i + 1))
    assert sum(kind == "compute" for kind, _ in found) == last + 1


def test_the_prefetching_pass_moves_fetches_further_ahead():
    plain = captured_for_cuda(OPTIMISERS["lion, 4 bits"](memory=PINNED))
    ahead = passed(plain, prefetch_gathers(8))
    check_order(ahead)
    place = lambda found, what: [i for i, event in enumerate(events(found)) if event == what]
    assert place(ahead, ("fetch", 3))[0] < place(ahead, ("compute", 1))[0] < place(plain, ("fetch", 3))[0]


def test_a_device_holds_the_moments_of_three_leaves():
    params = {f"w{i}": torch.zeros(64, 64) for i in range(12)}
    grads = tree.map(torch.zeros_like, params)
    peaks, leaf = [], 64 * 64 * 8
    for memory in (BESIDE_PARAMETERS, PINNED):
        opt = optim.adamw(1e-3, memory=memory)
        state = opt.init(params)
        step = lambda params, state, grads, opt=opt: run(opt, params, state, grads)
        far = {id(t) for t in moments_of(state).values()} if memory is PINNED else ()
        donate = [id(t) for t in tree.leaves((params, state))]
        captured = traced(step, params, state, grads, host=far, donate=donate)
        peaks.append(of(captured).peak)
    found = of(captured)
    assert found.fetched == found.stashed == found.host == 12 * leaf
    assert peaks[0] - 12 * leaf < peaks[1] <= peaks[0] - 9 * leaf + 64
    held = liveness.peak_on_host(captured.module.graph)
    assert held == 12 * leaf  # new moments take the memory of old ones


# --- recorded steps ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("far")
def test_a_step_that_donates_its_state_is_recorded(monkeypatch):
    seen = use(monkeypatch)
    monkeypatch.setattr(recordings, "SMALL", -1)
    make = OPTIMISERS["adamw, 8 bits"]
    opt, near = make(memory=PINNED), make(memory=BESIDE_PARAMETERS)
    step = jit(lambda params, state, grads: run(opt, params, state, grads), donate=("params", "state"))
    copies, grads = tree.map(torch.clone, (PARAMS, opt.init(PARAMS))), [*GRADS, *GRADS]
    found = trained(opt, lambda _, *args: step(*args), *copies, grads)
    assert same_bits(found, trained(near, grads=grads)) and (seen.recorded, seen.replayed) == (1, 5)
    assert seen.waited == 5 * 2 * len(moments_of(found[1]))


def test_a_step_can_be_recorded_if_it_donates_its_state():
    opt = OPTIMISERS["adamw, 8 bits"](memory=PINNED)
    assert not synchronises(captured_for_cuda(opt, ("state",)).module.graph)
    (node,) = synchronises(captured_for_cuda(opt, ("params",)).module.graph)
    assert re.search(r"returns arrived\w*, .* on the host, not over what is donated$", describe(node))


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_moment_on_the_device_is_refused():
    opt = OPTIMISERS["adamw"](memory=PINNED)
    meta = tree.map(lambda t: t.to("meta"), (PARAMS, opt.init(PARAMS), GRADS[0]))
    text = (
        "w0: got a moment on the device of its parameter; wanted pinned memory of the host; copy the state into that of"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        run(opt, *meta)


def test_a_moment_in_pageable_memory_is_refused():
    opt = OPTIMISERS["adamw"](memory=PINNED)
    params, grads = (tree.map(lambda t: t.to("meta"), x) for x in (PARAMS, GRADS[0]))
    text = (
        r"w0: fetch: \(40, 16\) of torch.float32 is in pageable memory; wanted pinned memory, as place and init give it"
    )
    with pytest.raises(ValueError, match=text):
        run(opt, params, opt.init(PARAMS), grads)


def test_a_moment_of_another_layout_is_refused():
    with pytest.raises(ValueError, match=r"store: got torch.float32 \(3,\); wanted torch.float32 \(2,\), like what it"):
        host.store(torch.zeros(2), torch.zeros(3))


def test_a_donated_moment_that_is_read_too_late_is_refused():
    def late(opt, params, state, grads):
        (*out,) = run(opt, params, state, grads)
        return *out, host.arrived(host.fetch(state.momentum["w1"], params["w1"].device)) * 2

    opt = OPTIMISERS["sgd"](memory=PINNED)
    text = "donate: state.momentum.w1 is read after its new value is copied to the host in its place; read it before"
    with pytest.raises(ValueError, match=re.escape(text)):
        captured_for_cuda(opt, ("state",), f=late)
    assert captured_for_cuda(opt, f=late)


@pytest.mark.usefixtures("far")
def test_a_derivative_is_refused():
    opt = OPTIMISERS["sgd"](memory=PINNED)
    state = opt.init(PARAMS)
    moved = lambda grads: run(opt, PARAMS, state, grads)[0]["w0"]
    text = "w0: a {} through moments in the host's memory was asked for; a copy to the host has none; keep"
    with pytest.raises(TypeError, match=text.format("gradient")):
        grad(lambda grads: moved(grads).sum())(GRADS[0])
    with pytest.raises(TypeError, match=text.format("tangent")):
        jvp(moved, (GRADS[0],), (GRADS[1],))


def test_sgd_without_momentum_has_nothing_to_keep():
    with pytest.raises(ValueError, match=r"memory: got momentum 0.0, which needs no moments; leave memory out, or use"):
        optim.sgd(0.1, memory=PINNED)


# --- files and bundles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.usefixtures("far")
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path, name):
    opt = OPTIMISERS[name](memory=PINNED)
    wanted = trained(opt)
    safetensors.save(tmp_path / "run", trained(opt, grads=GRADS[:1]))
    params, state = safetensors.load(tmp_path / "run")
    state = tree.map(lambda to, t: to.copy_(t), opt.init(params), state)
    assert same_bits(trained(opt, params=params, state=state, grads=GRADS[1:]), wanted)


def test_a_file_is_written_behind_what_a_device_still_copies(tmp_path, monkeypatch):
    """A device would write the last moments while the file is written."""
    late = torch.zeros(4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: late.fill_(7.0))
    safetensors.save(tmp_path / "before", {"moment": late})
    assert not safetensors.load(tmp_path / "before")["moment"].any()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    safetensors.save(tmp_path / "behind", {"moment": late})
    assert safetensors.load(tmp_path / "behind")["moment"].eq(7.0).all()
    assert device.HOST == late.device


def bundles():
    """Return whether steps of trained bundles are those with moments on the device, and resume from a whole tree."""
    cfg, (x, y, count) = config(False), training.rows(4)
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    placed = shard.place(training.params(cfg), decoder.dims(cfg), rules, mesh, cfg, train=training.EXACT)
    comm, mine, params = shard.comm(mesh, rules), shard.share((x, y), mesh, rules), shard.local(placed)

    def steps(opt, params, state, n):
        for _ in range(n):
            params, state = optim.step(opt, grad(training.loss)(params, *mine, count, cfg, comm), state, params)
        return params, state

    near, opt = (optim.adamw(1e-2, moments=optim.DYNAMIC8, memory=memory) for memory in (BESIDE_PARAMETERS, PINNED))
    wanted = steps(near, params, near.init(params), 3)
    with pytest.MonkeyPatch.context() as patch:
        copy_all(patch)
        some, state = steps(opt, params, opt.init(params), 1)
        whole = shard.whole(state, mesh, rules)
        sent = [whole]
        dist.broadcast_object_list(sent)
        again = shard.part(sent[0], opt.init(params), mesh, rules)
        return same_bits(again, state), same_bits(steps(opt, some, again, 2), wanted)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_trained_bundles(world):
    assert ranks.run(world, bundles, timeout=300) == [(True, True)] * world
