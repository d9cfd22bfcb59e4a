"""A turn and those before it: from the store, a conversation or a carrier."""
