"""Modules that start a server under the names that vLLM gave them."""
