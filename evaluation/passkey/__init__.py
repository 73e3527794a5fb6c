"""The passkey task: something hidden in a long text is asked for at its end (arXiv 2305.16300, 2404.07143)."""
