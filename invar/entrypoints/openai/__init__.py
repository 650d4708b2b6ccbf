"""The OpenAI server, as vLLM names it."""
