"""Measure one program in this process: ``python -m tests.bench.programs.child memory|times NAME SIZE``."""

import sys

from . import memory, times

if __name__ == "__main__":
    kind, name, size = sys.argv[1:]
    {"memory": memory, "times": times}[kind].main(name, int(size))
