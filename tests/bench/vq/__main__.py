"""Run the command line of the benchmark of codebooks."""

import sys

from . import main

sys.exit(main())
