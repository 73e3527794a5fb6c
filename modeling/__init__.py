"""The machine: search, memories, caches, and how a memory is put on a decoder."""
