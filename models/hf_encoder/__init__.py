"""Folders of encoders in Hugging Face's layout: BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ELECTRA.

    cfg, params = hf_encoder.lazy(folder)      # every leaf a fquant.lazy.Lazy; config and headers read, no weights
    cfg, params = hf_encoder.load(folder)      # every leaf a tensor
    hf_encoder.save(folder, cfg, params)

They are as strict as ``models.hf``, whose files, readers of keys and shards they share. Three freedoms of such folders
are read. The encoder's names may begin with ``bert.`` and the like. A norm's tensors may be called ``gamma`` and
``beta``, as before 2019. The file may hold heads that its architecture does not have: bert-base-uncased is a
BertForMaskedLM with a pooler. They are kept, and the config says so.

``families.py`` has the keys and names of each model type.
"""

from .config import from_hf, to_hf
from .families import FAMILIES
from .loading import lazy, load
from .names import module_name, path_of, tied_modules
from .saving import save

__all__ = ["FAMILIES", "from_hf", "lazy", "load", "module_name", "path_of", "save", "tied_modules", "to_hf"]
