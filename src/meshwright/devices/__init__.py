"""What hardware there is, how it is configured, and where work is placed."""
