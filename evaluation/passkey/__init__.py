"""The passkey task: find a key that is hidden in a long text (arXiv 2305.16300, 2404.07143)."""
