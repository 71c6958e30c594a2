"""The bytes of safetensors files, to compare with those of other programs."""

import re
import struct
from pathlib import Path

from fquant.io.files.digests import KEY


def without_digests(path: Path) -> bytes:
    """Return the bytes of a file as they would be without its digests."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    text = re.sub(f',"{KEY}":"[^"]*"', "", content[8:size].decode()).rstrip()
    text += " " * (-len(text.encode()) % 8)
    return struct.pack("<Q", len(text.encode())) + text.encode() + content[size:]
