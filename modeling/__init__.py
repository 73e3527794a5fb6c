"""What runs: search, memories, caches, and how a memory sits on a decoder."""
