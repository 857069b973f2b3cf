"""A Plan, its mesh, and how a model's variables and batches are laid out over it."""
