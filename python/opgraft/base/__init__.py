"""What every package may use: environment variables, locks, import hooks, notebook display."""
