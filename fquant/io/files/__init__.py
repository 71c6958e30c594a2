"""Files on disk under the formats: written whole or not at all, and verified when they are read."""
