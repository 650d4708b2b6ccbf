"""Metrics, access lines, traces, logs."""
