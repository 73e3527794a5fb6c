"""`cacheformers app`: a page that reads a text, answers questions about it, and shows what it retrieved for them."""
