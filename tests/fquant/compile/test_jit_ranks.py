"""A captured function on a mesh of 1, 2 and 3 ranks equals the function in every bit, collectives included."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value

import shard
from fquant import NF4_DQ, jit, linear, lora, quantize, random, tree
from fquant.communication import identity
from models import decoder
from tests.helpers import ranks, transform_table
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.qlora_step import ALL, CFG, OPT, SOME, copied, equal, loss, replays, start, step, tokens_of

pytestmark = pytest.mark.xdist_group("ranks")

WORLDS = (1, 2, 3)
each_world = pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
RULES = shard.Rules()

# --- every row of the transform table, its weights in bundles ---------------------------------------------------------


def gathered(y, group):
    return shard.all_gather(y, group)


def scattered(y, group):
    return shard.reduce_scatter(y.mT, group)  # 96 rows


def summed(y, group):
    return shard.all_reduce(y, group).sin() * y


def paired(y, group):
    return shard.exit(shard.enter(y, group).sin() * (1 + group.rank()), group)


TRAVELS = {f.__name__: f for f in (gathered, scattered, summed, paired)}  # what is differentiated, from rank to rank


def block(comm, x, base, theta):
    return transform_table.mlp(x, comm.load(base), theta)


def on_mesh(verb, mesh):
    """Return the function of a row of the table for placed bases."""
    comm = shard.comm(mesh, RULES, order=2 if verb.endswith("2") else 1)
    if verb.startswith("forward"):
        return transform_table.forward(comm if "remat" in verb else replace(comm, wrap=identity))
    if verb.startswith("remat"):
        return lambda theta, base, data: transform_table.wave(comm.wrap(partial(block, comm))(data["x"], base, theta))
    if verb in TRAVELS:
        f, group = TRAVELS[verb], mesh.get_group("fsdp")
        whole = lambda theta, base, data: linear(theta["x"] * data["x"], base["w"], theta["bias"])
        return lambda theta, base, data: transform_table.wave(f(whole(theta, comm.load(base), data), group))
    return lambda theta, base, data: transform_table.VERBS[verb][0](theta, comm.load(base), data)


def row(verb, transform):
    mesh = shard.mesh(fsdp=dist.get_world_size())
    of = "linear" if verb in TRAVELS else verb
    thetas, v, packed, data = transform_table.arguments(of, NF4_DQ, first=transform_table.E * dist.get_rank())
    whole = (
        {"": {name: "groups out in" if len(w.shape) == 3 else "out in" for name, w in packed[0].items()}}
        if isinstance(packed[0], dict)
        else decoder.dims(transform_table.CFG)
    )
    bases = [shard.local(shard.place(w, whole, RULES, mesh)) for w in packed]
    f = on_mesh(verb, mesh)

    def transformed(*args):
        return shard.psum(transform_table.TRANSFORMS[transform](f, *args), mesh, RULES.batch)

    replays(transformed, thetas, v, bases, data)


FEW = {  # what CI takes, on 2 and on 3 ranks; the rest is slow
    (2, "linear"): SOME,
    (2, "paired"): SOME,
    (2, "dropout"): ("grad", "vmap_all"),
    (2, "remat2"): ("grad_grad",),
    (3, "remat"): ("grad", "vmap_all", "jvp"),
    (3, "gathered"): ("grad",),
    (3, "scattered"): ("vmap_all",),
}
ROWS = [
    pytest.param(
        world,
        verb,
        transform,
        id=f"{world}-{verb}-{transform}",
        marks=[] if transform in FEW.get((world, verb), ()) else pytest.mark.slow,
    )
    for world in WORLDS
    for verb, transform in ALL + [(verb, t) for verb in TRAVELS for of, t in ALL if of == "linear"]
]


@pytest.mark.each_value
@pytest.mark.parametrize("world, verb, transform", ROWS)
def test_captured_is_eager(world, verb, transform):
    if transform == "vmap_all" and torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 cannot vmap view(dtype)")
    ranks.run(world, row, verb, transform, timeout=120)


# --- a step -----------------------------------------------------------------------------------------------------------


def placed(dropout=0.0):
    """Return the mesh, the step of tests/helpers/qlora_step.py on it, and its adapters, state and base."""
    mesh = shard.mesh(fsdp=dist.get_world_size())
    adapters, _, base = start(dropout)
    adapters = tree.map_with_path(lambda path, t: t + 0.1 * transform_table.draw(path, *t.shape).float(), adapters)
    base, adapters = shard.place((base, adapters), decoder.dims(CFG), RULES, mesh, CFG)
    reduced = partial(step, reduce=partial(shard.reduce, mesh=mesh, rules=RULES))
    return mesh, reduced, adapters, OPT.init(adapters), shard.local(base)


def keys_of(i):
    """Return one key for every row of this rank."""
    rows = 2 * dist.get_rank() + torch.arange(2)
    return random.fold(random.fold(random.key(3), i), rows)


def steps(donate):
    mesh, reduced, adapters, state, base = placed(dropout=0.3)
    comm, given = shard.comm(mesh, RULES), copied(base)
    captured, losses = jit(partial(reduced, comm=comm), donate=donate), []
    ours = copied(adapters), copied(state)
    for i in range(3):
        tokens, keys = tokens_of(dist.get_rank()), keys_of(i)
        before, old, memory = copied(ours), ours, [t.data_ptr() for t in tree.leaves(ours)]
        *ours, mine = captured(*ours, base, tokens, keys)
        adapters, state, value = reduced(adapters, state, base, tokens, keys, comm)
        assert equal([*ours, mine], [adapters, state, value])
        written = [t.data_ptr() == p for t, p in zip(tree.leaves(ours), memory, strict=True)]
        assert all(written) if donate else not any(written) and equal(old, before)
        losses.append(mine.item())
    assert len(captured.traced) == 1 and equal(base, given)
    assert len(set(losses)) == 3
    return losses


@pytest.mark.parametrize(
    "donate", [pytest.param((), marks=pytest.mark.slow, id="kept"), pytest.param(("adapters", "state"), id="donated")]
)
@each_world
def test_steps_of_an_optimiser(world, donate):
    """Run three steps with dropout by one trace."""
    first, *others = ranks.run(world, steps, donate, timeout=120)
    assert all(losses == first for losses in others)


def from_place():
    mesh, reduced, adapters, state, base = placed()
    captured = jit(partial(reduced, comm=shard.comm(mesh, RULES)), donate=("adapters", "state"))
    for i in range(3):
        adapters, state, _ = captured(adapters, state, base, tokens_of(i))
    return len(captured.traced)


def test_what_was_placed_is_donated_from_the_first_step_on():
    assert ranks.run(2, from_place, timeout=60) == [1, 1]


def recomputed():
    """Return losses and gradients of two steps: kept, recomputed, and recomputed for second order."""
    mesh, _, adapters, _, base = placed(dropout=0.3)

    @jit
    def gradients(adapters, base, tokens, keys, comm):
        return shard.reduce(grad_and_value(loss)(adapters, base, tokens, keys, comm), mesh, RULES)

    comms = [shard.comm(mesh, RULES, order=order) for order in (1, 2)]
    call = lambda comm, i: gradients(adapters, base, tokens_of(dist.get_rank()), keys_of(i), comm)
    found = [[call(comm, i) for i in range(2)] for comm in (replace(comms[0], wrap=identity), *comms)]
    assert len(gradients.traced) == 3
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_dropout_is_the_same_in_a_recomputation(world):
    """Other keys drop other values. The loss is equal in every bit; gradients are summed in another order."""
    for kept, *others in ranks.run(world, recomputed, timeout=60):
        assert kept[0][1] != kept[1][1]
        for other in others:
            for (grads, value), (wanted, wanted_value) in zip(other, kept, strict=True):
                assert torch.equal(value, wanted_value)
                torch.testing.assert_close(tree.leaves(grads), tree.leaves(wanted), rtol=1e-4, atol=1e-6)


# --- dropout on any number of ranks -----------------------------------------------------------------------------------

P, ROWS_IN_ALL = 0.4, 7


def rows_and_keys(i):
    x = random.normal(random.fold(random.key(8), i), (ROWS_IN_ALL, 3, 64), torch.float64)
    return x, random.fold(random.fold(random.key(9), i), torch.arange(ROWS_IN_ALL))


def through(comm, x, base, adapters, keys):
    return linear(x, comm.load(lora.attach(base, adapters, keys))["w"])


def dropped(recompute):
    """Return an adapter's view of this rank's rows, and the gradient of x; the weight is zero and b · a = 1."""
    mesh = shard.mesh(fsdp=dist.get_world_size())
    eye = torch.eye(64, dtype=torch.float64)
    adapters = {"w": lora.Lora(a=eye, b=eye, alpha=64.0, dropout=P)}
    base = shard.place({"w": quantize(torch.zeros(64, 64), NF4_DQ)}, {"": {"w": "out in"}}, RULES, mesh)
    comm = shard.comm(mesh, RULES)
    f = partial(through, comm)
    f = comm.wrap(f) if recompute else f

    def seen(x, base, adapters, keys):
        return f(x, base, adapters, keys), grad(lambda x: f(x, base, adapters, keys).square().sum())(x)

    captured, found = jit(seen), []
    for i in range(3):
        x, keys = shard.share(rows_and_keys(i), mesh, RULES)
        found.append(captured(x, shard.local(base), adapters, keys))
    assert len(captured.traced) == 1
    return found


@pytest.mark.parametrize("recompute", [False, True])
@each_world
def test_rows_drop_the_same_on_any_number_of_ranks(world, recompute):
    got = ranks.run(world, dropped, recompute, timeout=60)
    for i in range(3):
        y, dx = (torch.cat([one[i][k] for one in got]) for k in range(2))
        x, keys = rows_and_keys(i)
        wanted = random.dropout(x, P, random.fold(keys, "w"))
        assert torch.equal(y, wanted) and torch.equal(dx == 0, wanted == 0)


# --- donation ---------------------------------------------------------------------------------------------------------


def held():
    mesh, reduced, adapters, state, base = placed()
    captured = jit(partial(reduced, comm=shard.comm(mesh, RULES)), donate=("adapters", "state"))
    adapters, state = copied((adapters, state))
    views = {path: t[:1] for path, t in tree.items(adapters) if dist.get_rank() == 0 and path.endswith("q.a")}
    kept, before = copied(views), copied((adapters, state))
    wanted = reduced(before[0], before[1], base, tokens_of(0), comm=shard.comm(mesh, RULES))
    was = {t.data_ptr() for t in tree.leaves((adapters, state))}
    after = captured(adapters, state, base, tokens_of(0))
    assert equal(after, wanted) and equal(views, kept)
    written = [t for t in tree.leaves(after) if t.data_ptr() in was]
    return len(written), len(views), len(was)


def test_what_one_rank_still_holds_is_not_written_there():
    """A view on one rank makes ranks replay different graphs with the same collectives."""
    (written, views, total), other = ranks.run(2, held, timeout=60)
    assert views and written == total - views
    assert other == (total, 0, total)


def of_a_mesh():
    """Local bytes share memory with the placed tree, so they are not written."""
    mesh = shard.mesh(fsdp=dist.get_world_size())
    whole = {"w": torch.arange(64.0).reshape(8, 8)}
    base = shard.place(whole, {"": {"w": "out in"}}, RULES, mesh)
    got = jit(lambda base: tree.map(lambda t: t + 1, base), donate=("base",))(shard.local(base))
    assert equal(shard.collect(base), whole)
    assert equal(got, tree.map(lambda t: t + 1, shard.local(base)))


def test_bytes_that_are_placed_are_not_written():
    ranks.run(2, of_a_mesh)


SENDS = {  # what is sent of a donated tensor a, from which it may be written over only once it has gone
    "gather": lambda a, group: shard.all_gather(a, group),
    "gather of a view": lambda a, group: shard.all_gather(a.view(2, -1)[1], group),
    "scatter": lambda a, group: shard.reduce_scatter(a, group),
    "sum": lambda a, group: shard.all_reduce(a, group),
    "two": lambda a, group: gather_two(a, group),
}


def gather_two(a, group):
    ops = torch.ops._c10d_functional
    both = ops.all_gather_into_tensor_coalesced([a, a + 1], group.size(), group.group_name)
    return [ops.wait_tensor(t) for t in both]


def sent(case):
    group = shard.mesh(fsdp=dist.get_world_size()).get_group("fsdp")

    def f(a):
        new = a + 1
        return new, SENDS[case](a, group)

    captured = jit(f, donate=("a",))
    for i in range(20):
        a = torch.full((6 << 17,), float(i + dist.get_rank()))
        wanted, memory = f(a.clone()), a.data_ptr()
        got = captured(a)
        assert equal(got, wanted) and got[0].data_ptr() == memory


@named("case", slow_after(2, SENDS))
def test_what_is_being_sent_is_not_written(case):
    ranks.run(2, sent, case, timeout=60)
