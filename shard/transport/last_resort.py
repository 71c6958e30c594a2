"""The end of a process whose wait for other ranks cannot be ended."""

import contextlib
import os
import sys
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


def end_process(message: str) -> NoReturn:
    """End this process with status 1, as an uncaught RuntimeError with ``message`` does.

    The message goes to stderr, and by TORCHELASTIC_ERROR_FILE to the launcher. Neither ``finally`` nor atexit runs.
    """
    with contextlib.suppress(Exception):  # the process ends without the message too
        print(f"RuntimeError: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        get_error_handler().record_exception(RuntimeError(message))
    os._exit(1)
