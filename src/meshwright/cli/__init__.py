"""The command line: one verb per file, each a few lines over a function."""
