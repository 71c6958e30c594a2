"""Published models as Configs, in the numbers of their ``config.json`` files, to plan with.

Sources: meta-llama/Llama-3.1-8B, -70B and -405B (Grattafiori et al. 2024, "The Llama 3 Herd of Models", table 3);
Qwen/Qwen3-0.6B to -32B (Yang et al. 2025, "Qwen3 Technical Report", table 1).
"""

from typing import Any

from .config import Config, RopeScaling


def _llama(dim: int, num_layers: int, num_heads: int, hidden: int) -> Config:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    return Config(128256, dim, num_layers, num_heads, 8, 128, hidden, 1e-5, 500000.0, scaling, max_positions=131072)


def _qwen(dim: int, num_layers: int, num_heads: int, hidden: int, tied: bool = False) -> Config:
    sizes = (151936, dim, num_layers, num_heads, 8, 128, hidden)
    kind: dict[str, Any] = {"family": "qwen3", "qk_norm": True, "tied": tied}
    return Config(*sizes, norm_eps=1e-6, rope_theta=1000000.0, max_positions=40960, **kind)


PRESETS: dict[str, Config] = {
    "llama3-8b": _llama(4096, 32, 32, 14336),
    "llama3-70b": _llama(8192, 80, 64, 28672),
    "llama3-405b": _llama(16384, 126, 128, 53248),
    "qwen3-0.6b": _qwen(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen(4096, 36, 32, 12288),
    "qwen3-14b": _qwen(5120, 40, 40, 17408),
    "qwen3-32b": _qwen(5120, 64, 64, 25600),
}
