"""Structured output: what an answer must look like, compiled for llguidance."""
