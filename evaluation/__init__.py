"""Measuring models: held-out documents, LongBench, BABILong, RULER, passkeys, tasks of lm-eval, and gates."""
