"""The requests in flight of a server: who knows them, how far they are, which are lost."""
