"""Memories as PEFT methods: the config base class, the layer, the tuner, registration and export."""
