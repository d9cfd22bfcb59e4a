"""State that a client holds: put into a sealed carrier, taken out again, and summarized."""
