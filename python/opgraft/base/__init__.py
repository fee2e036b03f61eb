"""What every room may use: the environment, locks, hooks on imports, how things print."""
