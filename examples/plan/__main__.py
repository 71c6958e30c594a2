"""Run ``python -m examples.plan``."""

from .cli import main

raise SystemExit(main())
