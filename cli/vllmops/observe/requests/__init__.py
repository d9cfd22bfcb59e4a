"""The requests in flight of a server: who knows them, how far they are, and their end."""
