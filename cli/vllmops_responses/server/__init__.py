"""Serves the Responses API inside vLLM from a store and from carriers."""
