"""Run the command line of the benchmark of faults."""

import signal
import sys

from . import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the runs that were started too
    sys.exit(main())
