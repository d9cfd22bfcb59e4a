"""The actions, a module each."""
