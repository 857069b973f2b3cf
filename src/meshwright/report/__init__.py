"""What was trained, searched or measured, as pages for people."""
