"""Tests of fquant.communication: Loadable and AfterLoad nodes, and LOCAL as the identity."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from fquant import tree
from fquant.communication import LOCAL, AfterLoad, Comm, Loadable
from fquant.tree import node


@node
class CommBox(Loadable):
    content: object


@node
class CommPlain:
    content: object


def add(x, y):
    return x + y


def double(x, _):
    return x * 2


def test_local_is_the_identity():
    x = torch.ones(2)
    for f in (LOCAL.open, LOCAL.enter, LOCAL.exit, LOCAL.wrap, LOCAL.load):
        assert f(x) is x
    box = CommBox(x)
    assert LOCAL.load(box) is box and LOCAL.load({"a": box})["a"] is box


def test_load_opens_only_what_is_closed():
    opened = []
    comm = Comm(open=lambda box: opened.append(box) or box.content)
    x = torch.ones(2)
    box, plain = CommBox(x), CommPlain(x)
    assert comm.load(box) is x and opened == [box]
    assert comm.load(plain) is plain and comm.load(x) is x and comm.load([box])[0] is box
    assert opened == [box]


def test_deferred_work_is_done_once_open_and_in_order():
    comm = Comm(open=lambda box: box.content)
    x, y = torch.tensor([1.0]), torch.tensor([5.0])
    waiting = AfterLoad(AfterLoad(CommBox(x), y, add), (), double)
    assert comm.load(waiting).tolist() == [12.0]  # (x + y) * 2, the inner first
    assert LOCAL.load(AfterLoad(x, y, add)).tolist() == [6.0]


def test_rows_are_picked_of_what_is_closed_and_else_all_there_are():
    ids, x = torch.tensor([2, 0]), torch.tensor([1.0, 2.0, 3.0])
    opening = Comm(open=lambda box: box.content)
    picking = replace(opening, pick=lambda box, ids: box.content[ids])
    waiting = AfterLoad(AfterLoad(CommBox(x), torch.tensor(5.0), add), (), double)
    assert opening.rows(CommBox(x), ids) is x and opening.rows(waiting, ids).tolist() == [12.0, 14.0, 16.0]
    assert picking.rows(CommBox(x), ids).tolist() == [3.0, 1.0] and picking.rows(waiting, ids).tolist() == [16.0, 12.0]
    for comm in (LOCAL, opening, picking):
        assert comm.rows(x, ids) is x and comm.rows(AfterLoad(x, x, add), ids).tolist() == [2.0, 4.0, 6.0]
    assert picking.load(CommBox(x)) is x


def test_deferred_is_a_closed_node():
    waiting = AfterLoad(CommBox(torch.ones(1)), {"a": torch.ones(2)}, add)
    assert isinstance(waiting, Loadable)
    assert tree.paths(waiting) == ["closed.content", "args.a"]
    same = AfterLoad(CommBox(torch.zeros(1)), {"a": torch.zeros(2)}, add)
    assert tree.structure(waiting) == tree.structure(same) != tree.structure(replace(same, then=double))


def test_gradients_flow_to_what_waits():
    comm = Comm(open=lambda box: box.content)
    f = lambda y, x: comm.load(AfterLoad(CommBox(x), y, torch.mul)).sum()
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])
    assert [g.tolist() for g in torch.func.grad(f, (0, 1))(y, x)] == [[3, 4], [5, 6]]


def test_a_comm_is_a_frozen_value():
    with pytest.raises(FrozenInstanceError):
        LOCAL.wrap = add  # type: ignore[misc]
    other = replace(LOCAL, wrap=add)
    assert other.wrap is add and other.enter is LOCAL.enter and replace(LOCAL) == LOCAL != other
