"""Run ``python -m examples.qlora``."""

from .cli import main

raise SystemExit(main())
