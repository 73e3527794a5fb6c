"""LongBench: 21 tasks on long texts, run and scored as the official code does (THUDM/LongBench, arXiv 2308.14508)."""
