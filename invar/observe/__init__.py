"""Metrics, logs and, later, traces."""
