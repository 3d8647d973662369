"""Benchmarks of `python -m launch.bench`, one module each, and what they share: cases, clients, figures, reports."""
