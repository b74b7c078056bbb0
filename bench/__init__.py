"""Benchmarks, installed as `edit_ext.bench`: what a number means and what its ceiling is."""
