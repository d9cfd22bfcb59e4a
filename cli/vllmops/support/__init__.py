"""What every package may use and what knows nothing of vLLM."""
