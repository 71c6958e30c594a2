"""A model of the native caching allocator of torch for CUDA: what a graph's tensors reserve in a private pool.

Sizes are rounded to 512 bytes. Those up to 1 MiB are cut from segments of 2 MiB. Larger ones are cut from segments of
20 MiB, or of their own size from 10 MiB on. The smallest free block that fits is taken (best fit), and its rest is free
if it has 512 bytes, or more than 1 MiB in large segments. A freed block merges with free neighbours. No segment is
returned, because none is while a graph is recorded. (c10/cuda/CUDACachingAllocator.cpp.)
"""

import bisect

from fquant.compile import graph as graphs
from fquant.compile import liveness

MIB = 2**20


class Allocator:
    """Blocks of segments by address: ``reserved`` bytes of segments, ``allocated`` bytes in use."""

    def __init__(self):
        self.free = {True: [], False: []}  # sizes and addresses of free blocks, by whether they are small
        self.blocks = {}  # by address: size, start and end of the segment, whether small
        self.before = {}  # for the address of a block, that of the block before it in its segment
        self.reserved = self.allocated = self.end = 0

    def allocate(self, nbytes):
        """Return the address of a block of ``nbytes``."""
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        at = bisect.bisect_left(self.free[small], (size, -1))
        if at < len(self.free[small]):
            _, address = self.free[small].pop(at)
        else:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            address, self.end = self.end, self.end + whole + 512  # never beside another
            self.blocks[address], self.before[address] = [whole, address, address + whole, small], None
            self.reserved += whole
        block = self.blocks[address]
        rest = block[0] - size
        if rest >= 512 if small else rest > MIB:
            block[0] = size
            self._put(address + size, rest, block, address)
        self.allocated += block[0]
        return address

    def release(self, address):
        """Free a block."""
        block = self.blocks[address]
        self.allocated -= block[0]
        free = self.free[block[3]]
        behind, before = address + block[0], self.before[address]
        if behind < block[2] and (self.blocks[behind][0], behind) in free:
            free.remove((self.blocks[behind][0], behind))
            block[0] += self.blocks.pop(behind)[0]
        if before is not None and (self.blocks[before][0], before) in free:
            free.remove((self.blocks[before][0], before))
            self.blocks[before][0] += self.blocks.pop(address)[0]
            address, block = before, self.blocks[before]
        self._put(address, block[0], block, self.before[address])

    def _put(self, address, size, segment, before):
        self.blocks[address], self.before[address] = [size, *segment[1:]], before
        behind = address + size
        if behind < segment[2]:
            self.before[behind] = address
        bisect.insort(self.free[segment[3]], (size, address))


def recorded(graph, first=0, scratch=lambda node: 0):
    """Return the most bytes allocated and the bytes reserved when ``graph`` is recorded into a pool of its own.

    The pool begins with a segment of ``first`` bytes. ``scratch`` is the memory that an op takes while it runs.
    """
    pool, where, peak = Allocator(), {}, 0
    if first:
        pool.release(pool.allocate(first))
    given = graphs.all_storages(graph.find_nodes(op="placeholder"))
    kept = graphs.all_storages(graphs.outputs(graph))
    ends = {}
    for storage, place in liveness.last_uses(graph).items():
        ends.setdefault(place, []).append(storage)
    for place, node in enumerate(graph.nodes):
        for storage, nbytes in graphs.sizes(node).items():
            if nbytes and storage not in given and storage not in where:
                where[storage] = pool.allocate(nbytes)
        temporary = pool.allocate(scratch(node)) if scratch(node) else None
        peak = max(peak, pool.allocated)
        if temporary is not None:
            pool.release(temporary)
        for storage in ends.get(place, ()):
            if storage in where and storage not in kept:
                pool.release(where[storage])
    return peak, pool.reserved
