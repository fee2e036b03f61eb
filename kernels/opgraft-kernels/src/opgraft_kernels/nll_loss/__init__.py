"""The negative log-likelihood of log-probabilities and class indices, and its gradient."""
