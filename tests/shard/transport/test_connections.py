"""Connections between two processes are found by their ends, and a wait in one ends."""

import socket
import threading

import pytest

from shard.transport import connections


@pytest.fixture
def pair():
    """Two connected TCP sockets, both of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


@pytest.fixture
def other():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        with far:
            yield near, far


def test_what_is_listed(pair):
    near, far = (connections.ends_of(each) for each in pair)
    assert near == far[::-1]
    with socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0)) as listener:
        found = connections.open_now()
        assert near in found and far in found
        assert not any(f":{listener.getsockname()[1]}" in ends[0] for ends in found)


def test_both_ranks_have_it(pair, other, monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    (mine, theirs), (alone, _) = [[connections.ends_of(each) for each in both] for both in (pair, other)]
    assert connections.between([mine, alone], [theirs]) == {tuple(mine)}
    assert connections.between([mine, alone], [mine, alone]) == set()
    monkeypatch.setenv("MASTER_PORT", mine[1].rpartition(":")[2])
    assert connections.between([mine, alone], [theirs]) == set()


def test_a_wait_ends(pair, other):
    """That of either rank, and those of other connections go on."""
    near, far = pair
    ended = [threading.Thread(target=each.recv, args=(1,), daemon=True) for each in pair]
    for each in ended:
        each.start()
    connections.end({tuple(connections.ends_of(near))})
    for each in ended:
        each.join(10)
        assert not each.is_alive()
    assert near.recv(1) == far.recv(1) == b""
    other[0].sendall(b"x")
    assert other[1].recv(1) == b"x"
    connections.end({("127.0.0.1:1", "127.0.0.1:2")})  # closed since
