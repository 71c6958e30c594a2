"""The command line of the benchmark."""

from . import main

raise SystemExit(main())
