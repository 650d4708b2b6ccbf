"""The process boundary: the engine's worker, its messages and its asynchronous client."""
