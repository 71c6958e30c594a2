"""Run the command line of the benchmark of faults."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
