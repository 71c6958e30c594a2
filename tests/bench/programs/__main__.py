"""Run the command line of the benchmark of programs."""

import sys

from . import main

sys.exit(main())
