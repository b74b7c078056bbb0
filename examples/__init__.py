"""Training programs to run, read and copy."""
