"""The command `cacheformers`: read a book into a memory file, ask it, look into it."""
