"""BABILong (arXiv 2406.10149): does a model find and chain facts that are hidden in books, by length of the text?"""
