"""The memory of a replay: ``plan`` assigns offsets, ``executor`` replays into them, ``allocator`` holds the pages."""
