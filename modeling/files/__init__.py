"""Memories on disk: a folder of safetensors files and an index (docs/memory_files.md describes the format)."""
