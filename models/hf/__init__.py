"""Folders of decoders in Hugging Face's layout: names, configs, lazy opening, loading and saving.

    cfg, params = hf.lazy(folder)      # every leaf a fquant.lazy.Lazy; config and headers read, no weights
    cfg, params = hf.load(folder)      # every leaf a tensor
    cfg, params = hf.lazy(folder, device=device)      # what is read, and quantised then, is on the device
    hf.save(folder, cfg, params)
    hf.save(folder, cfg, lora.merge(base, adapters), dequantize=torch.bfloat16)
    hf.save_packed(folder, cfg, packed)                    # a tree of Packed as it is; hf.lazy reads it

A folder holds ``config.json`` and either ``model.safetensors`` or ``model.safetensors.index.json`` with its shards. It
is read strictly: it must hold every tensor of the config in its shape, and no other. Every fault of a folder is a
ValueError that names the file and the tensor. ``families.py`` has the model types.
"""

from .config import from_hf, to_hf
from .folder import CONFIG, INDEX, SINGLE, read_config
from .loading import lazy, load
from .names import module_name, path_of, tensor_name, tied_modules
from .packed import PACKED
from .packed import save as save_packed
from .saving import save

__all__ = [
    "CONFIG", "INDEX", "PACKED", "SINGLE", "from_hf", "lazy", "load", "module_name", "path_of", "read_config", "save",
    "save_packed", "tensor_name", "tied_modules", "to_hf",
]  # fmt: skip
