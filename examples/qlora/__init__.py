"""Fine-tune LoRA adapters beside a quantised decoder: ``python -m examples.qlora``."""
