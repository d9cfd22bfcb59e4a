"""The keys that seal what clients carry: a ring of them, its file, and how they change."""
