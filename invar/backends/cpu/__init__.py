"""The CPU backend: a graph becomes a native plan over packed weights and paged KV."""
