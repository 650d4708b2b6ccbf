"""Weights: GGUF files, number formats, and where models come from."""
