"""The databases that can hold responses: a module for each kind."""
