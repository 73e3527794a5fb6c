"""Measurements: scripts to run by hand, and `calibrate`, which tells `search="auto"` what is fast here."""
