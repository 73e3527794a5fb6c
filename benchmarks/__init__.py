"""Measurements: scripts to run by hand."""
