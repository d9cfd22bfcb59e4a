"""Keys that protect the conversation state of clients: keyring, its file, rotation, carriers."""
