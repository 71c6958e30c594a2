"""The memory of a replay: ``plan`` assigns offsets; ``allocator`` holds the pages and replays into them."""
