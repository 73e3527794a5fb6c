"""RULER (arXiv 2404.06654): thirteen synthetic tasks whose length can be chosen, from needles to frequent words."""
