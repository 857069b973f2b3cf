"""What users name: strategies, and what can be done with one."""
