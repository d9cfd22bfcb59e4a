"""Stored responses and conversations of vLLM's Responses API."""
