"""A disk on which no file can grow beyond some bytes, for this process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Let writes behind the first ``nbytes`` of a file fail inside of the block, as those of a full disk do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
