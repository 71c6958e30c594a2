"""Run ``python -m examples.vqvae``."""

from .cli import main

raise SystemExit(main())
