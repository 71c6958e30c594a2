"""The memory of a replay: where each result lies, the replay that writes there, and the pages underneath."""
