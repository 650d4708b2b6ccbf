"""HTTP dialects: a request becomes engine requests, what the engine says becomes a response."""
